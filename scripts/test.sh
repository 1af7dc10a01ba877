#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
setup '[dev]'
ruff check
mypy
exec python -m pytest "$@"

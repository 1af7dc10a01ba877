#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest. Two files at a time: many tests wait for processes to start.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
setup '[dev]'
ruff check
mypy
exec python -m pytest -n 2 --dist loadfile "$@"

# Sourced by demo.sh and test.sh: `setup EXTRAS` makes .venv once, installs this project into it and puts
# it on PATH. PYTHON names another interpreter than python3.
setup() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local python=${PYTHON:-python3} done=.venv/installed$1
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or newer is needed; $python is not: set PYTHON to one" >&2
        return 2
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python cannot make virtual environments: on Debian, apt-get install python3-venv" >&2
        return 2
    fi
    if [ "$done" -ot pyproject.toml ]; then
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        echo "installing into $PWD/.venv, PyTorch included: several minutes and about 6 GB, once" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$1"
        touch "$done"
    fi
    PATH=$PWD/.venv/bin:$PATH
}

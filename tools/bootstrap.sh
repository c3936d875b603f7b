#!/bin/sh
# Make a virtual environment with one set of locked packages and batchkv itself, editable.
#
# usage: tools/bootstrap.sh VENV SET
#   VENV  the directory to make, or to bring up to date
#   SET   run     a producer host: the packages that `batchkv submit` needs, no MLX
#         worker  a Mac (or Linux) that runs workers: run, MLX and mlx-lm
#         dev     worker, and the packages for tests and lint
#
# Every package is a wheel whose hash is in requirements/: nothing is compiled, and no unlocked
# package is downloaded. uv installs them if it is on PATH, else venv and pip.
set -eu

venv=$1
set_name=$2
cd "$(dirname "$0")/.."
requirements=requirements/$set_name.txt
if [ ! -f "$requirements" ]; then
    echo "No such set of packages: '$set_name' (run, worker or dev)." >&2
    exit 2
fi

# Variables of the caller's Python must not affect the new environment.
unset PYTHONPATH PYTHONHOME || true
export PIP_USER=0
# Some Pythons take macOS 26 for "16.0" unless told not to, and pip and uv then choose a build of
# MLX that leaves out the kernels of the newest chips.
if [ "$(uname -s)" = Darwin ]; then
    export SYSTEM_VERSION_COMPAT=0
    # MLX's package for macOS 26 is installed on 26.0 and 26.1 too, but its library needs 26.2.
    case $set_name-$(sw_vers -productVersion 2>/dev/null) in
        run-*) ;;
        *-26.[01] | *-26.[01].*)
            echo 'Update macOS: MLX for macOS 26 needs 26.2 or newer. Workers may fail here.' >&2
            ;;
    esac
fi
# By default uv trusts its own list of certificate authorities. Behind a company's proxy only the
# machine's list works, which pip uses, too. (Older versions of uv read the second name.)
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" UV_NATIVE_TLS="${UV_NATIVE_TLS:-true}"

have_uv() { uv --version >/dev/null 2>&1; }

# Print the path of the first usable Python. Each candidate is run, because a name on PATH may be
# a version manager's stub for a missing Python. An Apple silicon Mac may also run an Intel Python,
# for which MLX has no build.
find_python() {
    for name in python3.13 python3.12 python3.11 python3.14 python3 python; do
        "$name" -c '
import platform, sys
set_name, needs_venv = sys.argv[1], sys.argv[2]
if needs_venv == "yes":
    import ensurepip, venv
if set_name != "run" and sys.platform == "darwin" and platform.machine() != "arm64":
    sys.exit(1)
if sys.version_info < (3, 11):
    sys.exit(1)
print(sys.executable)
' "$set_name" "$1" 2>/dev/null </dev/null && return 0
    done
    return 1
}

no_python() {
    echo 'batchkv needs Python 3.11 or newer with venv, or uv, on PATH. One of these brings it:' >&2
    echo '    uv, which fetches a Python:  curl -LsSf https://astral.sh/uv/install.sh | sh' >&2
    case $(uname -s) in
        Darwin)
            echo '    Python from https://www.python.org/downloads/' >&2
            echo '    with Homebrew:  brew install python@3.13' >&2
            ;;
        *) echo '    on Debian or Ubuntu:  apt install python3 python3-venv' >&2 ;;
    esac
    exit 1
}

works() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if ! works "$venv/bin/python"; then
    if have_uv; then
        # With no Python of its own choosing here, uv fetches one.
        python=$(find_python no) || python=3.13
        echo "Making $venv with uv ($python)"
        uv venv --quiet --allow-existing --python "$python" "$venv" || no_python
    else
        python=$(find_python yes) || no_python
        echo "Making $venv with $python"
        "$python" -m venv --clear "$venv"
    fi
fi

python=$venv/bin/python
echo "Installing $requirements into $venv"
if have_uv; then
    uv pip install --quiet --python "$python" --require-hashes --only-binary :all: \
        -r "$requirements" -r requirements/build.txt
    uv pip install --quiet --python "$python" --no-deps --no-build-isolation --editable .
else
    # An environment that uv made has no pip of its own.
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes \
        --only-binary :all: -r "$requirements" -r requirements/build.txt
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --editable .
fi

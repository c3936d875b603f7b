#!/bin/sh
# Regenerate requirements/*.txt from pyproject.toml: every package pinned with the hashes of all
# its files, for every platform and Python that batchkv supports, and no index or host named.
#
# usage: tools/lock.sh [uv pip compile options, for example --upgrade]
#
# dev.txt has all packages. The smaller sets are resolved with its pins, so that one machine never
# gets two versions of a package.
set -eu
cd "$(dirname "$0")/.."

if ! command -v uv >/dev/null 2>&1; then
    echo 'make lock needs uv on PATH: pip install uv, then run make lock again.' >&2
    exit 1
fi

compile() {
    output=$1
    shift
    echo "Locking $output"
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$output" "$@"
}

compile requirements/dev.txt --extra worker --extra gateway --group pyproject.toml:dev "$@" \
    pyproject.toml requirements/build.in
compile requirements/worker.txt --constraint requirements/dev.txt --extra worker pyproject.toml
compile requirements/run.txt --constraint requirements/dev.txt pyproject.toml
compile requirements/build.txt --constraint requirements/dev.txt requirements/build.in

# A lock that names a host would send its reader there.
if grep -nE '://|^[[:space:]]*--(index|extra-index|find-links|trusted)' requirements/*.txt; then
    echo 'A lock file names an index or a host (above).' >&2
    exit 1
fi

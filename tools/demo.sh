#!/bin/sh
# Answer the quickstart's prompts with the packaged model, and exit as `batchkv run` does.
#
# usage: tools/demo.sh PATH_OF_BATCHKV [options of `batchkv run`]
#
# The run writes into one temporary directory, so the answers are computed every time. At the end
# the server is stopped, and only the file of answers stays, which the run names.
set -eu

batchkv=$1
shift

# /tmp and not TMPDIR: a socket's path has at most 104 bytes on macOS, and TMPDIR is long there.
state=$(mktemp -d /tmp/batchkv-demo.XXXXXX)
export BATCHKV_HOME="$state/home"
mkdir "$BATCHKV_HOME"
chmod 700 "$BATCHKV_HOME"
# The demo uses neither the caller's server nor the caller's model.
unset BATCHKV_REDIS_URL BATCHKV_REDIS_URL_FILE BATCHKV_MODEL || true

# shellcheck disable=SC2329  # called by the trap
clean_up() {
    code=$?
    trap - EXIT
    if ! "$batchkv" server stop >"$state/stop.log" 2>&1; then
        echo 'The demo could not stop its server:' >&2
        cat "$state/stop.log" >&2
    fi
    rm -rf "$BATCHKV_HOME" "$state/stop.log"
    rmdir "$state" 2>/dev/null || true  # nothing was answered
    exit "$code"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

"$batchkv" run producer/examples/quickstart.jsonl --model demo \
    --output "$state/results.jsonl" "$@"

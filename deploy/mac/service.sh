# shellcheck shell=bash
# What install-worker.sh and install-hub.sh do. Sourced, after the caller has set the names below.
# Written for the bash 3.2 of macOS.
: "${program:?the name that messages begin with}" "${what:?worker or hub}" "${set_name:?of make venv}"

die() {
    printf '%s: %s\n' "$program" "$*" >&2
    exit 2
}

venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv
arguments=()
while [ "$#" -gt 0 ]; do
    case "$1" in
        --venv)
            case "${2:-}" in
                '' | -*) die '--venv needs a value' ;;
            esac
            venv=$2
            shift
            ;;
        -h | --help)
            # The comment at the head of the script.
            awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
            exit 0
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[ -x "$venv/bin/batchkv" ] || die "$venv/bin/batchkv is missing: make venv SET=$set_name"
exec "$venv/bin/batchkv" service install "$what" --system macos ${arguments[@]+"${arguments[@]}"}

# shellcheck shell=bash
# What install-worker.sh and install-hub.sh share. Sourced, after the caller has set the names
# below. Written for the bash 3.2 of macOS.
: "${program:?the name that messages begin with}" "${dry_run:?0 or 1}"

agents=$HOME/Library/LaunchAgents
logs=$HOME/Library/Logs/batchkv
mac_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() {
    printf '%s: %s\n' "$program" "$*" >&2
    exit 2
}

# Print the comment at the head of the script: its usage.
usage() {
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
}

need_mac() {
    if [ "$dry_run" -eq 0 ] && [ "$(uname -s)" != Darwin ]; then
        die 'this needs macOS (launchd); --dry-run shows elsewhere what it would do'
    fi
}

# An option that needs a value has one, and not the next option.
need_value() {
    case "${2:-}" in
        '' | -*) die "$1 needs a value" ;;
    esac
}

need_label() {
    case "$1" in
        *[!A-Za-z0-9._-]* | .* | '') die "'$1' is not a label (letters, digits, dot, dash)" ;;
    esac
}

# No control character may reach the agent or the terminal.
need_plain() {
    case "$2" in
        *[[:cntrl:]]*) die "$1 must not hold control characters" ;;
    esac
}

# A file that holds a password: ours, readable, and nobody else's to read or write.
need_private_file() {
    [ -f "$1" ] || die "$1 is not a file"
    [ -r "$1" ] || die "$1 cannot be read"
    [ -O "$1" ] || die "$1 belongs to somebody else"
    if [ -n "$(find -L "$1" -prune \( -perm -040 -o -perm -020 -o -perm -04 -o -perm -02 \))" ]
    then
        die "$1 can be read or written by others: chmod 600 '$1'"
    fi
}

absolute() {
    case "$1" in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s/%s\n' "$PWD" "$1" ;;
    esac
}

# Run a command, or in a dry run only show it (on standard error: standard output has the agent).
run() {
    if [ "$dry_run" -eq 1 ]; then
        printf 'would run: %s\n' "$*" >&2
    else
        "$@"
    fi
}

is_loaded() {
    launchctl print "gui/$(id -u)/$1" >/dev/null 2>&1
}

# Stop an agent and wait until launchd has forgotten it: bootout returns before the process ended,
# and a bootstrap that comes too early fails.
unload_agent() {
    if [ "$dry_run" -eq 1 ]; then
        run launchctl bootout "gui/$(id -u)/$1"
        return 0
    fi
    is_loaded "$1" || return 0
    launchctl bootout "gui/$(id -u)/$1" || true
    local waited=0
    while is_loaded "$1"; do
        [ "$waited" -lt 130 ] || die "$1 does not stop"
        sleep 1
        waited=$((waited + 1))
    done
}

# install_agent PYTHON LABEL TEMPLATE NAME=VALUE ...: write the agent and (re)start it.
install_agent() {
    local python=$1 label=$2 template=$3 plist=$agents/$2.plist
    shift 3
    set -- "$python" "$mac_dir/render_plist.py" "$mac_dir/$template" "LABEL=$label" "$@"
    if [ "$dry_run" -eq 1 ]; then
        printf 'would write: %s\n' "$plist" >&2
        "$@"
    else
        mkdir -p "$agents" "$logs"
        "$@" >"$plist.new" || die "could not write $plist"
        mv -f "$plist.new" "$plist"
    fi
    unload_agent "$label"
    run launchctl enable "gui/$(id -u)/$label"
    run launchctl bootstrap "gui/$(id -u)" "$plist"
}

uninstall_agent() {
    unload_agent "$1"
    run rm -f "$agents/$1.plist"
}

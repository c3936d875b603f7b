#!/usr/bin/env bash
# Run a batchkv worker on this Mac under launchd: from login on, restarted when it ends, and
# keeping the Mac awake.
#
# usage: install-worker.sh --model MODEL --url-file FILE [--cache-file FILE] [--venv DIR]
#                          [--label LABEL] [--dry-run]
#        install-worker.sh --uninstall [--label LABEL] [--dry-run]
#
#   --model MODEL    the model to serve: a Hugging Face repository, a local folder's full path, or
#                    demo; the same name that producers give, because it names the queue
#   --url-file FILE  holds the queue's URL, one line (redis://:PASSWORD@HOST:6379/0), mode 600
#   --cache-file FILE  names the tiers of the cache (BATCHKV_CACHE_FILE, docs/settings.md), mode 600;
#                    without it this worker shares no prefixes
#   --venv DIR       where batchkv is installed (default: .venv of this checkout)
#   --label LABEL    launchd's name for it (default: dev.batchkv.worker); one for each model when
#                    a Mac serves several
#   --dry-run        print the agent and the commands, and change nothing; works on Linux too
#   --uninstall      stop the worker and remove its agent; the log and the URL's file stay
#
# Safe to run again: the worker is stopped (it gives its jobs back) and started with the new
# values. That is also how an upgrade takes effect.
set -euo pipefail

program=install-worker.sh
dry_run=0
uninstall=0
model=''
url_file=''
cache_file=''
label=dev.batchkv.worker
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
venv=$(cd "$mac_dir/../.." && pwd)/.venv

while [ "$#" -gt 0 ]; do
    case "$1" in
        --model) need_value "$@"; model=$2; shift 2 ;;
        --url-file) need_value "$@"; url_file=$2; shift 2 ;;
        --cache-file) need_value "$@"; cache_file=$2; shift 2 ;;
        --venv) need_value "$@"; venv=$2; shift 2 ;;
        --label) need_value "$@"; label=$2; shift 2 ;;
        --dry-run) dry_run=1; shift ;;
        --uninstall) uninstall=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown option '$1' (--help lists them)" ;;
    esac
done
need_label "$label"
need_mac

if [ "$uninstall" -eq 1 ]; then
    uninstall_agent "$label"
    exit 0
fi

[ -n "$model" ] || die '--model is missing'
[ -n "$url_file" ] || die '--url-file is missing'
need_plain --model "$model"
need_plain --url-file "$url_file"
need_plain --venv "$venv"
venv=$(absolute "$venv")
url_file=$(absolute "$url_file")
python=$venv/bin/python

need_private_file "$url_file"
# The URL itself is never printed: it holds the password.
grep -Eq '^(redis|rediss|unix)://[^[:space:]]+$' "$url_file" ||
    die "$url_file does not hold a URL such as redis://:PASSWORD@HOST:6379/0"
if [ -n "$cache_file" ]; then
    need_plain --cache-file "$cache_file"
    cache_file=$(absolute "$cache_file")
    need_private_file "$cache_file"
fi
[ -x "$venv/bin/batchkv" ] || die "$venv/bin/batchkv is missing: make venv SET=worker"
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("mlx") is None)' ||
    die "$venv has no MLX: make venv SET=worker"

log=$logs/$label.log
install_agent "$python" "$label" worker.plist \
    "VENV=$venv" "MODEL=$model" "URL_FILE=$url_file" "CACHE_FILE=$cache_file" "HOME=$HOME" "LOG=$log"
printf 'Worker %s for %s; its log: %s\n' "$label" "$model" "$log" >&2

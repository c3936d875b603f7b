#!/usr/bin/env bash
# Run a batchkv worker on this Mac as a service. This is `batchkv service install worker` of the
# checkout that the script lies in, which also works on Linux.
#
# usage: install-worker.sh --model MODEL --url-file FILE [--cache-file FILE] [--label LABEL]
#                          [--daemon] [--venv DIR] [--dry-run] [FLAG OF THE WORKER...]
#        install-worker.sh --uninstall [--label LABEL] [--daemon] [--dry-run]
#
#   --model MODEL    the model to serve: a Hugging Face repository, a local folder's full path, or
#                    demo; the same name that producers give, because it names the queue
#   --url-file FILE  holds the queue's URL, one line (redis://USER:PASSWORD@HOST:6379/0), mode 600
#   --cache-file FILE  names the tiers of the cache (BATCHKV_CACHE_FILE, docs/settings.md), mode 600;
#                    without it this worker shares no prefixes
#   --label LABEL    launchd's name for it (default: dev.batchkv.worker); one for each model when
#                    a Mac serves several
#   --daemon         a daemon of this Mac, which starts with it and needs no login; call the script
#                    with sudo then
#   --venv DIR       where batchkv is installed (default: .venv of this checkout)
#   --dry-run        print the service and the commands, and change nothing; works on Linux too
#   --uninstall      stop the worker and remove its service; the log and the URL's file stay
#
# Safe to run again: the worker is stopped (it gives its jobs back) and started with the new
# values. That is also how an upgrade takes effect.
set -euo pipefail

program=install-worker.sh
what=worker
set_name=worker
# shellcheck source=service.sh
. "$(dirname "$0")/service.sh"

#!/usr/bin/env bash
# Run the hub on this Mac as services: the queue's server and, on request, the cache's. This is
# `batchkv service install hub` of the checkout that the script lies in.
#
# usage: install-hub.sh --hub DIR [--cache] [--daemon] [--venv DIR] [--dry-run]
#        install-hub.sh --uninstall [--daemon] [--dry-run]
#
#   --hub DIR    the directory that deploy/hub/setup.sh made
#   --cache      the cache's server too
#   --daemon     daemons of this Mac, which start with it and need no login; call the script with
#                sudo then
#   --venv DIR   where batchkv is installed (default: .venv of this checkout)
#   --dry-run    print the services and the commands, and change nothing; works on Linux too
#   --uninstall  stop the servers and remove their services; the hub's directory stays as it is
#
# Safe to run again: the servers are restarted with the configuration as it stands then.
set -euo pipefail

program=install-hub.sh
what=hub
set_name=run
# shellcheck source=service.sh
. "$(dirname "$0")/service.sh"

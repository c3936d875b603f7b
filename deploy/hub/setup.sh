#!/usr/bin/env bash
# Make the hub's directory: configurations, passwords, and the URL that the Macs get.
#
# usage: deploy/hub/setup.sh HUB HOST
#   HUB   the directory to make or to bring up to date, for example ~/batchkv-hub
#   HOST  the name or address by which the other machines reach this one, for example studio.local
#
# Run again, it renews the configurations and the URLs and keeps passwords and data. To change a
# password, delete its file under HUB/secrets first.
set -euo pipefail

usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }
die() { printf 'setup.sh: %s\n' "$*" >&2; exit 2; }

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
[ "$#" -eq 2 ] || { usage >&2; exit 2; }
hub=$1
host=$2
case "$host" in
    '' | *[!A-Za-z0-9.:_-]*) die "'$host' is not a host name or an address" ;;
esac
# An IPv6 address needs brackets in a URL.
case "$host" in
    *:*) host="[$host]" ;;
esac

here=$(cd "$(dirname "$0")" && pwd)
umask 077
mkdir -p "$hub/secrets" "$hub/state/queue" "$hub/state/cache"
hub=$(cd "$hub" && pwd)
for file in queue.conf cache.conf compose.yaml; do
    cp "$here/$file" "$hub/$file"
done

# 32 hexadecimal digits: long enough for a server that answers a hundred thousand guesses a second.
make_password() {
    od -An -N16 -tx1 /dev/urandom | tr -d ' \n'
}

for name in queue cache; do
    password_file=$hub/secrets/$name-password.conf
    if [ ! -s "$password_file" ]; then
        printf 'requirepass %s\n' "$(make_password)" >"$password_file"
    fi
done

# The URLs hold the passwords, so they are files to copy and never arguments.
write_url() {
    printf 'redis://:%s@%s:%s/0\n' \
        "$(cut -d ' ' -f 2 "$hub/secrets/$1-password.conf")" "$host" "$2" >"$hub/secrets/$1.url"
}
write_url queue 6379
write_url cache 6380
# What a worker's BATCHKV_CACHE_FILE is to hold: its own disk first, then the hub's cache.
printf 'disk:~/.batchkv/blocks?max=20GB %s\n' "$(cat "$hub/secrets/cache.url")" \
    >"$hub/secrets/cache.tiers"
printf 'HUB_UID=%s\nHUB_GID=%s\n' "$(id -u)" "$(id -g)" >"$hub/.env"

cat <<END
The hub's directory is ready: $hub
On Linux with Docker:  cd $hub && docker compose up -d
On a Mac:              deploy/mac/install-hub.sh --hub $hub
Every worker and every producer gets a copy of $hub/secrets/queue.url, readable by its owner only;
a worker that is to share prefixes also one of $hub/secrets/cache.tiers.
END

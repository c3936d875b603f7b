#!/usr/bin/env bash
# Make the hub's directory: configurations, users with least rights, and the URLs that the other
# machines get, one for each role.
#
# usage: deploy/hub/setup.sh HUB HOST
#   HUB   the directory to make or to bring up to date, for example ~/batchkv-hub
#   HOST  the name or address by which the other machines reach this one, for example studio.local
#
# A second run renews the configurations, the users' rights and the URLs. It keeps passwords, data
# and .env. To change a password, delete its file under HUB/secrets/passwords first.
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
mkdir -p "$hub/secrets/passwords" "$hub/state/queue" "$hub/state/cache"
hub=$(cd "$hub" && pwd)
for file in queue.conf cache.conf compose.yaml; do
    cp "$here/$file" "$hub/$file"
done

# 32 hexadecimal digits: long enough for a server that answers a hundred thousand guesses a second.
make_password() {
    od -An -N16 -tx1 /dev/urandom | tr -d ' \n'
}

# Passwords go from file to file, through pipes and builtins of the shell. None of them is ever an
# argument of a program, because all users of a machine can see those.
digest() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d ' ' -f 1
}

# write_users SERVER USER ...: the server's users, with digests of their passwords.
write_users() {
    local server=$1 user file
    shift
    for user in "$@"; do
        file=$hub/secrets/passwords/$server-$user
        [ -s "$file" ] || make_password >"$file"
        printf '%s %s\n' "$user" "$(digest <"$file")"
    done >"$hub/secrets/$server-users.new"
    # Remove comments and join continued lines, because the server supports neither.
    awk 'FNR == NR { digests[$1] = $2; next }
        /^#/ || NF == 0 { next }
        {
            for (name in digests) gsub("@" name "@", digests[name])
            sub(/^ +/, "")
            printf "%s%s", (/^user / ? separator : " "), $0
            separator = "\n"
        }
        END { print "" }' "$hub/secrets/$server-users.new" "$here/$server.acl" \
        >"$hub/secrets/$server-users.acl"
    rm "$hub/secrets/$server-users.new"
}
write_users queue producer worker admin
write_users cache cache admin

# The URLs contain the passwords, so they are files to copy, and never arguments.
write_url() {
    printf 'redis://%s:%s@%s:%s/0\n' \
        "$3" "$(cat "$hub/secrets/passwords/$2-$3")" "$host" "$4" >"$hub/secrets/$1.url"
}
write_url producer queue producer 6379
write_url worker queue worker 6379
write_url admin queue admin 6379
write_url cache cache cache 6380
# The contents of a worker's BATCHKV_CACHE_FILE: its own disk first, then the hub's cache.
printf 'disk:~/.batchkv/blocks?max=20GB %s\n' "$(cat "$hub/secrets/cache.url")" \
    >"$hub/secrets/cache.tiers"
# Docker's variables. Lines that others added, like HUB_ADDRESS, stay.
{
    [ ! -f "$hub/.env" ] || awk '!/^HUB_[UG]ID=/' "$hub/.env"
    printf 'HUB_UID=%s\nHUB_GID=%s\n' "$(id -u)" "$(id -g)"
} >"$hub/.env.new"
mv "$hub/.env.new" "$hub/.env"

cat <<END
The hub's directory is ready: $hub
Start it on a Mac, or on Linux with systemd:  batchkv service install hub --hub $hub
Or on Linux with Docker:                      cd $hub && docker compose up -d queue
Copy $hub/secrets/worker.url to each machine that runs a worker, and
$hub/secrets/producer.url to each machine that submits. Let only their owner read the copies.
A worker that shares prefixes also needs $hub/secrets/cache.tiers. admin.url stays here.
END

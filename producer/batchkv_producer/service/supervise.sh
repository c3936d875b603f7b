#!/bin/sh
# Run one service under launchd. launchd starts a program again however it ended, and lets its log
# grow without bound; this does the rest.
#
# usage: supervise.sh LOG CODES SECONDS AWAKE PROGRAM [ARGUMENT...]
#   LOG      the file for the output. When it is above 10 MB, its content moves to LOG.1
#   CODES    exit codes of a wrong configuration, like "2 126". After one of them it waits SECONDS
#            before it ends, so that launchd does not start the program again at once
#   AWAKE    yes: the machine does not sleep while the program runs
#
# A stop (TERM) is passed on to the program, and ends the wait. Its exit code is the program's.
set -u

log=$1
codes=$2
seconds=$3
awake=$4
shift 4
max_bytes=10485760
child=''
rotor=''
is_stopped=no

rotate() {
    size=$(wc -c <"$log" 2>/dev/null) || return 0
    if [ "$size" -gt "$max_bytes" ]; then
        cp "$log" "$log.1" && : >"$log"
    fi
}

# Wait for a process whose number is in $child, however often a signal interrupts the wait.
await_child() {
    while :; do
        is_interrupted=no
        code=0
        wait "$child" || code=$?
        [ "$is_interrupted" = yes ] || return 0
    done
}

# It ends soon after the program, by itself: a signal may come before it can be heeded.
rotate_now_and_then() {
    while kill -0 "$child" 2>/dev/null; do
        sleep 5
        rotate
    done
}

# shellcheck disable=SC2317  # the trap calls it
stop() {
    is_stopped=yes
    is_interrupted=yes
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}

exec >>"$log" 2>&1
rotate
trap stop TERM INT HUP
"$@" &
child=$!
[ "$is_stopped" = no ] || kill -TERM "$child" 2>/dev/null
rotate_now_and_then &
rotor=$!
if [ "$awake" = yes ]; then
    caffeinate -i -w "$child" &
fi
await_child
ended=$code
child=''
for bad in $codes; do
    if [ "$ended" -eq "$bad" ] && [ "$is_stopped" = no ]; then
        printf 'batchkv: exit code %s is one of a wrong configuration. ' "$ended"
        printf 'Next try in %s s; installing the service again tries at once.\n' "$seconds"
        while [ "$seconds" -gt 0 ] && [ "$is_stopped" = no ]; do
            sleep 1
            seconds=$((seconds - 1))
        done
    fi
done
kill "$rotor" 2>/dev/null
exit "$ended"

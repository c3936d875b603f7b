"""The queue's server: whether it is reached, how it is set up, and what this user may do on it.

Rights are tried with commands on keys that do not exist, so nothing changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn, worst
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.errors import BatchkvError
from batchkv_producer.server import connection
from batchkv_producer.wire import redis_keys

NONE = "0000000000000000"  # the id of no batch
NUM_PINGS = 9
SLOW_MS = 50.0
FULL_SHARE = 0.9

Command = tuple[str | float | int, ...]
_QUEUE = redis_keys.queue_name("none")
# Each changes nothing, because its keys are not there.
WORKER_COMMANDS: tuple[Command, ...] = (
    ("LPOP", f"{redis_keys.queue(_QUEUE)}:none"),
    ("EVALSHA", "0" * 40, 0),
    ("HGETALL", redis_keys.batch(NONE)),
    ("HDEL", redis_keys.results(NONE), "none"),
    ("LREM", redis_keys.done(NONE), 0, "none"),
    ("HDEL", redis_keys.held(NONE), "none"),
    ("DEL", f"{redis_keys.maintenance_lock(_QUEUE)}:none"),
    ("HDEL", redis_keys.due(_QUEUE), "none"),
    ("HDEL", redis_keys.job("none"), "none"),
    ("ZREM", redis_keys.registry("wip", _QUEUE), "none"),
    ("ZREM", redis_keys.registry("finished", _QUEUE), "none"),
    ("ZREM", redis_keys.registry("failed", _QUEUE), "none"),
    ("DEL", redis_keys.worker("batchkv-doctor:none")),
    ("SREM", redis_keys.workers(_QUEUE), "none"),
    ("EXISTS", redis_keys.SUSPENDED),
    ("TIME",),
)
PRODUCER_COMMANDS: tuple[Command, ...] = (
    ("ZADD", redis_keys.BATCHES, "XX", 0, NONE),
    ("HDEL", redis_keys.batch(NONE), "none"),
    ("HGETALL", redis_keys.worker("batchkv-doctor:none")),
    ("LREM", redis_keys.queue(_QUEUE), 0, "none"),
    ("EVALSHA", "0" * 40, 0),
)


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """``fault`` says why there is no connection. ``lacks_*`` are commands that are refused."""

    fault: str = ""
    version: str = ""
    milliseconds: float = 0.0
    warnings: tuple[str, ...] = ()
    used_bytes: int = 0
    max_bytes: int = 0
    keeps_log: bool | None = None
    writes_log: bool = True
    lacks_work: tuple[str, ...] = ()
    lacks_submit: tuple[str, ...] = ()


def queue_facts(url: str) -> QueueFacts:
    """Connect, ask, and let go again. Raises nothing that Redis may say."""
    notes: list[str] = []
    try:
        with connection.connect(url, notes.append) as redis, connection.server_errors(url):
            info = _info(redis)
            return QueueFacts(
                "",
                str(info.get("valkey_version") or info.get("redis_version", "")),
                _round_trip_ms(redis),
                tuple(notes),
                int(info.get("used_memory", 0)),
                int(info.get("maxmemory", 0)),
                bool(int(info["aof_enabled"])) if "aof_enabled" in info else None,
                info.get("aof_last_write_status", "ok") == "ok",
                refused(redis, WORKER_COMMANDS),
                refused(redis, PRODUCER_COMMANDS),
            )
    except BatchkvError as fault:
        return QueueFacts(fault=str(fault))


def refused(redis: Redis, commands: Sequence[Command]) -> tuple[str, ...]:
    """The first words of those commands that this user may not give."""
    with redis.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        answers = pipeline.execute(raise_on_error=False)
    pairs = zip(commands, answers, strict=True)
    words = (
        f"{command[0]} {_kind(command)}".strip()
        for command, answer in pairs
        if isinstance(answer, NoPermissionError)
    )
    return tuple(dict.fromkeys(words))


def _kind(command: Command) -> str:
    """Of which keys a command is, such as ``rq:wip``."""
    if len(command) < 2 or ":" not in str(command[1]):
        return ""
    return ":".join(str(command[1]).split(":")[:2])


def _info(redis: Redis) -> dict[str, Any]:
    try:
        found: dict[str, Any] = redis.info()
    except NoPermissionError:
        return {}
    return found


def _round_trip_ms(redis: Redis) -> float:
    spent = []
    for _ in range(NUM_PINGS):
        began = time.monotonic()
        with suppress(RedisError):  # a full disk is an answer, too
            redis.ping()
        spent.append((time.monotonic() - began) * 1000)
    return statistics.median(spent)


def judge_queue(facts: QueueFacts) -> Verdict:
    """It answers, keeps what it is given, and has room."""
    if facts.fault:
        sentence, _, todo = facts.fault.partition(": ")
        return fail(
            sentence if todo else facts.fault, todo or "look at address, password and server"
        )
    verdicts = [_of_warning(text) for text in facts.warnings]
    if not facts.writes_log:
        verdicts.append(fail("the server cannot write to its disk", "make room on its disk"))
    elif facts.keeps_log is False:
        verdicts.append(
            warn(
                "the server keeps no append-only file: a loss of power loses queued rows",
                "set `appendonly yes` there; deploy/hub/queue.conf has all settings",
            )
        )
    if facts.max_bytes and facts.used_bytes > FULL_SHARE * facts.max_bytes:
        share = facts.used_bytes / facts.max_bytes
        verdicts.append(
            warn(
                f"the server's memory is full to {share:.0%}",
                "`batchkv forget` old batches, or raise maxmemory",
            )
        )
    if facts.milliseconds > SLOW_MS:
        verdicts.append(
            warn(
                f"a round trip takes {facts.milliseconds:.0f} ms",
                "use a cable, or a server nearer by",
            )
        )
    named = f"version {facts.version}, " if facts.version else ""
    return worst(
        verdicts, ok(f"the queue's server answers: {named}{facts.milliseconds:.1f} ms a round trip")
    )


def _of_warning(text: str) -> Verdict:
    """A warning of ``connection`` has what to do behind its last colon."""
    found, _, todo = text.rpartition(": ")
    return warn(found or text, todo)


def judge_rights(facts: QueueFacts) -> Verdict | None:
    """A worker's user may work, a producer's submit, the admin both."""
    if facts.fault:
        return None
    can_work, can_submit = not facts.lacks_work, not facts.lacks_submit
    if can_work:
        return ok("this user may run workers" + (" and submit" if can_submit else ""))
    if can_submit:
        return ok(
            "this user may submit, and run no workers",
            "a worker needs the URL of the worker's user",
        )
    lacks = (
        facts.lacks_work[0]
        if len(facts.lacks_work) < len(WORKER_COMMANDS) / 2
        else (facts.lacks_submit[0])
    )
    return fail(
        f"this user may neither run workers nor submit: {lacks} is refused",
        "use the URL of the right user; or run setup.sh of this version on the hub and start its "
        "server again",
    )


def checks(url: str) -> tuple[Check[QueueFacts], ...]:
    """The two checks of one URL, which ask it once."""
    known: list[QueueFacts] = []

    def gather(machine: Machine) -> QueueFacts:
        if not known:
            known.append(queue_facts(url))
        return known[0]

    return Check("queue server", gather, judge_queue), Check("queue rights", gather, judge_rights)

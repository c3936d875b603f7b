"""The tiers of the cache: whether they are reached, with which rights, and how fast.

A tier pays only if blocks come faster than prompts are computed. What is written to measure that
has a name of no block, ends by itself within a minute, and is deleted at once.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisError

from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.lease import PREFIX as LEASE_PREFIX
from batchkv_cache_store.opening import parse_tiers, queue_conflict
from batchkv_cache_store.tiers.redis import PREFIX as BLOCK_PREFIX
from batchkv_cache_store.tiers.spec_types import DiskSpec, RedisSpec, TierSpec
from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_producer.doctor.home_folder import existing_above, free_bytes

MEASURED_BYTES = 8 * 2**20  # about a block of 256 tokens
NUM_READS = 4
NUM_PINGS = 9
KEY_MILLISECONDS = 60_000
CONNECT_SECONDS = 3.0
REPLY_SECONDS = 15.0
FEW_BYTES = 2 * 2**30
# MB/s at which loading a prefix is as fast as computing it, on an M4 Max with a model of 4 billion
# parameters: with 8 bits a number, and with 4.
USUAL_BREAK_EVEN = {"8 bits": 127.0, "4 bits": 67.0}

Step = tuple[str, Callable[[], Verdict | None]]


@dataclass(frozen=True, slots=True)
class Speed:
    """What a tier was measured to do."""

    round_trip_ms: float
    write_mb: float  # MB a second
    read_mb: float


def steps(request: Mapping[str, Any], break_even: float | None = None) -> Iterator[Step]:
    """One check for each tier. ``break_even``: MB/s of the model that was checked before."""
    text, queue = str(request.get("cache") or ""), str(request.get("queue") or "")
    try:
        specs = parse_tiers(text)
    except ValueError as fault:
        said = str(fault)
        yield "cache", lambda: fail(said, "correct --cache, BATCHKV_CACHE or its file")
        return
    if conflict := queue_conflict(specs, queue):
        sentence = conflict
        yield "cache", lambda: fail(*_split(sentence))
    for spec in specs:
        yield f"{spec.kind} tier", partial(tier_verdict, spec, break_even)


def tier_verdict(spec: TierSpec, break_even: float | None) -> Verdict:
    """Open the tier as a guest, who makes and evicts nothing, and look at it."""
    if isinstance(spec, DiskSpec) and not spec.path.exists():
        return missing_folder_verdict(spec)
    try:
        tier = spec.open(as_guest=True)
        try:
            tier.check()
        finally:
            tier.close()
    except TierMisconfigured as fault:
        return fail(*_split(f"the {spec.kind} tier cannot be used: {fault}"))
    except TierError as fault:
        return (warn if isinstance(spec, DiskSpec) else fail)(
            f"the {spec.kind} tier is away: {fault}",
            "workers go on without it and ask it again; look at its server or volume",
        )
    if isinstance(spec, RedisSpec):
        return redis_verdict(spec, break_even)
    if isinstance(spec, DiskSpec):
        return disk_verdict(spec)
    return ok(f"the {spec.kind} tier can be used")


def redis_verdict(spec: RedisSpec, break_even: float | None) -> Verdict:
    """Rights and speed of a Redis tier."""
    with Redis.from_url(
        spec.url, socket_connect_timeout=CONNECT_SECONDS, socket_timeout=REPLY_SECONDS
    ) as redis:
        try:
            lacks = refused(redis)
            if lacks:
                return fail(
                    f"this user may not use the Redis tier: {', '.join(lacks)} is refused",
                    "use the URL of the cache's user; or run setup.sh of this version on the hub",
                )
            return judge_speed("redis", measure_redis(redis), break_even)
        except OutOfMemoryError:
            return warn(
                "the redis tier is full, and drops nothing",
                "set maxmemory-policy allkeys-lru there",
            )
        except RedisError as fault:
            return warn(
                f"the redis tier did not answer in time: {type(fault).__name__}",
                "look at its server and at the network",
            )


def refused(redis: Redis) -> tuple[str, ...]:
    """Commands that a worker needs and this user may not give, on keys that are not there."""
    block, lease = f"{BLOCK_PREFIX}{'0' * 64}.doctor", f"{LEASE_PREFIX}{'0' * 64}.doctor"
    commands: Sequence[tuple[str | int, ...]] = (
        ("GETRANGE", block, 0, 1),
        ("STRLEN", block),
        ("EXISTS", block),
        ("DEL", block),
        ("PEXPIRE", block, 1),
        ("GET", lease),
        ("DEL", lease),
        ("EVALSHA", "0" * 40, 0),
        ("SCAN", 0, "COUNT", 1),
    )
    with redis.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        answers = pipeline.execute(raise_on_error=False)
    pairs = zip(commands, answers, strict=True)
    return tuple(
        dict.fromkeys(str(c[0]) for c, answer in pairs if isinstance(answer, NoPermissionError))
    )


def measure_redis(redis: Redis) -> Speed:
    """Write one value, read it several times, delete it. Raises RedisError."""
    key = f"{BLOCK_PREFIX}{secrets.token_hex(32)}.doctor"
    data = os.urandom(MEASURED_BYTES)
    trips = []
    for _ in range(NUM_PINGS):
        began = time.monotonic()
        redis.strlen(key)
        trips.append(time.monotonic() - began)
    trip = statistics.median(trips)
    try:
        began = time.monotonic()
        redis.set(key, data, px=KEY_MILLISECONDS)
        wrote = time.monotonic() - began
        began = time.monotonic()
        for _ in range(NUM_READS):
            redis.getrange(key, 0, MEASURED_BYTES)
        read = (time.monotonic() - began) / NUM_READS
    finally:
        with suppress(RedisError):
            redis.delete(key)
    return Speed(trip * 1000, _mb(wrote - trip), _mb(read - trip))


def _mb(seconds: float) -> float:
    return MEASURED_BYTES / 1e6 / max(seconds, 1e-6)


def judge_speed(kind: str, speed: Speed, break_even: float | None) -> Verdict:
    """Faster than computing: the cache pays. Workers measure it themselves, and load only then."""
    shown = (
        f"the {kind} tier reads {speed.read_mb:,.0f} and writes {speed.write_mb:,.0f} MB/s, "
        f"{speed.round_trip_ms:.1f} ms a round trip"
    )
    limits = USUAL_BREAK_EVEN if break_even is None else {"this model": break_even}
    short = [name for name, limit in limits.items() if speed.read_mb < limit]
    if not short:
        return ok(shown)
    if break_even is not None:
        needed = f"; computing a prompt is as fast as loading it at {break_even:,.0f} MB/s"
        return warn(shown + needed, "use --kv-scheme affine4, a faster network, or no such tier")
    if len(short) == len(limits):
        return warn(
            f"{shown}, too slow to load prefixes on a fast Mac",
            "use a faster network, or no such tier",
        )
    return ok(shown, "on a fast Mac only blocks of 4 bits (--kv-scheme affine4) pay at this speed")


def missing_folder_verdict(spec: DiskSpec) -> Verdict:
    """A worker makes the folder itself, but never the volume on which it is to be."""
    free = free_bytes(existing_above(spec.path)) or 0
    if spec.path.parent.exists() or spec.path.is_relative_to(Path.home()):
        return ok(f"the disk tier is made by the first worker, {free / 1e9:,.0f} GB free")
    return warn(
        "the disk tier is away: the folder above its own is missing",
        "mount its volume, or make that folder",
    )


def disk_verdict(spec: DiskSpec) -> Verdict:
    """Room for what the tier may hold, and a write that arrives."""
    free = free_bytes(spec.path) or 0
    used = spec.max_bytes
    wrote = measure_disk(str(spec.path))
    if wrote is None:
        return fail(
            "the disk tier's folder cannot be written",
            "give it to this user, or choose another folder",
        )
    if free < FEW_BYTES:
        return warn(
            f"the disk of the disk tier has {free / 1e9:,.1f} GB left",
            f"make room, or lower max= (now {used / 1e9:,.0f} GB)",
        )
    return ok(
        f"the disk tier writes {wrote:,.0f} MB/s, {free / 1e9:,.0f} GB free, at most "
        f"{used / 1e9:,.0f} GB used"
    )


def measure_disk(folder: str) -> float | None:
    """MB/s of a write that is on the disk; None if it fails. The file has no name."""
    data = os.urandom(MEASURED_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            for _ in range(NUM_READS):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return NUM_READS * MEASURED_BYTES / 1e6 / max(time.monotonic() - began, 1e-6)
    except OSError:
        return None


def _split(sentence: str) -> tuple[str, str]:
    """What was found, and behind the last colon what to do."""
    found, _, todo = sentence.rpartition(": ")
    return (found, todo) if found else (sentence, "correct --cache, BATCHKV_CACHE or its file")

"""Leases on blocks that are being computed, so that two workers do not compute one prefix.

A worker that misses blocks of a chain takes the leases on all of them, computes, publishes, and
releases each lease. A worker that does not get the first lease does other work and looks again. A
lease ends by itself: a worker that dies holds it for ``ttl_seconds`` at most. Leases only save
work. If two workers hold one, after a pause or without Redis, a block is computed twice and stored
once.

In Redis a lease is the key ``batchkv-lease:<key in hex>`` with the holder's token as its value. It
is taken with ``SET NX PX``. Scripts that compare the token first renew and release it. In a
process, leases exclude each other even while Redis does not answer.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from batchkv_cache_store.breaker import Breaker

PREFIX = "batchkv-lease:"
TTL_SECONDS = 30.0
MAX_HOLD_SECONDS = 900.0
REPLY_TIMEOUT_SECONDS = 2.0

_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

_NO_ANSWER = object()

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """The right to compute a block.

    ``is_lost``: another worker has it now; the holder may go on or stop. ``is_granted``: Redis has
    granted it, or does not answer; False while the request runs.
    """

    key: bytes
    taken_at: float
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    is_lost: bool = False
    is_granted: bool = False


class Leases(Protocol):
    """The methods of both kinds of leases. None of them raises."""

    def acquire(self, key: bytes) -> Lease | None:
        """Take the lease on this block. Returns None while another worker holds it."""

    def acquire_chain(self, keys: Sequence[bytes]) -> list[Lease]:
        """Take the free leases on the blocks of a chain; none if the first one is not free."""

    def release(self, lease: Lease) -> None:
        """Release the lease. Does nothing for one that was lost or released before."""

    def release_many(self, leases: Sequence[Lease]) -> None:
        """Release all of them, in one round trip."""

    def close(self) -> None:
        """Release all leases."""


class LocalLeases:
    """Leases among the threads of one process. A lease ends after ``max_hold_seconds``."""

    def __init__(
        self,
        max_hold_seconds: float = MAX_HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_hold_seconds = max_hold_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, Lease] = {}

    def acquire(self, key: bytes) -> Lease | None:
        now = self._clock()
        with self._lock:
            holder = self._held.get(key)
            if holder is not None:
                if now - holder.taken_at < self._max_hold_seconds:
                    return None
                holder.is_lost = True
            lease = self._held[key] = Lease(key, now)
            return lease

    def acquire_chain(self, keys: Sequence[bytes]) -> list[Lease]:
        first = self.acquire(keys[0]) if keys else None
        if first is None:
            return []
        return [first, *(lease for key in keys[1:] if (lease := self.acquire(key)) is not None)]

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._held.get(lease.key) is lease:
                del self._held[lease.key]

    def release_many(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.release(lease)

    def close(self) -> None:
        with self._lock:
            self._held.clear()

    def held(self) -> list[Lease]:
        """Leases that are held now, after removing those that were held for too long."""
        now = self._clock()
        with self._lock:
            for lease in list(self._held.values()):
                if now - lease.taken_at >= self._max_hold_seconds:
                    lease.is_lost = True
                    del self._held[lease.key]
            return list(self._held.values())


class RedisLeases:
    """Leases among all workers that share the Redis database at ``url``.

    A thread renews the held leases every third of ``ttl_seconds``, each for ``max_hold_seconds`` at
    most, so that a worker that hangs does not block the others. While Redis does not answer, leases
    hold in this process only.
    """

    def __init__(
        self,
        url: str,
        ttl_seconds: float = TTL_SECONDS,
        max_hold_seconds: float = MAX_HOLD_SECONDS,
    ) -> None:
        self._local = LocalLeases(max_hold_seconds)
        self._ttl_ms = max(1, int(ttl_seconds * 1000))
        self._redis = Redis.from_url(
            url,
            socket_connect_timeout=REPLY_TIMEOUT_SECONDS,
            socket_timeout=REPLY_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 1),
        )
        # One failure is enough, because callers wait for the answer.
        self._breaker = Breaker(1, min(5.0, ttl_seconds / 3), 60.0)
        self._renew_script = self._redis.register_script(_RENEW)
        self._release_script = self._redis.register_script(_RELEASE)
        self._stop = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_all, args=(ttl_seconds / 3,), name="batchkv-leases", daemon=True
        )
        self._renewer.start()

    def acquire(self, key: bytes) -> Lease | None:
        lease = self._local.acquire(key)
        if lease is None:
            return None
        is_ours = self._call(
            lambda: self._redis.set(_name(key), lease.token, nx=True, px=self._ttl_ms)
        )
        if is_ours or is_ours is _NO_ANSWER:
            lease.is_granted = True
            return lease
        self._local.release(lease)
        return None

    def acquire_chain(self, keys: Sequence[bytes]) -> list[Lease]:
        first = self.acquire(keys[0]) if keys else None
        if first is None:
            return []
        rest = [lease for key in keys[1:] if (lease := self._local.acquire(key)) is not None]
        answers = self._call(lambda: self._set_many(rest))
        if not isinstance(answers, list):
            answers = [True] * len(rest)
        held = [first]
        for lease, is_ours in zip(rest, answers, strict=True):
            if is_ours:
                lease.is_granted = True
                held.append(lease)
            else:
                self._local.release(lease)
        return held

    def _set_many(self, leases: Sequence[Lease]) -> list[object]:
        """The replies of SET for each lease, in one round trip."""
        with self._redis.pipeline(transaction=False) as pipe:
            for lease in leases:
                pipe.set(_name(lease.key), lease.token, nx=True, px=self._ttl_ms)
            return list(pipe.execute())

    def release(self, lease: Lease) -> None:
        self.release_many([lease])

    def release_many(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._local.release(lease)
        if leases:
            self._release_in_redis(leases)

    def close(self) -> None:
        self._stop.set()
        self._renewer.join(2 * REPLY_TIMEOUT_SECONDS)
        self.release_many(self._local.held())
        self._redis.close()

    def _release_in_redis(self, leases: Sequence[Lease]) -> None:
        self._run_many(self._release_script, leases, [(lease.token,) for lease in leases])

    def _call(self, call: Callable[[], object]) -> object:
        """The reply of Redis; _NO_ANSWER if it fails, and without a call while it is paused."""
        if not self._breaker.may_call():
            return _NO_ANSWER
        try:
            answer = call()
        except Exception as fault:  # noqa: BLE001 - redis-py raises anything at strange answers
            _log.warning("leases hold in this process only: %s", fault)
            self._breaker.failed()
            return _NO_ANSWER
        self._breaker.succeeded()
        return answer

    def _renew_all(self, interval_seconds: float) -> None:
        while not self._stop.wait(interval_seconds):
            held = self._renewable()
            if held:
                self._renew(held)

    def _renewable(self) -> list[Lease]:
        """The granted leases. A renewal of another would set its key before its own request."""
        return [lease for lease in self._local.held() if lease.is_granted]

    def _renew(self, leases: Sequence[Lease]) -> None:
        """Renew all of them in one round trip, then take those again that had lapsed."""
        args: list[tuple[str | int, ...]] = [(lease.token, self._ttl_ms) for lease in leases]
        answers = self._run_many(self._renew_script, leases, args)
        if answers is None:
            return  # the next round tries again
        # These lapsed while Redis or this process was stopped, or were held in this process only.
        # Take them again, unless another worker has.
        gone = [lease for lease, is_ours in zip(leases, answers, strict=True) if not is_ours]
        again = self._call(lambda: self._set_many(gone)) if gone else []
        if not isinstance(again, list):
            return
        for lease, is_ours in zip(gone, again, strict=True):
            lease.is_lost = not is_ours
        still = {id(lease) for lease in self._local.held()}
        released = [lease for lease in leases if id(lease) not in still]
        if released:  # during the renewal
            self._release_in_redis(released)

    def _run_many(
        self, script: Script, leases: Sequence[Lease], args: Sequence[tuple[str | int, ...]]
    ) -> list[object] | None:
        """The script's reply for each lease, in one round trip; None if Redis does not answer."""

        def run() -> list[object]:
            with self._redis.pipeline(transaction=False) as pipe:
                for lease, values in zip(leases, args, strict=True):
                    script(keys=[_name(lease.key)], args=list(values), client=pipe)
                return list(pipe.execute())

        answers = self._call(run)
        return answers if isinstance(answers, list) else None


def _name(key: bytes) -> str:
    return PREFIX + key.hex()

"""A shared tier: blocks in a Redis or Valkey server of their own.

Each block is the value of one key, ``batchkv-block:1:<name>``. The prefix differs from the queue's
(``batchkv:``). The queue's database is refused, because a cache that evicts would evict jobs. A
policy of ``allkeys-*`` evicts keys of all databases of a server. So a server with such a policy is
refused if *any* of its databases holds a queue.

The cap is the server's ``maxmemory``. With a policy of ``allkeys-*`` the server evicts old blocks.
Without one, the tier stops writing before the server is full. A server without ``maxmemory`` needs
``max_bytes``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
)
from redis.retry import Retry

from batchkv_cache_store.blocks.names import checked, is_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.tiers.base import (
    MAX_OBJECT_BYTES,
    Entry,
    Put,
    Tier,
    TierStats,
    bound,
    size_of,
)
from batchkv_cache_store.tiers.redis_stream import read_values

PREFIX = "batchkv-block:1:"
# Any of these keys means that the database holds a queue: batchkv's batches, RQ's queues, workers.
QUEUE_KEYS = ("batchkv:batches", "rq:queues", "rq:workers")
CONNECT_TIMEOUT_SECONDS = 2.0
REPLY_TIMEOUT_SECONDS = 10.0
SCAN_KEYS = 500
_WITHOUT_EVICTION_FILL = 0.9  # the server counts buffers and fragments too


@dataclass(frozen=True, slots=True)
class _Server:
    """The server's settings at the first check."""

    max_memory: int  # 0: none
    is_evicting: bool


class RedisTier(Tier):
    """Blocks in the database of ``url``, stored with SET NX and read with GETRANGE.

    ``max_bytes``: this tier writes nothing while the whole server uses more; None: the server's
    ``maxmemory``. The first call connects. The constructor raises ValueError for a wrong URL.
    """

    is_far = True

    def __init__(
        self,
        url: str,
        max_bytes: int | None = None,
        reply_timeout_seconds: float = REPLY_TIMEOUT_SECONDS,
    ) -> None:
        self.name = "redis"
        self.max_bytes = max_bytes
        self._pool = ConnectionPool.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_SECONDS,
            socket_timeout=reply_timeout_seconds,
            retry=Retry(NoBackoff(), 1),  # an idle connection may have been closed
            decode_responses=False,
        )
        self._redis = Redis(connection_pool=self._pool)
        self._server: _Server | None = None
        self._check_lock = threading.Lock()

    def check(self) -> None:
        """Refuse a queue's database, a server that could evict a queue, and one without a cap."""
        with self._check_lock, _redis_errors():
            memory = self._redis.info("memory")
            server = _Server(
                int(memory.get("maxmemory", 0)),
                str(memory.get("maxmemory_policy", "")).startswith("allkeys"),
            )
            if not server.max_memory and self.max_bytes is None:
                raise TierMisconfigured(
                    "the cache's Redis has no memory limit: set maxmemory there, or a limit here"
                )
            if self._redis.exists(*QUEUE_KEYS):
                raise TierMisconfigured(
                    "this Redis database holds a queue: give the cache a server of its own, or at "
                    "least another database"
                )
            if server.is_evicting and self._has_queue_elsewhere():
                raise TierMisconfigured(
                    "this Redis evicts keys of all databases, and one of them holds a queue: give "
                    "the cache a server of its own"
                )
            self._server = server
            if self.max_bytes is None:
                self.max_bytes = server.max_memory

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        self._checked_server()
        if not names:
            return {}
        keys = [_key(name) for name in names]
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
            sizes = _answers(pipeline)
        pairs = zip(names, sizes, strict=True)
        return {name: size for name, size in pairs if isinstance(size, int) and size}

    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        self._checked_server()
        if not names:
            return {}
        # The head is read last, so that it counts as the latest used.
        lasts = [(_key(name), bound(sizes, name) - 1) for name in reversed(names)]
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for key, last in lasts:
                pipeline.getrange(key, 0, last)
            values = _answers(pipeline)
        pairs = zip(names, reversed(values), strict=True)
        return {name: value for name, value in pairs if isinstance(value, bytes) and value}

    def stream(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> Generator[tuple[str, Buffer], None, None]:
        self._checked_server()
        wanted = {_key(name): name for name in names}
        with _redis_errors():
            connection: Any = self._pool.get_connection()
            is_whole = False
            try:
                bounds = [(key, bound(sizes, name)) for key, name in wanted.items()]
                for key, value in read_values(connection, bounds):
                    yield wanted[key], value
                is_whole = True
            finally:
                if not is_whole:
                    connection.disconnect()  # replies are left in it
                self._pool.release(connection)
            if len(wanted) > 1:  # the head last, so that it counts as the latest used
                self._redis.touch(*reversed(wanted))

    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        self._checked_server()
        keys = [_key(name) for name in names]

        def ask(pipeline: Pipeline) -> None:
            for key in keys:
                pipeline.exists(key)
                pipeline.getrange(key, 0, num_bytes - 1)

        answers = self._untouched(ask) if names and num_bytes > 0 else []
        heads = zip(names, answers[::2], answers[1::2], strict=False)
        return {name: head for name, is_here, head in heads if is_here and isinstance(head, bytes)}

    def iter_names(self) -> Iterator[Entry]:
        """List names by SCAN, some hundred keys at a time; the server may hold other keys, too."""
        self._checked_server()
        cursor = 0
        while True:
            with _redis_errors():
                cursor, found = self._redis.scan(cursor, match=f"{PREFIX}*", count=SCAN_KEYS)
            keys: list[Any] = list(found)
            texts = [key.decode("utf-8", "replace").removeprefix(PREFIX) for key in keys]
            yield from self._entries([text for text in texts if is_name(text)])
            if not cursor:
                return

    def _entries(self, names: Sequence[str]) -> list[Entry]:
        def ask(pipeline: Pipeline) -> None:
            for name in names:
                # IDLETIME first: without NO-TOUCH, the call for the length counts as a use.
                pipeline.object("IDLETIME", _key(name))
                pipeline.strlen(_key(name))

        now = time.time()
        answers = self._untouched(ask) if names else []
        entries = []
        for name, idle, size in zip(names, answers[::2], answers[1::2], strict=True):
            if isinstance(size, int) and size:
                # Under a policy by frequency (LFU) the server has no time of use.
                last_used = now - idle if isinstance(idle, int) else None
                entries.append(Entry(name, size, last_used))
        return entries

    def _untouched(self, ask: Callable[[Pipeline], None]) -> list[Any]:
        """The replies to the calls that ``ask`` puts into a pipeline. They count as no use.

        The reply for a key of another type is an error; any other error is raised.
        """
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            # Redis 7.2 and Valkey know NO-TOUCH. On others, or without the right, it is a use.
            pipeline.client_no_touch("ON")
            ask(pipeline)
            pipeline.client_no_touch("OFF")
            return _answers(pipeline)[1:-1]

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        server = self._checked_server()
        key, num_bytes = _key(name), size_of(buffers)
        if num_bytes > MAX_OBJECT_BYTES:
            return Put.FULL
        with _redis_errors():
            # Check before sending megabytes: another worker may have stored the block, and the
            # database may hold a queue now.
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.exists(key)
                pipeline.exists(*QUEUE_KEYS)
                pipeline.info("memory")
                is_present, has_queue, memory = pipeline.execute()
            if has_queue:
                self._server = None  # every later call checks again, and raises the same
                raise TierMisconfigured(
                    "the cache's Redis database now holds a queue: give the cache a server of its "
                    "own, or at least another database"
                )
            if is_present:
                return Put.PRESENT
            if not self._has_room(server, memory, num_bytes):
                return Put.FULL
            try:
                is_stored = self._set(key, buffers, num_bytes)
            except OutOfMemoryError:
                return Put.FULL
        return Put.STORED if is_stored else Put.PRESENT

    def _set(self, key: str, buffers: Sequence[Buffer], num_bytes: int) -> bool:
        """SET NX. The buffers are sent as they are: joining them would copy megabytes."""
        name = key.encode()
        head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, num_bytes)
        connection: Any = self._pool.get_connection()
        try:
            connection.send_packed_command([head, *buffers, b"\r\n$2\r\nNX\r\n"])
            return connection.read_response() is not None
        finally:
            self._pool.release(connection)

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Sequence[str]) -> None:
        keys = [_key(name) for name in names]
        self._checked_server()
        if keys:
            with _redis_errors():
                self._redis.unlink(*keys)

    def stats(self) -> TierStats:
        """The server's memory. The number of blocks is the number of keys in the database."""
        self._checked_server()
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            pipeline.dbsize()
            pipeline.info("memory")
            pipeline.info("stats")
            num_keys, memory, counters = pipeline.execute()
            num_bytes, evicted = int(memory["used_memory"]), int(counters.get("evicted_keys", 0))
        return TierStats(num_keys, num_bytes, self.max_bytes, evicted, None)

    def close(self) -> None:
        self._pool.disconnect()

    def _checked_server(self) -> _Server:
        if self._server is None:
            self.check()
        assert self._server is not None
        return self._server

    def _has_room(self, server: _Server, memory: dict[str, Any], num_bytes: int) -> bool:
        used, maximum = int(memory["used_memory"]), int(memory["maxmemory"])
        if server.is_evicting and maximum and (self.max_bytes or maximum) >= maximum:
            return num_bytes < maximum  # the server evicts
        cap = min(cap for cap in (maximum, self.max_bytes) if cap is not None and cap > 0)
        return used + num_bytes <= cap * _WITHOUT_EVICTION_FILL

    def _has_queue_elsewhere(self) -> bool:
        """Whether another database of the server holds a queue."""
        own = int(self._pool.connection_kwargs.get("db") or 0)
        others = {int(name.removeprefix("db")) for name in self._redis.info("keyspace")} - {own}
        for number in sorted(others):
            settings = {**self._pool.connection_kwargs, "db": number}
            pool = ConnectionPool(connection_class=self._pool.connection_class, **settings)
            try:
                if Redis(connection_pool=pool).exists(*QUEUE_KEYS):
                    return True
            finally:
                pool.disconnect()
        return False


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except (AuthenticationError, NoPermissionError) as fault:
        raise TierMisconfigured(f"the cache's Redis refuses the user: {fault}") from fault
    except TierError:
        raise
    except (RedisError, OSError) as fault:
        raise TierError(f"the cache's Redis: {fault}") from fault
    except Exception as fault:  # redis-py raises anything for an unexpected reply
        problem = f"its answer cannot be read ({type(fault).__name__}: {fault})"
        raise TierError(f"the cache's Redis: {problem[:300]}") from fault


def _answers(pipeline: Pipeline) -> list[Any]:
    """All replies. An error that concerns one key only is a reply; any other is raised."""
    answers = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, RedisError) and not _is_about_one_key(answer):
            raise answer
    return answers


def _is_about_one_key(fault: RedisError) -> bool:
    """Whether the error concerns one key only, for example a key of another type."""
    text = str(fault)
    return text.startswith(("WRONGTYPE", "no such key")) or "LFU" in text


def _key(name: str) -> str:
    return PREFIX + checked(name)

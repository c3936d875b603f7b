"""A cache that breaks while rows run: no row fails, and the tokens are those of a run without."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchkv_cache_store.lease import RedisLeases
from batchkv_cache_store.tiers import disk_files
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.redis import PREFIX, RedisTier
from batchkv_worker.engine.engine import Engine
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from support.fault_proxy import FaultProxy, Link
from support.redis_server import RedisServer, running_server
from worker.prefix.engines_on_store import (
    access,
    cached,
    finish,
    random_prompt,
    run,
    running,
    tokens,
)

GIB = 2**30
ROUNDS = 4
SHARED = [random_prompt(group, 600) for group in range(3)]


def prompts_of(turn: int) -> list[list[int]]:
    """A dozen rows behind three prefixes, with ends of their own."""
    return [[*SHARED[n % 3], *random_prompt(100 * turn + n, 20)] for n in range(12)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[tuple[int, ...]]]:
    """The tokens of each round on an engine that has no store."""
    with running(model, None) as engine:
        return [tokens(run(engine, prompts_of(turn))) for turn in range(ROUNDS)]


def check_rounds(
    model: Any,
    tiers: Sequence[Tier],
    expected: list[list[tuple[int, ...]]],
    before: Callable[[int], None],
) -> tuple[dict[str, int], int]:
    """Each round after its fault, the prefixes in memory forgotten; (counters, cached tokens).

    ``before`` is called with the round's number, in the middle of the round before: after its
    first rows were handed over.
    """
    num_cached = 0
    with running(model, access(tiers, lookup_seconds=1.0), slots=4) as engine:
        for turn in range(ROUNDS):
            rows = prompts_of(turn)
            hand_over(engine, rows[:6], 0)
            for _ in range(6):  # no row of eight tokens has ended by then
                assert engine.step() == []
            before(turn)
            hand_over(engine, rows[6:], 6)
            ended = finish(engine, len(rows))
            assert tokens(ended) == expected[turn], turn
            num_cached += sum(cached(ended))
            engine.client.flush(10)
            engine.prefixes.clear()
        return engine.client.counters, num_cached


def hand_over(engine: Engine, rows: list[list[int]], first: int) -> None:
    for index, prompt in enumerate(rows, first):
        engine.submit_row(Row(str(index), prompt, Generation(8, temperature=0.0)))


@pytest.fixture
def cache() -> Iterator[RedisServer]:
    with running_server() as server:
        yield server


def test_a_server_that_dies_and_comes_back(
    model: Any, cache: RedisServer, expected: list[list[tuple[int, ...]]]
) -> None:
    """Killed with rows in flight, started again, empty: every row is computed."""

    def before(turn: int) -> None:
        if turn == 1:
            cache.kill()
        elif turn == 3:
            cache.start()

    counters, _ = check_rounds(model, [RedisTier(cache.url, GIB)], expected, before)
    assert counters["error.redis"] >= 1


def test_a_line_that_hangs_and_trickles(
    model: Any, cache: RedisServer, expected: list[list[tuple[int, ...]]]
) -> None:
    """A black hole, then 1 MB/s with a delay: rows wait no longer than they may, then compute."""
    with FaultProxy(cache.socket) as proxy:

        def before(turn: int) -> None:
            if turn == 1:
                proxy.hang()
            elif turn == 2:
                time.sleep(1.2)  # longer than a row waits for an answer
                proxy.link = Link(delay_seconds=0.01, jitter_seconds=0.01, bytes_per_second=1e6)
            elif turn == 3:
                proxy.reset()

        tier = RedisTier(proxy.url, GIB)
        counters, _ = check_rounds(model, [tier], expected, before)
        assert counters["gave_up.slow"] >= 1


def test_a_full_disk(
    model: Any,
    tmp_path: Path,
    expected: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ENOSPC in the middle of a block: nothing half-written stays; later there is room again."""
    write, is_full = os.writev, [True]

    def writev(descriptor: int, buffers: Sequence[Any]) -> int:
        if is_full[0]:
            os.write(descriptor, bytes(buffers[0])[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, buffers)

    monkeypatch.setattr(disk_files.os, "writev", writev)

    def before(turn: int) -> None:
        is_full[0] = turn < 2

    counters, num_cached = check_rounds(model, [DiskTier(tmp_path, GIB)], expected, before)
    assert counters["full.disk"] >= 6 and counters["stored.disk"] >= 6
    assert list((tmp_path / "temporary").iterdir()) == []
    assert num_cached > 0


def test_a_server_that_evicts(model: Any, expected: list[list[tuple[int, ...]]]) -> None:
    """``maxmemory`` of a few blocks with ``allkeys-lru``: what is gone is a miss."""
    limit = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with running_server(*limit) as server:
        connection = server.connect()

        def before(turn: int) -> None:
            for number in range(40):  # others fill it too
                connection.set(f"{PREFIX}filler-{turn}-{number}", bytes(100_000))

        check_rounds(model, [RedisTier(server.url)], expected, before)
        assert connection.info("stats")["evicted_keys"] > 0


@pytest.mark.parametrize("is_cut", [False, True])
def test_blocks_that_rot_on_the_server(
    model: Any, cache: RedisServer, expected: list[list[tuple[int, ...]]], is_cut: bool
) -> None:
    """Bytes that change, or are missing, between two rounds: seen, counted, computed again."""
    connection = cache.connect()

    def before(turn: int) -> None:
        for key in connection.scan_iter(f"{PREFIX}*.kv"):
            data = connection.get(key)
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
            connection.set(key, data[:middle] if is_cut else flipped)

    counters, _ = check_rounds(model, [RedisTier(cache.url, GIB)], expected, before)
    assert sum(count for name, count in counters.items() if name.startswith("rejected.")) >= 1


def test_leases_of_a_server_that_is_gone(
    model: Any, cache: RedisServer, expected: list[list[tuple[int, ...]]]
) -> None:
    """The leases between workers live in the same server: without it nobody waits for anybody."""
    tiers = [RedisTier(cache.url, GIB)]
    way = access(tiers, RedisLeases(cache.url, 2.0), is_shared=True, lookup_seconds=1.0)
    with running(model, way, slots=4) as engine:
        assert tokens(run(engine, prompts_of(0))) == expected[0]
        cache.kill()
        engine.prefixes.clear()
        assert tokens(run(engine, prompts_of(1))) == expected[1]

"""Workers in processes of their own: separate disks, one shared tier, real signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkv_cache_store.lease import PREFIX
from batchkv_worker.sequence import FetchState, Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from support.redis_server import RedisServer, running_server
from worker.prefix.engines_on_store import run, running
from worker.prefix.one_worker import CELLS, COMMON, LEASE_SECONDS, SHARED, prompt_of, way

TESTS = Path(__file__).parents[3]
TIMEOUT_SECONDS = 150


@pytest.fixture
def cache_server() -> Iterator[RedisServer]:
    """The cache's own server, which is never the queue's."""
    with running_server() as server:
        yield server


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "worker.prefix.one_worker", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def answers(*arguments: object) -> dict[tuple[str, str], tuple[int, list[int]]]:
    done = subprocess.run(
        command("answer", *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, done.stdout.splitlines())
    return {(family, scheme): (cached, tokens) for family, scheme, cached, tokens in rows}


def test_a_second_process_takes_what_the_first_has_computed(
    tmp_path: Path, cache_server: RedisServer
) -> None:
    """Full, sliding, hybrid and MLA models, each scheme: every block, the tokens of cold."""
    first = answers(tmp_path / "first", cache_server.url, 2)
    assert {cached for cached, _ in first.values()} == {0}
    second = answers(tmp_path / "second", cache_server.url, 3)
    assert {which: cached for which, (cached, _) in second.items()} == dict.fromkeys(
        CELLS, len(COMMON)
    )
    for family, scheme in CELLS:  # this process has no way to the cache
        with running(tiny_models.build(family), None, scheme) as engine:
            (cold,) = run(engine, [prompt_of(3)])
        assert second[family, scheme][1] == list(cold.token_ids), (family, scheme)
    with cache_server.connect() as connection:
        assert not connection.keys(PREFIX + "*")


def test_a_dead_workers_prefix_is_taken_over(tmp_path: Path, cache_server: RedisServer) -> None:
    """Killed in mid-prefill: the follower waited while it lived, then computes the rest, once."""
    holder = subprocess.Popen(
        command("stall", tmp_path / "first", cache_server.url),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "stalled\n"
        model = tiny_models.build("llama")
        with running(model, way(str(tmp_path / "second"), cache_server.url)) as engine:
            row = Row("0", [*SHARED, 1], Generation(4, temperature=0.0))
            engine.submit_row(row)
            begin = time.monotonic()
            while time.monotonic() - begin < 2 * LEASE_SECONDS:  # it lives, and renews
                engine.step()
            # It asks again now and then, so it may be between two answers just now.
            asked_until = time.monotonic() + TIMEOUT_SECONDS
            while row.fetch is None or row.fetch.state is not FetchState.HELD:
                assert time.monotonic() < asked_until and not row.is_ended
                engine.step()
            holder.kill()
            killed = time.monotonic()
            while not row.is_ended:
                engine.step()
                assert time.monotonic() - killed < LEASE_SECONDS + 30
            assert row.num_cached == 512  # what the dead one had published
            assert engine.client.flush(30)
            # The two blocks that were missing, and the manifest, which is put if absent.
            assert engine.client.counters["stored.redis"] == 2
    finally:
        holder.kill()
        holder.communicate(timeout=10)

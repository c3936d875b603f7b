"""Rows that wait for a prefix: for an answer, for another worker, and never for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchkv_cache_store.lease import LocalLeases
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.engine import Engine
from batchkv_worker.sequence import FetchState, Generation
from batchkv_worker.sequence import Sequence as Row
from sharing.house import access, cached, finish, on_disk, random_prompt, run, running, tokens
from support import tiny_models

SHARED = random_prompt(1, 768)
DEADLINE_SECONDS = 60.0
MIB = 2**20


class GatedTier(MemoryTier):
    """Memory that answers nothing while it is shut."""

    name = "shared"

    def __init__(self) -> None:
        super().__init__(256 * MIB)
        self.name = "shared"
        self.is_open = threading.Event()
        self.is_open.set()

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        assert self.is_open.wait(DEADLINE_SECONDS)
        return super().contains_many(names)


def row(name: str, prompt: list[int], count: int = 4) -> Row:
    return Row(name, prompt, Generation(count, temperature=0.0))


def step_until(engine: Engine, is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        engine.step()


def tails(count: int) -> list[list[int]]:
    return [[*SHARED, *random_prompt(10 + index, 30)] for index in range(count)]


def test_a_prefix_is_computed_once_in_a_worker(tmp_path: Path) -> None:
    """Ten rows behind one prefix: the first computes it, the others wait for it, leases end."""
    leases = LocalLeases()
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        assert sorted(cached(run(engine, tails(10)))) == [0] + 9 * [768]
        assert engine.link.flush(30)
        assert leases.held() == []
        assert engine.link.counters["published"] == 3


def test_another_workers_prefix_is_waited_for(tmp_path: Path) -> None:
    """While one computes a prefix, the other does other work, then takes it: computed once."""
    model = tiny_models.build("llama")
    leases = LocalLeases()  # stands between both, as Redis does between machines

    def way() -> Any:
        return access(on_disk(tmp_path), leases, is_shared=True)

    with running(model, None) as alone:
        expected = tokens(run(alone, tails(2), 4))
    with running(model, way(), chunk_tokens=256) as one, running(model, way()) as two:
        first, second, other = row("0", tails(2)[0]), row("0", tails(2)[1]), row("1", SHARED[:99])
        one.submit_row(first)
        step_until(one, lambda: first.fetch and first.fetch.state is FetchState.DONE)
        two.submit_row(second)
        two.submit_row(other)
        step_until(two, lambda: other.is_ended)
        assert second.fetch is not None and second.fetch.state is FetchState.HELD
        (ended_one,) = finish(one, 1)
        step_until(two, lambda: second.is_ended)
    assert (first.num_cached, second.num_cached) == (0, 768)
    assert [ended_one.token_ids, tuple(second.generated)] == expected


@pytest.mark.parametrize("held", ["first", "later"])
def test_a_worker_that_does_not_get_on_is_not_waited_for(held: str, tmp_path: Path) -> None:
    """A lease that is never let go costs its limit, and then the row is computed."""
    leases = LocalLeases()
    way = access(on_disk(tmp_path), leases, is_shared=True, held_seconds=0.3)
    with running(tiny_models.build("llama"), way) as engine:
        keys = engine.prefixes.keys(tails(1)[0])
        lease = leases.acquire(keys[0 if held == "first" else 2])
        start = time.monotonic()
        (ended,) = run(engine, tails(1))
        assert ended.usage.cached == 0
        waited = engine.link.counters.get("gave_up.held", 0)
        # Later blocks are the other's to publish; the row needs none of them to begin.
        assert (waited, time.monotonic() - start > 0.3) == (
            (1, True) if held == "first" else (0, False)
        )
        assert leases.held() == [lease]


def test_a_store_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """One row waits its limit for an answer, the others not at all; a late answer does no harm."""
    tier = GatedTier()
    model = tiny_models.build("llama")
    with running(model, access([tier])) as engine:
        run(engine, tails(1))
    tier.is_open.clear()
    leases = LocalLeases()
    with running(model, access([tier], leases, patience_seconds=0.2)) as engine:
        rows = [row(str(index), prompt) for index, prompt in enumerate(tails(6))]
        for one in rows:
            engine.submit_row(one)
        start = time.monotonic()
        assert len(finish(engine, 6)) == 6
        assert time.monotonic() - start < DEADLINE_SECONDS / 2
        assert engine.link.counters["gave_up.slow"] <= 2
        tier.is_open.set()
        late = row("0", [*SHARED, 1, 2])
        engine.submit_row(late)
        finish(engine, 1)
        assert late.num_cached == 768
        engine.check_integrity()
    assert leases.held() == []


def test_a_canceled_row_lets_its_leases_go(tmp_path: Path) -> None:
    """Waiting, in prefill or in a group that nobody wants any more: leases do not outlive rows."""
    leases = LocalLeases()
    way = access(on_disk(tmp_path), leases, is_shared=True)
    with running(tiny_models.build("llama"), way, slots=1, chunk_tokens=256) as engine:
        rows = [row(str(n), random_prompt(50 + n, 900), 40) for n in range(3)]
        for one in rows:
            engine.submit_row(one)
        step_until(
            engine, lambda: all(r.fetch and r.fetch.state is FetchState.DONE for r in rows[1:])
        )
        assert leases.held()
        for one in reversed(rows):
            engine.cancel(one.job_id)
        finish(engine, 0)
        assert engine.link.flush(30)
        step_until(engine, lambda: not leases.held())
        assert engine.link._ahead_bytes == 0


def test_looking_ahead_is_bounded(tmp_path: Path) -> None:
    """Rows far from their turn fetch nothing while what was fetched still waits to be used."""
    model = tiny_models.build("llama")
    prompts = [random_prompt(70 + index, 1030) for index in range(12)]
    with running(model, access(on_disk(tmp_path))) as engine:
        cold = tokens(run(engine, prompts))
    room = 5 * 1024 * engine.bytes_per_token
    with running(model, access(on_disk(tmp_path)), slots=1, prefix_bytes=room) as engine:
        rows = [row(str(index), prompt, 8) for index, prompt in enumerate(prompts)]
        for one in rows:
            engine.submit_row(one)
        most = 0
        ended = {}
        while not engine.is_idle:
            ended.update({event.job_id: event for event in engine.step()})
            most = max(most, engine.link._ahead_bytes)
    assert [ended[str(index)].token_ids for index in range(12)] == cold
    assert cached([ended[str(index)] for index in range(12)]) == 12 * [1024]
    assert most <= room // 2 + 2 * 1024 * engine.bytes_per_token

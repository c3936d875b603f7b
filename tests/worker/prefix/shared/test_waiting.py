"""Rows that wait for a prefix: for an answer, for another worker, and never for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchkv_cache_store.blocks.block import Limits
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.lease import LocalLeases
from batchkv_cache_store.store import Store, StoreSettings
from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.engine.engine import Engine
from batchkv_worker.prefix.shared import client, worth
from batchkv_worker.prefix.shared.access import Access
from batchkv_worker.sequence import FetchState, Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from worker.prefix.engines_on_store import (
    access,
    cached,
    eventually,
    finish,
    on_disk,
    random_prompt,
    run,
    running,
    tokens,
)

SHARED = random_prompt(1, 768)
DEADLINE_SECONDS = 60.0
MIB = 2**20


class GatedTier(MemoryTier):
    """Memory that answers nothing while it is shut."""

    name = "shared"

    def __init__(self, *, is_far: bool = False) -> None:
        super().__init__(256 * MIB)
        self.name, self.is_far = "shared", is_far
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


def test_nobody_waits_longer_for_another_worker_than_computing_takes_twice(tmp_path: Path) -> None:
    """On a fast GPU that is less than the time between two looks."""
    way = replace(access(on_disk(tmp_path)), writes=worth.NEEDED)
    one = row("0", SHARED)
    with running(tiny_models.build("llama"), way) as engine:
        assert isinstance(engine.client, client.StoreClient)
        engine.submit_row(one)
        limit = partial(engine.client._held_limit, one, 0)
        assert limit() == way.held_seconds  # how long it takes is not known
        engine.client.observe_prefill(4096, 4096 / 50_000)
        assert limit() == pytest.approx(2 * 512 / 50_000)
        engine.client._store.gate._seconds_per_token.value = 1.0
        assert limit() == way.held_seconds


def tails(count: int) -> list[list[int]]:
    return [[*SHARED, *random_prompt(10 + index, 30)] for index in range(count)]


def test_a_prefix_is_computed_once_in_a_worker(tmp_path: Path) -> None:
    """Ten rows behind one prefix: the first computes it, the others wait for it, leases end."""
    leases = LocalLeases()
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        assert sorted(cached(run(engine, tails(10)))) == [0] + 9 * [768]
        assert engine.client.flush(30)
        eventually(lambda: leases.held() == [])
        assert engine.client.counters["published"] == 3


def test_another_workers_prefix_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one computes a prefix, the other does other work, then takes it: computed once."""
    monkeypatch.setattr("batchkv_worker.engine.engine.CHUNKS_PER_STEP", 1)
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
        # It asks again now and then, so it may be between two answers just now.
        step_until(two, lambda: second.fetch and second.fetch.state is FetchState.HELD)
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
        keys = engine.prefixes.keys(tails(1)[0], None)
        lease = leases.acquire(keys[0 if held == "first" else 2])
        start = time.monotonic()
        (ended,) = run(engine, tails(1))
        assert ended.usage.cached == 0
        # Later blocks are the other's to publish; the row needs none of them to begin.
        waits = held == "first"
        assert engine.client.counters.get("gave_up.held", 0) == int(waits)
        assert not waits or time.monotonic() - start > 0.3
        assert leases.held() == [lease]


def test_a_store_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """One row waits its limit for an answer, the others not at all; a late answer does no harm."""
    tier = GatedTier()
    model = tiny_models.build("llama")
    with running(model, access([tier])) as engine:
        run(engine, tails(1))
    tier.is_open.clear()
    leases = LocalLeases()
    with running(model, access([tier], leases, lookup_seconds=0.2)) as engine:
        rows = [row(str(index), prompt) for index, prompt in enumerate(tails(6))]
        for one in rows:
            engine.submit_row(one)
        start = time.monotonic()
        assert len(finish(engine, 6)) == 6
        assert time.monotonic() - start < DEADLINE_SECONDS / 2
        assert engine.client.counters["gave_up.slow"] == 6
        tier.is_open.set()
        late = row("0", [*SHARED, 1, 2])
        engine.submit_row(late)
        finish(engine, 1)
        assert late.num_cached == 768
        engine.check_integrity()
    assert leases.held() == []


@contextmanager
def behind_a_network(**changes: Any) -> Iterator[tuple[GatedTier, Engine]]:
    """A shut tier with SHARED that crosses a network, and an engine that knows its own speed."""
    tier = GatedTier(is_far=True)
    model = tiny_models.build("llama")
    with running(model, access([tier], writes="all")) as engine:
        run(engine, tails(1))
        assert engine.client.flush(30)
    tier.is_open.clear()
    with running(model, access([tier], **changes)) as engine:
        gate = engine.client._access.store.gate  # type: ignore[attr-defined]
        gate.observe_prefill(1000, 1.0)
        gate.observe_prefill = lambda *_: None
        yield tier, engine
        tier.is_open.set()


def test_the_engine_stands_still_for_a_network_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing comes within the moment: the row is computed. A late answer does no harm."""
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.1)
    with behind_a_network() as (tier, engine):
        start = time.monotonic()
        assert cached(run(engine, tails(1))) == [0]
        assert 0.1 < time.monotonic() - start < DEADLINE_SECONDS / 4
        assert engine.client.counters["gave_up.slow"] == 1
        tier.is_open.set()
        eventually(lambda: engine.client.counters.get("lookups") == 1)
        engine.prefixes.clear()
        assert cached(run(engine, tails(1))) == [768]


def test_a_long_prompt_waits_longer_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 % of a thousand seconds of computing: the row waits for its blocks, which come later."""
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.0)
    with behind_a_network() as (tier, engine):
        engine.client._access.store.gate._seconds_per_token.value = 1.3  # type: ignore[attr-defined]
        engine.submit_row(row("0", tails(1)[0]))
        for _ in range(20):
            engine.step()
        assert engine.client._pending.idle_seconds > 0.2  # type: ignore[attr-defined]
        tier.is_open.set()
        assert cached(finish(engine, 1)) == [768]


def test_waiting_for_a_network_is_free_while_other_rows_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine does not stand still while a row decodes: another one waits for its blocks."""
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.0)
    with behind_a_network() as (tier, engine):
        # Reading saves 8 s of computing, so that it pays on a slow machine, too. For these the
        # engine may stand still for 0.1 s, which is less than this row waits.
        gate = engine.client._access.store.gate  # type: ignore[attr-defined]
        gate._seconds_per_token.value = 0.01
        gate.observe_load = lambda *_: None  # the time in which the tier is shut says nothing
        other, waiting = row("other", [1, 2, 3], 1000), row("0", tails(1)[0])
        engine.submit_row(other)
        engine.step()
        engine.submit_row(waiting)
        for _ in range(40):
            engine.step()
        time.sleep(0.3)
        assert waiting.fetch is not None and waiting.fetch.state is FetchState.ASKED
        tier.is_open.set()
        step_until(engine, lambda: waiting.fetch.state is FetchState.DONE)  # type: ignore[union-attr]
        assert not other.is_ended
        engine.cancel("other")
        assert cached(finish(engine, 1)) == [768]


def test_a_try_of_a_slow_network_holds_up_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier is known to be slow. It is looked into now and then, and no row waits for that."""
    monkeypatch.setattr(client, "IDLE_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(worth, "TRY_EVERY", 1)
    with behind_a_network(writes="needed") as (tier, engine):
        store = engine.client._access.store  # type: ignore[attr-defined]
        store.gate.observe_load("shared", 1, 1.0)
        start = time.monotonic()
        assert cached(run(engine, tails(1))) == [0]
        assert time.monotonic() - start < DEADLINE_SECONDS / 4
        tier.is_open.set()
        eventually(lambda: store.counters().get("lookups") == 1)


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
        assert engine.client.flush(30)
        eventually(lambda: not leases.held())
        assert engine.client._ahead_bytes == 0


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
            most = max(most, engine.client._ahead_bytes)
    assert [ended[str(index)].token_ids for index in range(12)] == cold
    assert cached([ended[str(index)] for index in range(12)]) == 12 * [1024]
    assert most <= room // 2 + 2 * 1024 * engine.bytes_per_token


def test_leases_of_an_answer_that_nobody_waits_for_end_by_themselves() -> None:
    """The last row is canceled in mid-lookup: the engine rests, and its leases end all the same."""
    tier, leases = GatedTier(), LocalLeases()
    with running(tiny_models.build("llama"), access([tier], leases, is_shared=True)) as engine:
        tier.is_open.clear()
        engine.submit_row(row("0", tails(1)[0]))
        engine.step()
        engine.cancel("0")
        assert engine.is_idle
        tier.is_open.set()
        eventually(lambda: engine.client._fetcher._answers.qsize() == 1)
        eventually(lambda: not leases.held())
        assert engine.client._ahead_bytes == 0


def test_a_canceled_row_holds_nobody_back() -> None:
    """Another row's lookup goes on: what it can find is found."""
    tier, model = GatedTier(), tiny_models.build("llama")
    with running(model, access([tier])) as engine:
        run(engine, tails(1))
    with running(model, access([tier])) as engine:
        tier.is_open.clear()
        for name, prompt in (("0", random_prompt(5, 700)), ("1", tails(2)[1])):
            engine.submit_row(row(name, prompt))
        engine.step()
        engine.cancel("0")
        engine.step()
        tier.is_open.set()
        other = next(iter(engine._scheduler.waiting))
        step_until(engine, lambda: other.is_ended)
        assert other.num_cached == 768


def test_an_old_row_is_not_overtaken_for_ever(tmp_path: Path) -> None:
    """A row that wants much memory for its prefix is computed though small ones keep coming."""
    model = tiny_models.build("llama")
    large = random_prompt(1, 11 * 256 + 5)
    small = [random_prompt(100 + n, 2 * 256 + 5) for n in range(60)]
    with running(model, access(on_disk(tmp_path))) as engine:
        run(engine, [large, *small], 1)
        room = 24 * 256 * engine.bytes_per_token
    with running(model, access(on_disk(tmp_path)), prefix_bytes=room, slots=1) as engine:
        one = row("large", large, 1)
        for number in range(3):
            engine.submit_row(row(str(number), small[number], 1))
        engine.submit_row(one)
        for number in range(3, 60):  # one comes for each that goes
            engine.submit_row(row(str(number), small[number], 1))
            for _ in range(50):
                if engine.step():
                    break
            if one.is_ended:
                return
        raise AssertionError("it waits while all others are served")


def test_a_block_that_is_computed_twice_lets_both_leases_go() -> None:
    """A chain that is evicted during its write, and written again, is not held for ever."""

    class SlowTier(GatedTier):
        def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
            assert self.is_open.wait(DEADLINE_SECONDS)
            return super().put(name, buffers)

        def contains_many(self, names: Sequence[str]) -> dict[str, int]:
            return MemoryTier.contains_many(self, names)

    tier, leases = SlowTier(), LocalLeases()
    with running(tiny_models.build("llama"), access([tier], leases)) as engine:
        gate = engine.client._access.store.gate  # type: ignore[attr-defined]
        gate.observe_prefill(1000, 1000.0)  # a busy machine must not make the tier look slow
        gate.observe_prefill = lambda *_: None
        tier.is_open.clear()
        for _ in range(2):
            run(engine, tails(1))
            engine.prefixes.clear()
        tier.is_open.set()
        assert engine.client.flush(30)
        eventually(lambda: not leases.held())
        assert engine.client.counters["published"] == 3
        assert cached(run(engine, tails(1))) == [768]


def test_what_waits_to_be_copied_out_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound parts are dropped and counted, and their leases end with their rows."""
    monkeypatch.setattr("batchkv_worker.prefix.shared.outbox.MAX_BYTES", 1)
    leases = LocalLeases()
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        run(engine, tails(2))
        counters = engine.client.counters
        assert counters["dropped"] == 3 and "published" not in counters
        eventually(lambda: not leases.held())


def test_blocks_that_the_format_cannot_hold_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning at the start, and the engine works as without a store."""
    store = Store(on_disk(tmp_path), settings=StoreSettings(limits=Limits(max_block_bytes=300_000)))
    with running(tiny_models.build("llama"), Access(store, LocalLeases())) as engine:
        assert sorted(cached(run(engine, tails(3)))) == [0, 768, 768]
        assert "lookups" not in engine.client.counters
    assert caplog.text.count("prefixes are not shared") == 1

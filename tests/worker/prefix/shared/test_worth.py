"""What goes to a far tier: what rows elsewhere begin with, if loading it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from batchkv_cache_store.blocks.names import digest_of, is_block_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.lease import LocalLeases
from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.engine.engine import Engine
from batchkv_worker.prefix.shared import outbox, worth
from batchkv_worker.prefix.shared.worth import MOST_EMPTY
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from worker.prefix.engines_on_store import (
    access,
    cached,
    eventually,
    finish,
    random_prompt,
    running,
)

PROMPT = random_prompt(1, 5 * 256 + 9)


class FarTier(MemoryTier):
    """A tier beyond a network, in memory, that records the names that it stores."""

    is_instant = False
    is_far = True

    def __init__(self) -> None:
        super().__init__(2**30)
        self.name = "far"
        self.names: list[str] = []

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        self.names.append(name)
        return super().put(name, buffers)

    @property
    def keys(self) -> list[bytes]:
        """The keys of the blocks, in the order of their writes."""
        return [digest_of(name) for name in self.names if is_block_name(name)]


@contextmanager
def engine_on(tier: FarTier, rate: float | None = None, **changes: Any) -> Iterator[Engine]:
    """An engine over this tier. ``rate``: seconds a byte of its loads, of 1 s a prompt token."""
    leases = LocalLeases()
    way = access([tier], leases, writes="needed")
    with running(tiny_models.build("llama"), way, **changes) as engine:
        if rate is not None:
            way.store.gate.observe_load("far", 1000, 1000 * rate)
            way.store.gate.observe_prefill = lambda *_: None  # type: ignore[method-assign]
            way.store.gate._seconds_per_token.value = 1.0
        yield engine
        eventually(lambda: not leases.held())


def submit(engine: Engine, prompt: list[int], elsewhere: int | None, name: str = "0") -> None:
    generation = Generation(2, temperature=0.0)
    engine.submit_row(Row(name, prompt, generation, num_common=768, num_elsewhere=elsewhere))


def counters(engine: Engine) -> dict[str, int]:
    assert engine.client.flush(30)  # type: ignore[attr-defined]
    return engine.client.counters


@pytest.mark.parametrize(("elsewhere", "written"), [(0, 0), (300, 1), (768, 3), (None, 3)])
def test_only_what_rows_elsewhere_begin_with_is_written(
    elsewhere: int | None, written: int
) -> None:
    """Of three blocks that rows of the batch share: those that rows of other workers may want."""
    tier = FarTier()
    with engine_on(tier, rate=0.0) as engine:
        submit(engine, PROMPT, elsewhere)
        finish(engine, 1)
        assert counters(engine).get("published", 0) == len(tier.keys) == written


def test_a_worker_that_joins_later_finds_the_prefix() -> None:
    """It was computed while nobody else was there; then rows elsewhere begin with it, too."""
    tier = FarTier()
    with engine_on(tier, rate=0.0) as engine:
        for tail, (elsewhere, written) in enumerate([(0, 0), (0, 0), (768, 3), (768, 3)]):
            submit(engine, [*PROMPT[:768], tail, 1], elsewhere)
            finish(engine, 1)
            assert counters(engine).get("published", 0) == len(tier.keys) == written


def test_blocks_that_load_no_quicker_than_they_are_computed_stay_here() -> None:
    """One second a byte, against one a token: nothing is written, and nothing looked up."""
    tier = FarTier()
    with engine_on(tier, rate=1.0) as engine:
        submit(engine, PROMPT, 768)
        finish(engine, 1)
        found = counters(engine)
        assert not tier.keys and "published" not in found
        assert found["not_needed"] == 3 and found["lookups_spared"] == 1 and "lookups" not in found


def test_a_tier_of_unknown_speed_gets_one_block_first() -> None:
    """Its write takes a second a byte. So what waited meanwhile is dropped, and not written."""
    tier = FarTier()
    with engine_on(tier) as engine:
        gate = engine.client._access.store.gate  # type: ignore[attr-defined]
        gate.observe_prefill(1000, 1.0)
        observe = gate.observe_write
        gate.observe_write = lambda name, size, _: observe(name, size, float(size))
        submit(engine, PROMPT, 768)
        finish(engine, 1)
        found = counters(engine)
        assert len(tier.keys) == found["published"] == 1 and found["not_needed"] == 2


def test_blocks_of_a_long_prompt_are_written_while_it_is_computed() -> None:
    """Room for three blocks; a prompt of nine in nine chunks of one step loses none."""
    tier = FarTier()
    with engine_on(tier, rate=0.0, chunk_tokens=256) as engine:
        send, sent = outbox.Outbox.send, list[int]()

        def and_wait(self: outbox.Outbox, **options: Any) -> None:
            send(self, **options)
            counters(engine)
            sent.append(len(tier.keys))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outbox.Outbox, "send", and_wait)
            patch.setattr(outbox, "MAX_BYTES", 3 * (256 * engine.bytes_per_token + 64))
            prompt = random_prompt(8, 9 * 256 + 9)
            generation = Generation(2, temperature=0.0)
            engine.submit_row(Row("0", prompt, generation))
            finish(engine, 1)
        assert counters(engine).get("dropped", 0) == 0 and len(tier.keys) == 9
        assert sent[4] > 0, "nothing was written before the step's end"


def test_a_slower_worker_is_thought_of() -> None:
    """Loading does not pay here, but a worker that computes a million times slower would gain."""
    tier = FarTier()
    with engine_on(tier, rate=1.0) as engine:
        generation = Generation(2, temperature=0.0)
        engine.submit_row(Row("0", PROMPT, generation, num_common=768, slowdown=1e6))
        finish(engine, 1)
        assert counters(engine)["published"] == len(tier.keys) == 3


def test_lookups_that_find_nothing_become_rare() -> None:
    """Nobody else has these rows. Earlier batches might have left blocks, and did not."""
    tier, count = FarTier(), MOST_EMPTY + 8
    with engine_on(tier, rate=0.0) as engine:
        for seed in range(count):
            submit(engine, random_prompt(seed, 300), 0)
            finish(engine, 1)
        found = counters(engine)
        assert found["lookups"] == found["lookups_empty"] == MOST_EMPTY
        assert found["lookups_spared"] == count - MOST_EMPTY


def test_what_does_not_pay_is_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of so many rows, and not more often than every TRY_SECONDS, by reading and by writing."""
    now = [1000.0]
    monkeypatch.setattr(worth, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tier = FarTier()
    with engine_on(tier, rate=1.0) as engine:
        policy = engine.client._worth  # type: ignore[attr-defined]
        one = Row("0", PROMPT, Generation(2), num_common=768, num_elsewhere=768)
        one.block_keys = [bytes([n]) * 32 for n in range(3)]

        def tries(of: Callable[[Row, int], bool]) -> list[int]:
            return [number for number in range(4 * worth.TRY_EVERY) if of(one, 0)]

        for of in (policy.may_be_far, policy.is_for_far):
            assert tries(of) == [worth.TRY_EVERY - 1]
            assert tries(of) == []
            now[0] += worth.TRY_SECONDS
            assert tries(of) == [worth.TRY_EVERY - 1]
        now[0] += 60
        later = [policy.is_for_far(one, 1) for _ in range(worth.TRY_EVERY)]
        assert not any(later), "a chain's tail is of no use without its head"


def test_a_prefix_of_an_earlier_batch_is_found() -> None:
    """By the queue nobody else has it, but it is there: so later rows are looked up, too."""
    tier = FarTier()
    with engine_on(tier, rate=0.0) as engine:
        submit(engine, PROMPT, 768)
        finish(engine, 1)
        assert counters(engine)["published"] == 3
    with engine_on(tier, rate=0.0) as engine:
        submit(engine, PROMPT, 0)
        assert cached(finish(engine, 1)) == [768]


def test_what_lags_is_dropped_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two blocks of three: the first two are written, head first, and one is counted."""
    tier = FarTier()
    with engine_on(tier, rate=0.0, chunk_tokens=2048) as engine:
        room = 2 * (256 * engine.bytes_per_token + 64)
        monkeypatch.setattr(outbox, "MAX_BYTES", room)
        submit(engine, PROMPT, 768)
        keys = engine._scheduler.waiting[0].block_keys[:2]
        finish(engine, 1)
        assert counters(engine)["dropped"] == 1
        assert tier.keys == keys


def test_the_engine_copies_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read from the device's memory on the thread that writes them."""
    import threading

    from batchkv_worker.prefix.block_layout import BlockLayout

    threads = []
    tensors = BlockLayout.tensors

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return tensors(*arguments)

    monkeypatch.setattr(BlockLayout, "tensors", noted)
    with engine_on(FarTier(), rate=0.0) as engine:
        submit(engine, PROMPT, 768)
        finish(engine, 1)
        counters(engine)
    assert threads == ["batchkv-cache-writer"] * 3

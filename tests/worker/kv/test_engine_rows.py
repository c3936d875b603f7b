"""Known failures of tokens, cancels and memory in an engine (``REGRESSIONS.md``: T, C, G)."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.events import Completed, Work
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.model.loader import load
from batchkv_worker.sequence import Generation, Sequence
from worker.kv.crowd import Crowd, random_prompt


def test_rows_that_end_in_one_step() -> None:
    """T6, T5, B5: four rows of one length end together; each has all its tokens."""
    crowd = Crowd("gear")
    for index in range(4):
        crowd.add(str(index), random_prompt(index, 12), count=5)
    crowd.drain()
    crowd.add("one", random_prompt(7, 12), count=1)
    crowd.drain().check_alone()
    for event in crowd.ended.values():
        assert event.usage.completion == len(event.token_ids)
        assert event.text == "".join(f"{token} " for token in event.token_ids)


def test_rows_that_join_feed_their_own_token() -> None:
    """T2: at every step another row joins or leaves; nobody gets a neighbour's last token."""
    for family in ("gear", "gemma3_text"):
        crowd = Crowd(family, slots=3, group_cost=1)
        for index in range(9):
            crowd.add(str(index), random_prompt(index, 1 + 7 * index % 30), count=2 + index % 4)
            crowd.step()
        crowd.drain().check_alone()


def test_letters_of_several_bytes_stay_whole() -> None:
    """T4: each row has a detokenizer of its own; a letter's bytes are never mixed or cut."""
    loaded = load(str(MODEL_PATH))
    engine = Engine(loaded, EngineConfig(slots=3, memory_bytes=2**26, path="fused"))
    texts = {"a": "äöü ß", "b": "日本語", "c": "🙂 → é"}
    for job_id, text in texts.items():
        params = SamplingParams(max_tokens=7, temperature=1.5, seed=ord(job_id))
        engine.add(Work(job_id, Request(job_id, "completion", prompt=text, params=params)))
    ended: dict[str, Completed] = {}
    while not engine.is_idle:
        ended |= {event.job_id: event for event in engine.step() if isinstance(event, Completed)}
    assert set(ended) == set(texts)
    for event in ended.values():
        expected = loaded.tokenizer.decode(list(event.token_ids))
        assert event.text.strip(" \ufffd") == expected.strip(" \ufffd")


@pytest.mark.parametrize("family", ["gear", "falcon_h1"])
def test_a_cancel_in_prefill_frees_everything(family: str) -> None:
    """C3, C4: cancelled between the chunks of a hybrid's prompt, alone and with neighbours."""
    crowd = Crowd(family, chunk_tokens=64, prefix_bytes=2**26)
    crowd.run("warm-up", random_prompt(1, 30))
    crowd.add("long", random_prompt(2, 2000))
    crowd.add("next", random_prompt(3, 300))
    crowd.step()
    for job_id in ("long", "long", "unknown"):
        crowd.engine.cancel(job_id)
    crowd.step()
    crowd.add("twins a", random_prompt(4, 25))
    crowd.add("twins b", random_prompt(5, 30))
    crowd.engine._scheduler.next_group()
    crowd.engine.cancel("twins b")
    crowd.drain().check_alone()
    assert set(crowd.ended) == {"warm-up", "next", "twins a"}
    crowd.engine.check_integrity()
    assert not crowd.engine._prefill.is_active


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gear"])
def test_memory_is_kept_to(family: str) -> None:
    """G5, G3: random rows, and slots and prefill never hold more than was allowed."""
    probe = Crowd(family, slots=8, prefix_bytes=0).engine.plan.costs
    allowed = 8 * probe.per_row + 4000 * probe.per_new_token
    crowd = Crowd(family, slots=8, prefix_bytes=0, memory_bytes=allowed, chunk_tokens=256)
    rng, refused = random.Random(4), 0
    for index in range(24):
        try:
            length = rng.choice([3, 30, 100, 500, 900])
            crowd.add(str(index), random_prompt(index, length), count=rng.randrange(1, 40))
        except RowRefused:
            refused += 1
    while not crowd.engine.is_idle:
        crowd.step()
        assert crowd.engine.kv_bytes <= allowed
    assert len(crowd.ended) + refused == 24 and refused < 12


def test_states_of_free_slots_are_counted() -> None:
    """G3, G5: what admission reckons with is what the slots hold, free ones between rows too."""
    crowd = Crowd("qwen3_next", slots=16, prefix_bytes=0)
    layouts, costs = crowd.engine._slots.layouts, crowd.engine.plan.costs
    for index in range(16):
        crowd.add(str(index), [1, 2, 3], count=40)
    crowd.step()
    crowd.add("waits", [1, 2, 3])  # so that gaps are not closed
    for index in range(15):
        crowd.engine.cancel(str(index))
    crowd.engine._scheduler._fits_memory = lambda *_: False  # type: ignore[method-assign]
    crowd.step(10)
    assert layouts.num_active == 1 and layouts.main.num_rows == 16
    reckoned = max(layouts.bytes_needed(costs, []), layouts.bytes_held(costs))
    assert crowd.engine.kv_bytes <= reckoned


def test_rows_too_long_are_refused_at_once() -> None:
    """C6: what never fits is an error at submission for every kind of layer, not a wait."""
    for family in ("gear", "gemma3_text", "qwen3_next"):
        crowd = Crowd(family, memory_bytes=2**20)
        assert not crowd.engine._scheduler.memory.fits_alone(Demand(30_000, 10))
        with pytest.raises(RowRefused, match="do not fit"):
            crowd.engine.submit_row(Sequence("x", [1] * 30_000, Generation(10)))
        assert crowd.run("small", [1, 2, 3]).usage.completion == 6


def test_a_closed_engine_holds_nothing() -> None:
    """G1, W8: buffers, prefill rows and rows are gone when an engine is closed in the middle."""
    crowd = Crowd("gear", prefix_bytes=0)
    for index in range(4):
        crowd.add(str(index), random_prompt(index, 300), count=50)
    crowd.step(5)
    gc.collect()
    held, before = crowd.engine.kv_bytes, mx.get_active_memory()
    crowd.engine.close()
    assert before - mx.get_active_memory() > 0.9 * held

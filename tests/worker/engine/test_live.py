"""Live rows in the engine: first in line, in pieces, and what they cost rows of batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.live import LiveRows
from batchkv_worker.events import Completed, Event, Piece, Work
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.engine.test_engine import work
from worker.kv.crowd import model_of, random_prompt


def engine(family: str = "llama", **changes: Any) -> Engine:
    values: dict[str, Any] = {"slots": 4, "chunk_tokens": 512, "path": "fused", "lane_chunk": 256}
    values |= {"scheme": "float", "memory_bytes": 2**28, "group_cost": 64, **changes}
    model = model_of(family)
    config = tiny_models.with_measured(model, EngineConfig(**values))
    return Engine(tiny_models.loaded(model), config)


def row(name: str, length: int, num_tokens: int) -> Sequence:
    return Sequence(name, random_prompt(length, length), Generation(num_tokens, temperature=0.0))


def live(name: str, prompt: str = "1 2 3", **params: Any) -> Work:
    return replace(work(name, prompt, **params), is_live=True)


def run(running: Engine, steps: int = 3000) -> list[Event]:
    found: list[Event] = []
    for _ in range(steps):
        if running.is_idle:
            break
        found += running.step()
        running.check_integrity()
    return found


def tokens_of(events: list[Event]) -> dict[str, tuple[int, ...]]:
    return {one.job_id: one.token_ids for one in events if isinstance(one, Completed)}


def joined(events: list[Event], name: str) -> str:
    return "".join(one.text for one in events if isinstance(one, Piece) and one.job_id == name)


def batch() -> list[Sequence]:
    return [row(f"row {number}", 40 + number, 30) for number in range(7)]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_live_row_starts_at_once_and_changes_no_token(family: str) -> None:
    """All slots decode: the live row has its first token after three steps. The rows of the batch,
    one of which leaves its slot, have the tokens that they have alone."""
    running = engine(family)
    for one in batch():
        running.submit_row(one)
    usual = tokens_of(run(running))
    for one in batch():
        running.submit_row(one)
    events: list[Event] = []
    while running._scheduler.layouts.num_free or running._scheduler.group:
        events += running.step()
    running.add(live("asked", max_tokens=20))
    for _ in range(3):
        events += running.step()
    assert any(isinstance(one, Piece) for one in events)
    events += run(running)
    found = tokens_of(events)
    assert len(found.pop("asked")) == 20
    assert found == usual
    assert running._decode_rows.num_preempted == 1
    running.close()


def test_a_long_prompt_of_a_batch_is_set_aside() -> None:
    """A prompt of 10 chunks is half computed: the live row does not wait for it, no chunk of it is
    computed twice, and its tokens stay the same."""
    running = engine(prefix_bytes=0)
    computed: list[int] = []
    model = running._prefill._model

    def counting(tokens: Any, cache: Any = None) -> Any:
        computed.append(tokens.size)
        return model(tokens, cache=cache)

    running._prefill._model = counting
    running.submit_row(row("long", 5120, 8))
    alone = tokens_of(run(running))["long"]
    num_alone = sum(computed)
    computed.clear()
    running.submit_row(row("long", 5120, 8))
    running.submit_row(row("short", 30, 30))
    running.step()
    assert running._prefill.is_active
    running.add(live("asked", max_tokens=4))
    events: list[Event] = []
    was_aside = False
    while not joined(events, "asked"):
        events += running.step()
        was_aside |= running._scheduler.aside is not None
    assert was_aside
    assert "long" not in tokens_of(events)
    events += run(running)
    assert tokens_of(events)["long"] == alone
    assert sum(computed) <= num_alone + 30 + 8
    running.close()


def test_a_slot_is_kept_free_and_chunks_are_cut_only_while_the_lane_is_in_use() -> None:
    """In the minute after a live row, rows of a batch leave one slot free; before and later not."""
    now = [100.0]
    running = engine()
    running._live = LiveRows(running._decode_rows, 256, clock=lambda: now[0])
    assert running._scheduler.chunk_tokens == 512
    running.add(live("asked"))
    run(running)
    assert running._scheduler.chunk_tokens == 256
    for one in batch():
        running.submit_row(one)
    most = 0
    for _ in range(12):
        running.step()
        most = max(most, len(running._rows))
    assert most == 3
    now[0] += 61
    for _ in range(40):
        running.step()
        most = max(most, len(running._rows))
    assert most == 4 and running._scheduler.chunk_tokens == 512
    running.close()


def test_a_canceled_live_row_leaves_nothing() -> None:
    """Cancelled while it waits, in prefill and in a slot: no event follows."""
    for steps in (0, 1, 3):
        running = engine()
        running.submit_row(row("long", 1500, 5))
        running.step()
        running.add(live("asked", prompt=" ".join(["7"] * 600), max_tokens=50))
        for _ in range(steps):
            running.step()
        running.cancel("asked")
        events = run(running)
        assert [one.job_id for one in events] == ["long"]
        running.check_integrity()
        running.close()


@pytest.mark.parametrize("stop", [(), ("7 ", "77"), ("no such stop string",)])
def test_pieces_join_to_the_text(stop: tuple[str, ...]) -> None:
    """The pieces are how the text begins, also when a stop string cuts it; and nothing else."""
    running = engine()
    for number in range(4):
        running.add(live("asked", prompt=f"{number} 2", max_tokens=20, stop=stop))
        events = run(running)
        (end,) = (one for one in events if isinstance(one, Completed))
        assert end.text.startswith(joined(events, "asked"))
        running.add(work("asked", prompt=f"{number} 2", max_tokens=20, stop=stop))
        (same,) = run(running)
        assert isinstance(same, Completed) and same.text == end.text
    running.close()


def test_several_choices_come_at_the_end() -> None:
    """A live row with n has no pieces, and all its choices."""
    running = engine()
    running.add(live("asked", n=2, temperature=1.0))
    (end,) = run(running)
    assert isinstance(end, Completed) and len(end.more) == 1
    running.close()


def test_more_live_rows_than_slots() -> None:
    """Six live rows and seven of a batch in four slots: all end, with the tokens of each alone."""
    running = engine()
    works = [live(f"asked {number}", f"{number} 5", max_tokens=9) for number in range(6)]
    for one in batch():
        running.submit_row(one)
    usual = tokens_of(run(running))
    for one in works:
        running.add(one)
    usual |= tokens_of(run(running))
    for one in batch():
        running.submit_row(one)
    for _ in range(5):
        running.step()
    for one in works:
        running.add(one)
    assert tokens_of(run(running)) == usual
    running.close()

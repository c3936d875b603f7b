"""Whole engines whose rows close gaps give the tokens of those whose rows stay."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_worker.engine import decode_rows
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.slots.changes import Move
from parity.few import few
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.record_backends import WithRecords
from worker.kv.reference import x86

SLOTS = 8
LONG = random_prompt(1, 520)


def crowd_of(family: str, scheme: str, backend: Any, **changes: Any) -> Crowd:
    path = "kernel" if isinstance(backend, WithRecords) else "folded"
    values = {"slots": SLOTS, "group_cost": 16, "prefix_cells": 1, "chunk_tokens": 256, **changes}
    return Crowd(family, scheme=scheme, backend=backend, path=path, **values)


def tokens(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[int]], list[int]]:
    """Of rows beside three that are cancelled; and how many moved at each closing."""
    sizes: list[int] = []
    real = DecodeSlots.close_gaps

    def watched(slots: DecodeSlots, most: int = 0) -> list[Move]:
        moves = real(slots, most)
        sizes.append(len(moves))
        return moves

    lengths = (3, 40, 17, 90, 5, 33, 20, 61)
    for index, length in enumerate(lengths):
        prompt = (LONG if index > 2 else []) + random_prompt(index + 5, length)
        crowd.add(str(index), prompt, 20 + index, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSlots, "close_gaps", watched)
        while len(crowd.engine._rows) < SLOTS:
            crowd.step()
        crowd.step(3)
        for job_id in [crowd.engine._rows[slot].job_id for slot in (0, 1, 3)]:
            crowd.engine.cancel(job_id)
        crowd.drain()
    crowd.engine.check_integrity()
    assert len(crowd.ended) == 5
    return {job_id: crowd.tokens(job_id) for job_id in crowd.ended}, sizes


BACKENDS: dict[str, Any] = {
    "row by row": x86(),
    "at once": x86(starts_each_layer=False, writes_rows_at_once=True),
    "records": WithRecords(),
    "records at once": WithRecords(writes_rows_at_once=True),
}


MODELS = (
    ("llama", "float"),
    ("qwen3_next", "affine8"),  # states
    ("gpt_oss", "turbo4"),  # windows and sinks
    ("llama", "affine8"),
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("backend", "family", "scheme"),
    few([(backend, *model) for model in MODELS for backend in BACKENDS], 6),
)
def test_rows_that_move_together_keep_their_tokens(
    family: str, scheme: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many lengths, behind a shared prefix or none, beside rows that leave."""
    found, sizes = tokens(crowd_of(family, scheme, BACKENDS[backend]), monkeypatch)
    assert max(sizes) >= 2
    monkeypatch.setattr(decode_rows, "LEAST_CLOSED", 0)
    wanted, sizes = tokens(crowd_of(family, scheme, BACKENDS[backend]), monkeypatch)
    assert found == wanted and not any(sizes)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("multiple", "left", "moved"),
    [
        (1, (2, 5, 7), [(7, 0), (5, 1)]),
        (4, (2, 5, 7), [(7, 0), (5, 1)]),  # a step computes 4 rows, not 8
        (4, (0, 3, 5, 6, 7), []),  # it would still compute 8
        (4, (1, 3, 6), [(6, 0)]),  # 3 may stay
        (4, (1, 3), []),  # it computes 4 already
        (1, (0, 1, 2, 3, 4, 7), [(7, 5)]),  # 6 of 8 are a quarter fewer
        (1, (0, 1, 2, 3, 5, 6), []),  # 6 of 7 are not
    ],
)
def test_gaps_are_closed_only_where_a_step_computes_a_quarter_fewer_rows(
    multiple: int, left: tuple[int, ...], moved: list[tuple[int, int]]
) -> None:
    """A closing waits for the device, and steps may compute the same rows with gaps as without."""
    crowd = crowd_of("llama", "float", x86(rows_multiple=multiple))
    for index in range(SLOTS):
        crowd.add(str(index), random_prompt(index, 20), 30, ignore_eos=True)
    while len(crowd.engine._rows) < SLOTS:
        crowd.step()
    crowd.engine._read_in_flight()
    rows, slots = crowd.engine._decode_rows, crowd.engine._slots
    for slot in range(SLOTS):
        if slot not in left:
            rows.free(rows.by_slot[slot])
    before = dict(rows.by_slot)
    rows.close_gaps()
    to = dict(moved)
    assert {to.get(slot, slot): row for slot, row in before.items()} == rows.by_slot
    assert all(row.slot == slot for slot, row in rows.by_slot.items())
    slots.check()


@pytest.mark.parametrize(
    ("chunk_steps", "answer", "num_rows"), [(0.0, 16, 5), (1.0, 16, 8), (1.0, 24, 5), (2.0, 24, 8)]
)
def test_gaps_are_not_closed_for_a_few_steps_where_moving_costs_steps(
    chunk_steps: float, answer: int, num_rows: int
) -> None:
    """Moving costs as much as some steps there. What the last row may generate decides."""
    crowd = crowd_of("llama", "float", x86(chunk_steps=chunk_steps))
    for index in range(SLOTS):
        crowd.add(str(index), random_prompt(index, 20), answer, ignore_eos=True)
    while len(crowd.engine._rows) < SLOTS:
        crowd.step()
    for number in (1, 2, 5):
        crowd.engine.cancel(crowd.engine._rows[number].job_id)
    crowd.step(2)
    assert crowd.engine._slots.layouts.main.num_rows == num_rows
    crowd.drain()
    assert len(crowd.ended) == 5

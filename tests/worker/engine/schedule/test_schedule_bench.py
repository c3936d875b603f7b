"""The scheduler as a whole, by the benchmark that simulates an engine: no rule may cost more."""

from __future__ import annotations

import pytest

from benchmarks.plan.bench_schedule import CHUNK_TOKENS, Times, measure


@pytest.mark.parametrize(
    ("batch", "planned", "least"),
    [
        ("mixed", True, 0.76),
        ("mixed", False, 0.725),
        ("few-shot", True, 0.535),
        ("long prompts", True, 0.56),
    ],
)
def test_few_steps_and_chunks_are_lost(batch: str, planned: bool, least: float) -> None:
    """Of the time, so much is the least time, with the times of a GPU whose host is the limit."""
    found = measure(batch, 700, 3, 64, planned=planned)
    assert found.share(Times()) > least
    assert found.pads < 0.15 * found.tokens
    assert found.chunks >= (found.tokens + found.pads) / CHUNK_TOKENS


def test_one_slot_loses_no_step() -> None:
    """A chunk a row, and as many steps as tokens."""
    found = measure("few-shot", 20, 1, 1)
    assert (found.steps, found.chunks, found.pads) == (320, 20, 0)

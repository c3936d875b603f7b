"""The work of prompts: of those that are decoded, and of compressed ones."""

from __future__ import annotations

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.queue.runs.sizes import ENOUGH_BYTES, DataSizes, prompt_work, text_size


def test_the_work_of_a_prompt() -> None:
    """What it shares is computed already; the work is never nothing."""
    assert prompt_work(400, None) == 100
    assert prompt_work(400, 200) == 50
    assert prompt_work(10, 400) == 1


def test_a_backlog_counts_as_text() -> None:
    """Its jobs are compressed: by as much as those that have started. What is shared is less."""
    sizes = DataSizes()
    sizes.hold(400, None)
    assert sizes.held_work == 100, "nothing has started"
    sizes.note_text(100, 1_000)
    assert sizes.held_work == 1_000
    sizes.hold(400, 3_000)
    assert sizes.held_work == 1_250
    sizes.release(400, None)
    assert sizes.held_work == 250
    sizes.release(400, 3_000)
    assert sizes.held_work == 0


def test_new_rows_count_more() -> None:
    """Rows of another batch may be compressed by more."""
    sizes = DataSizes()
    sizes.note_text(10 * ENOUGH_BYTES, 10 * ENOUGH_BYTES)
    for _ in range(20):
        sizes.note_text(ENOUGH_BYTES, 4 * ENOUGH_BYTES)
    sizes.hold(100, None)
    assert 95 < sizes.held_work <= 100


def test_the_size_of_a_text() -> None:
    """All messages count, in bytes. What is no text does not."""
    params = SamplingParams()
    assert text_size(Request("1", "completion", prompt="e\u00e9", params=params)) == 3
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de"}]
    messages.append({"role": "user", "content": None})
    assert text_size(Request("1", "chat", messages=messages, params=params)) == 5
    assert text_size(Request("1", "chat", params=params)) == 0

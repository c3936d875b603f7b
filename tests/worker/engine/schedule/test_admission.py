"""Rows that leave their slots when memory is short, and come back: token for token."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS
from batchkv_worker.engine.schedule.scheduler import MAX_PREEMPTIONS
from batchkv_worker.events import Completed
from batchkv_worker.kv.slots.growth import STEP
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.sequence import Generation, Sequence
from parity.few import few
from support import tiny_models
from worker.kv.crowd import model_of, random_prompt

ROWS = 6
ANSWER = 60


def engine(model: Any, memory_bytes: int = 2**40, **changes: Any) -> Engine:
    values: dict[str, Any] = {"slots": ROWS, "chunk_tokens": 256, "path": "fused"}
    values |= {"memory_bytes": memory_bytes, "prefix_bytes": 0, **changes}
    config = tiny_models.with_measured(model, EngineConfig(**values))
    return Engine(tiny_models.loaded(model), config)


def room(costs: Costs, columns: int) -> int:
    """Bytes for so many columns of the layers with every token, and for windows and states."""
    windows = sum(size * (STEP + 256) for size in costs.per_window.values())
    return columns * (costs.per_token + costs.largest) + ROWS * (costs.per_row + windows)


def expect_short_answers(running: Engine, num_tokens: int = 8) -> None:
    """As if many rows had ended early: many of the next ones are let in."""
    for _ in range(FEWEST_OUTPUTS):
        running._scheduler.output_lengths.add(num_tokens)


def generation(index: int, count: int) -> Generation:
    """Greedy, sampled, and sampled with everything that looks back at what was generated."""
    if index % 3 == 0:
        return Generation(count, temperature=0.0, logprobs=2)
    looks_back: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.8,
        "bad_words": ((1, 2, 3), (4, 5), (6,)),
        "logit_bias": tuple((token, 3.0) for token in range(8)),
    }
    return Generation(
        *(count, 0.8, 0.9),
        seed=7 + index,
        logprobs=1,
        **(looks_back if index % 3 == 2 else {}),
    )


def rows(count: int = ROWS, answer: int = ANSWER) -> list[Sequence]:
    made = []
    for index in range(count):
        stop = (" 511 510 509 ",) if index == 1 else ()
        params = generation(index, answer - 5 * index)
        row = Sequence(str(index), random_prompt(index, 150 + 37 * index % 95), params)
        if stop:
            row.generation = Generation(answer, temperature=0.0, stop=stop)
            row.detokenizer = tiny_models.NumberTokenizer().detokenizer
        made.append(row)
    return made


def run(running: Engine, wanted: list[Sequence]) -> dict[str, Completed]:
    for row in wanted:
        running.submit_row(row)
    ended: dict[str, Completed] = {}
    for _ in range(20_000):
        if running.is_idle:
            break
        for event in running.step():
            assert isinstance(event, Completed), event
            assert event.job_id not in ended
            ended[event.job_id] = event
        running.check_integrity()
    assert running.is_idle and len(ended) == len(wanted)
    return ended


@pytest.mark.parametrize(
    ("family", "scheme", "num_parked"),
    few(
        [
            ("llama", "turbo4", 2),
            ("llama", "float", 0),
            ("gemma3_text", "affine8", 9),
            ("qwen3_next", "float", 0),
            ("qwen3_next", "turbo4", 9),
            ("deepseek_v3", "affine8", 2),
        ],
        3,
    ),
)
def test_rows_that_leave_and_come_back(family: str, scheme: str, num_parked: int) -> None:
    """Tokens, texts, log-probabilities and usage are those of a run without preemptions.

    With room for ``num_parked`` rows their slots' content is kept; the others are computed again.
    """
    model = model_of(family)
    roomy = engine(model, scheme=scheme)
    expected = run(roomy, rows())
    assert roomy._decode_rows.num_preempted == 0
    costs = roomy.plan.costs
    prefix_bytes = (num_parked and num_parked + 1) * (360 * costs.per_new_token + costs.per_row)
    memory_bytes = room(costs, 2000) + prefix_bytes
    tight = engine(model, memory_bytes, prefix_bytes=prefix_bytes, scheme=scheme)
    expect_short_answers(tight)
    wanted = rows()
    got = run(tight, wanted)
    assert tight._decode_rows.num_preempted >= 2
    assert max(row.num_preempted for row in wanted) <= MAX_PREEMPTIONS
    for job_id, event in expected.items():
        mine = got[job_id]
        assert mine.token_ids == event.token_ids, job_id
        assert (mine.text, mine.finish_reason) == (event.text, event.finish_reason)
        assert mine.usage == event.usage
        for got_one, other in zip(mine.logprobs or (), event.logprobs or (), strict=True):
            assert got_one.token == other.token
            assert got_one.logprob == pytest.approx(other.logprob, abs=0.01)


def test_a_row_that_waits_to_come_back_may_be_cancelled() -> None:
    """Its parked arrays are dropped at once; the other rows end as without it."""
    model = model_of("llama")
    costs = engine(model, scheme="affine8").plan.costs
    prefix_bytes = 9 * 360 * costs.per_token
    running = engine(
        *(model, room(costs, 2000) + prefix_bytes), prefix_bytes=prefix_bytes, scheme="affine8"
    )
    expect_short_answers(running)
    for row in rows():
        running.submit_row(row)
    ended = set()
    left = None
    while not running.is_idle:
        ended |= {event.job_id for event in running.step() if isinstance(event, Completed)}
        if left is None:
            left = next((row for row in running._scheduler.waiting if row.parked), None)
            if left is not None:
                assert running.prefixes.parked(left.parked)
                running.cancel(left.job_id)
                assert running.prefixes.parked(left.parked) is None
        running.check_integrity()
    assert left is not None
    assert ended == {str(index) for index in range(ROWS)} - {left.job_id}

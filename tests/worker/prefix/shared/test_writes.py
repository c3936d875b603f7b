"""What is written for others: the prefixes that a batch shares, and not the ends of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from batchkv_cache_store.lease import LocalLeases
from batchkv_producer.intake.formats import Row as Line
from batchkv_producer.order.planner import BatchPlan
from batchkv_producer.wire.job import Request, SamplingParams, decode_job
from batchkv_worker.engine.engine import Engine
from batchkv_worker.events import Completed, Work
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from worker.prefix.engines_on_store import (
    access,
    cached,
    eventually,
    finish,
    on_disk,
    random_prompt,
    running,
)

SHARED = random_prompt(1, 768)


def submit(engine: Engine, prompts: Sequence[list[int]], num_common: int | None) -> None:
    for index, prompt in enumerate(prompts):
        row = Row(str(index), prompt, Generation(4, temperature=0.0), num_common=num_common)
        engine.submit_row(row)


def num_written(engine: Engine) -> int:
    assert engine.client.flush(30)  # type: ignore[attr-defined]
    return engine.client.counters.get("published", 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_common", "written"), [(0, 0), (700, 2), (768, 3), (None, 5)])
def test_the_ends_of_prompts_stay_here(
    num_common: int | None, written: int, tmp_path: Path
) -> None:
    """A prompt of five blocks: written are those whole ones that the batch shares; all if nobody
    knows. This worker has all of them itself, and no lease is left."""
    leases = LocalLeases()
    prompt = random_prompt(3, 5 * 256 + 9)
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        submit(engine, [prompt], num_common)
        engine.step()
        while not engine.client._pending.has_answers and not engine.prefixes.num_bytes:
            assert len(leases.held()) <= written, "a lease on what will not be written"
            engine.step()
        assert cached(finish(engine, 1)) == [0]
        assert num_written(engine) == written
        eventually(lambda: not leases.held())
        submit(engine, [prompt], num_common)
        assert cached(finish(engine, 1)) == [5 * 256]


def test_what_rows_here_want_is_written_whatever_was_said(tmp_path: Path) -> None:
    """Two rows of two batches that begin alike: neither producer knew, the worker sees it."""
    tails = [[*SHARED, *random_prompt(n, 300)] for n in (1, 2)]
    with running(tiny_models.build("llama"), access(on_disk(tmp_path))) as engine:
        submit(engine, tails, 0)
        assert sorted(cached(finish(engine, 2))) == [0, 768]
        assert num_written(engine) == 3


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_single_rows_of_one_batch_share_between_workers(family: str, tmp_path: Path) -> None:
    """Each worker has one row, as near the end of a queue: the prefix is computed once, though
    nobody there has seen where the two part, which is where recurrent layers need a state."""
    model, leases = tiny_models.build(family), LocalLeases()
    prompts = [[*SHARED, *random_prompt(n, 600)] for n in (1, 2)]
    found = []
    for prompt in prompts:
        way = access(on_disk(tmp_path), leases, is_shared=True)
        with running(model, way) as engine:
            submit(engine, [prompt], 780)
            found += cached(finish(engine, 1))
    assert found == [0, 768]


def test_memory_keeps_what_waiting_rows_want() -> None:
    """Six blocks of room: a prefix that a row waits for outlives eight younger blocks."""
    model = tiny_models.build("llama")
    prompts = [[*SHARED, 1], random_prompt(5, 1030), random_prompt(6, 1031), [*SHARED, 2, 3]]
    with running(model, None) as engine:
        room = 6 * 256 * engine.bytes_per_token
    with running(model, None, prefix_bytes=room, slots=1) as engine:
        submit(engine, prompts, None)
        assert cached(finish(engine, 4)) == [0, 0, 0, 768]


def test_ends_that_nobody_shares_are_forgotten_first() -> None:
    """Room for eight blocks: what the batch shares outlives a younger end of a prompt."""
    model = tiny_models.build("llama")
    with running(model, None) as engine:
        room = 8 * 256 * engine.bytes_per_token
    with running(model, None, prefix_bytes=room, slots=1) as engine:
        for num_common, prompt in ((768, [*SHARED, 1]), (0, random_prompt(5, 1030))):
            submit(engine, [prompt], num_common)
            finish(engine, 1)
        submit(engine, [random_prompt(6, 700)], None)
        finish(engine, 1)  # one block too many
        submit(engine, [random_prompt(7, 700)], None)
        finish(engine, 1)  # two more
        submit(engine, [[*SHARED, 2, 3]], 768)
        assert cached(finish(engine, 1)) == [768]


def run_batch(engine: Engine, texts: Sequence[str]) -> list[Completed]:
    """A batch as the producer plans it and a worker gets it; answers in the input's order."""
    with BatchPlan(SamplingParams(max_tokens=2)) as plan:
        requests = (Request(f"c{n}", "completion", prompt=text) for n, text in enumerate(texts))
        plan.add(Line(line, request) for line, request in enumerate(requests))
        plan.seal()
        for chunk in plan.chunks():
            for line, data, shared_bytes in chunk.jobs:
                engine.add(Work(str(line), decode_job(data), shared_bytes))
    return finish(engine, len(texts))


@pytest.mark.parametrize("writes", ["needed", "shared", "all"])
def test_a_batch_writes_what_it_shares(writes: str, tmp_path: Path) -> None:
    """From text to blocks: ten rows behind a document and ten alone; the document is written.

    A later batch behind the document finds all of it.
    """

    def text(tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    document = random_prompt(1, 900)
    behind = [text([*document, *random_prompt(10 + n, 400)]) for n in range(10)]
    alone = [text(random_prompt(30 + n, 700)) for n in range(10)]
    model = tiny_models.build("llama")
    with running(model, access(on_disk(tmp_path), writes=writes)) as engine:
        run_batch(engine, [*behind, *alone])
        num_unique = 3 + 10 * 2 + 10 * 2
        assert num_written(engine) == (num_unique if writes == "all" else 3)
    with running(model, access(on_disk(tmp_path))) as engine:
        assert cached(run_batch(engine, [text([*document, 1, 2, 3])])) == [768]

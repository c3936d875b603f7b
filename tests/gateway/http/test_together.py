"""Questions that requests ask at the same time, and polling by many clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from openai import NotFoundError, OpenAI

from batchkv_gateway.http.together import MAX_QUESTIONS, Together
from benchmarks import bench_gateway
from support.gateway import Gateway


def test_questions_during_a_call_are_asked_together_after_it() -> None:
    """The first question is asked at once; those that come meanwhile wait, and share a call."""
    calls, may_go = list[list[int]](), threading.Event()

    def ask(questions: Sequence[int]) -> list[int]:
        calls.append(list(questions))
        assert may_go.wait(10)
        return [question * 10 for question in questions]

    async def run() -> list[int]:
        together = Together[int, int](ask)
        asked = [asyncio.create_task(together.get(0))]
        while not calls:
            await asyncio.sleep(0.001)
        asked += [asyncio.create_task(together.get(number)) for number in (1, 2, 3)]
        left = asyncio.create_task(together.get(9))  # its client leaves
        await asyncio.sleep(0)
        left.cancel()
        may_go.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(run()) == [0, 10, 20, 30]
    assert calls == [[0], [1, 2, 3, 9]]


def test_a_call_has_a_bounded_number_of_questions() -> None:
    """More questions than fit into a call are asked in several."""
    sizes = list[int]()

    def ask(questions: Sequence[int]) -> Sequence[int]:
        sizes.append(len(questions))
        return questions

    async def run() -> list[int]:
        together = Together[int, int](ask)
        return await asyncio.gather(*(together.get(n) for n in range(2 * MAX_QUESTIONS + 5)))

    assert asyncio.run(run()) == list(range(2 * MAX_QUESTIONS + 5))
    assert sizes == [MAX_QUESTIONS, MAX_QUESTIONS, 5]


def test_an_error_answers_the_questions_of_its_call_alone() -> None:
    """Every question of a failed call gets its error, and later questions are asked anew."""

    def ask(questions: Sequence[int]) -> Sequence[int]:
        if 0 in questions:
            raise ValueError("no answer")
        return questions

    async def run() -> None:
        together = Together[int, int](ask)
        both = await asyncio.gather(together.get(0), together.get(1), return_exceptions=True)
        assert [type(each) for each in both] == [ValueError, ValueError]
        assert await together.get(2) == 2

    asyncio.run(run())


def test_many_clients_poll_batches_of_their_own(gateway: Gateway, client: OpenAI) -> None:
    """Polls that arrive together are answered each with its batch; an unknown id stays unknown."""
    ids = bench_gateway.make_batches(client, 3)
    cost = bench_gateway.poll(gateway, ids, num_clients=10, num_polls=60)
    assert len(cost.latencies) == 60
    with pytest.raises(NotFoundError):
        client.batches.retrieve("batch_" + "0" * 32)


def test_an_upload_of_large_rows_arrives_whole(gateway: Gateway, client: OpenAI) -> None:
    """The benchmark's upload stores every byte, and its file is listed."""
    cost = bench_gateway.upload(gateway, bench_gateway.rows_file(40, 4000))
    assert cost.megabytes == pytest.approx(0.16, rel=0.01)
    assert [file.bytes for file in client.files.list().data] == [round(cost.megabytes * 1e6)]

"""Answers questions that requests ask at the same time by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Question = TypeVar("Question")
Answer = TypeVar("Answer")

MAX_QUESTIONS = 100


class Together(Generic[Question, Answer]):
    """Asks ``ask`` in a thread, one call at a time.

    A question that comes while a call is under way waits for the next call, together with others.
    So no answer is older than its question. ``ask`` returns the answers in the questions' order. An
    error of it is the answer to all of them.
    """

    def __init__(self, ask: Callable[[Sequence[Question]], Sequence[Answer]]) -> None:
        self._ask = ask
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def get(self, question: Question) -> Answer:
        """The answer to one question."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((question, future))
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                asked = self._waiting[:MAX_QUESTIONS]
                del self._waiting[:MAX_QUESTIONS]
                await self._answer(asked)
        finally:
            self._task = None

    async def _answer(self, asked: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        questions = [question for question, _ in asked]
        call = asyncio.create_task(run_in_threadpool(self._ask, questions))
        await asyncio.wait([call])
        fault = call.exception()
        for index, (_, future) in enumerate(asked):
            if future.done():  # its request has ended
                continue
            if fault is not None:
                future.set_exception(fault)
            else:
                future.set_result(call.result()[index])

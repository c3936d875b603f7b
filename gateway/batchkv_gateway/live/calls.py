"""The live lane as the event loop uses it: no thread waits for an answer.

One thread asks rows. While it waits for Redis, more requests come; it asks all of them at once. The
lane's own thread reads all answers, and wakes the event loop once for many of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from batchkv_gateway.stopping import Stopping
from batchkv_producer.live import Answer, Lane, LaneRefusedError, LostAnswerError, Piece, Question
from batchkv_producer.wire.job import Request, Result
from batchkv_producer.wire.live import Pieces

MAX_ASKED = 100  # rows in one call of Redis
ASK_SECONDS = 15.0  # until Redis has the rows
LAST_SECONDS = 60.0  # as long as a model counts as served that nobody serves any more
GRACE_SECONDS = 7.0  # that answers have to end when the gateway stops

Loop = asyncio.AbstractEventLoop


class Call:
    """The answer to one row, awaited. It belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._news = asyncio.Event()
        self._fault: LostAnswerError | None = None
        self.is_left = False  # nobody waits for it any more

    @property
    def row_id(self) -> str:
        """The id of the row, once it is asked."""
        assert self._answer is not None
        return self._answer.row_id

    @property
    def result(self) -> Result | None:
        """The result, once all pieces are read."""
        return None if self._answer is None else self._answer.result

    async def pieces(self, timeout_seconds: float) -> list[Piece]:
        """The next pieces. None of them after ``timeout_seconds``, or if ``result`` is there.

        Raises LostAnswerError if there will be no result.
        """
        answer = self._answer
        assert answer is not None
        while True:
            self._news.clear()
            if (found := answer.take()) or answer.result is not None:
                return found
            if self._fault is not None:
                raise self._fault
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._news.wait()
            except TimeoutError:
                return []

    async def whole(self) -> Result:
        """The result. Raises LostAnswerError if there will be none."""
        answer = self._answer
        assert answer is not None
        while True:
            self._news.clear()
            answer.take()
            if answer.result is not None:
                return answer.result
            if self._fault is not None:
                raise self._fault
            await self._news.wait()

    # -- called by the bridge

    def begin(self, answer: Answer) -> None:
        """The row is asked."""
        self._answer = answer

    def wake(self) -> None:
        """Something has come."""
        self._news.set()

    def end(self, why: str) -> None:
        """There will be no result, because the gateway stops."""
        self._fault = LostAnswerError(why)
        self._news.set()

    @property
    def answer(self) -> Answer | None:
        """The lane's side."""
        return self._answer


@dataclass(slots=True, eq=False)
class _Asking:
    """The rows of one request, on their way to Redis."""

    questions: list[Question]
    calls: list[Call]
    done: asyncio.Future[None]


class Calls:
    """All calls of one gateway. All but ``close`` is for the event loop's thread."""

    def __init__(self, lane: Lane, stopping: Stopping) -> None:
        self._lane, self._stopping = lane, stopping
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="live-asks")
        self._loop: Loop | None = None
        self._waiting: deque[_Asking] = deque()
        self._task: asyncio.Task[None] | None = None  # asks, while any request waits
        self._ender: asyncio.Task[None] | None = None
        self._open: set[Call] = set()
        self._news: deque[Call] = deque()  # calls to wake; the lane's thread adds them
        self._is_waking = False
        self._last: tuple[str, float] = "", 0.0  # the last model that answered, and when

    @property
    def num_open(self) -> int:
        """Rows whose answers somebody waits for."""
        return len(self._open)

    @property
    def last_model(self) -> str:
        """The model of the last request that was not refused; "" after ``LAST_SECONDS``."""
        model, when = self._last
        return model if time.monotonic() - when < LAST_SECONDS else ""

    async def ask(self, rows: Sequence[Request], model: str, pieces: Pieces) -> list[Call]:
        """Ask the rows of one request. The caller must ``leave`` each call.

        Raises LaneRefusedError, LostAnswerError if the gateway stops, and RedisError.
        """
        loop = self._started()
        if self._stopping.has_begun:
            raise LostAnswerError("the gateway stops: ask again")
        calls = [Call() for _ in rows]
        questions = [
            Question(row, model, pieces=pieces, on_given=lambda call=call: self._note(call))  # type: ignore[misc]
            for row, call in zip(rows, calls, strict=True)
        ]
        asking = _Asking(questions, calls, loop.create_future())
        self._waiting.append(asking)
        if self._task is None:
            self._task = loop.create_task(self._ask_all())
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await asking.done
        except TimeoutError:
            self._leave_all(calls)
            raise LostAnswerError("the queue's server does not answer: ask again") from None
        except BaseException:
            self._leave_all(calls)
            raise
        self._last = model, time.monotonic()
        return calls

    def leave(self, call: Call) -> None:
        """Nobody waits for the call any more. If it has not ended, its slot becomes free."""
        call.is_left = True
        self._open.discard(call)
        if call.answer is not None and not call.answer.is_ended:
            self._pool.submit(call.answer.cancel)

    def close(self) -> None:
        """Cancel all rows that are open, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._lane.close()

    def _leave_all(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.leave(call)

    def _started(self) -> Loop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ender = self._loop.create_task(self._end_at_stop())
        return self._loop

    async def _end_at_stop(self) -> None:
        await self._stopping.wait()
        await asyncio.sleep(GRACE_SECONDS)
        for call in self._open:
            call.end("the gateway stops: ask again")

    async def _ask_all(self) -> None:
        """Ask all requests that wait, many at once, until none is left."""
        assert self._loop is not None
        try:
            while self._waiting:
                group = [self._waiting.popleft()]
                num_rows = len(group[0].calls)
                while self._waiting and num_rows + len(self._waiting[0].calls) <= MAX_ASKED:
                    group.append(self._waiting.popleft())
                    num_rows += len(group[-1].calls)
                await self._ask_group(group)
        finally:
            self._task = None

    async def _ask_group(self, group: Sequence[_Asking]) -> None:
        assert self._loop is not None
        questions = [question for asking in group for question in asking.questions]
        try:
            found = await self._loop.run_in_executor(self._pool, self._lane.ask_all, questions)
        except Exception as fault:  # noqa: BLE001 - each request that waits gets it
            for asking in group:
                if not asking.done.done():
                    asking.done.set_exception(fault)
            return
        answers = iter(found)
        for asking in group:
            self._begin(asking, [next(answers) for _ in asking.calls])

    def _begin(self, asking: _Asking, answers: Sequence[Answer | LaneRefusedError]) -> None:
        """Give a request its answers. All of its rows are refused if one is."""
        refusal = next((one for one in answers if isinstance(one, LaneRefusedError)), None)
        for call, answer in zip(asking.calls, answers, strict=True):
            if isinstance(answer, Answer):
                call.begin(answer)
                if call.is_left or refusal is not None:
                    self.leave(call)
                else:
                    self._open.add(call)
        if asking.done.done():
            return
        if refusal is not None:
            asking.done.set_exception(refusal)
        else:
            asking.done.set_result(None)

    # -- called by the lane's thread

    def _note(self, call: Call) -> None:
        """The call has got something: wake the event loop, unless it will wake anyway."""
        self._news.append(call)
        if not self._is_waking and self._loop is not None:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        while self._news:
            self._news.popleft().wake()

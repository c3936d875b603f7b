"""Answers one request of a client that waits: its rows, their results, or a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from redis import Redis
from starlette.concurrency import run_in_threadpool

from batchkv_gateway.errors import NOT_FOUND, ApiError, invalid
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.live import faults
from batchkv_gateway.live.calls import Call, Calls
from batchkv_gateway.live.chunks import Chunks
from batchkv_gateway.live.row_limits import RowLimits
from batchkv_producer.intake.checks import RowFault
from batchkv_producer.intake.single import SingleRequest, read_single
from batchkv_producer.live import LaneRefusedError, Piece
from batchkv_producer.monitor.workers import served_models
from batchkv_producer.results.bodies import body_of
from batchkv_producer.wire.job import Endpoint, Request, Result

LARGE_BYTES = 2**15  # of a body that a thread reads, so that others do not wait
FIRST_SECONDS = 10.0  # for which a stream's first piece is awaited before its headers are sent
KEEP_ALIVE_SECONDS = 15.0  # without a chunk; then a comment is sent, so that no proxy gives up
KEEP_ALIVE = b": the answer is under way\n\n"


@dataclass(frozen=True, slots=True)
class Answering:
    """A request whose rows are asked. The owner calls ``leave`` once, in the end.

    All methods raise ApiError if a row fails, or will have no result.
    """

    calls: list[Call]
    asked: SingleRequest
    endpoint: Endpoint
    model: str
    leave: Callable[[], None]

    @property
    def row_id(self) -> str:
        """The id of the request: that of its first row."""
        return self.calls[0].row_id

    async def body(self) -> bytes:
        """The body of the answer, with the results of all rows."""
        with faults.of_losses():
            results = [self._good(await call.whole()) for call in self.calls]
        if self.asked.rows[0].params.logprobs is not None:  # megabytes, perhaps
            return await run_in_threadpool(_body, self.row_id, results)
        return _body(self.row_id, results)

    async def first_pieces(self) -> list[Piece]:
        """The first pieces of a stream; none after ``FIRST_SECONDS``.

        So a row that fails at once is an error of HTTP, like that of any other request.
        """
        with faults.of_losses():
            found = await self.calls[0].pieces(FIRST_SECONDS)
        if self.calls[0].result is not None:
            self._good(self.calls[0].result)
        return found

    async def events(self, first: list[Piece]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after its first pieces."""
        chunks = Chunks(self.row_id, self.endpoint, self.model, has_usage=self.asked.has_usage)
        results: list[Result] = []
        index, pieces = 0, first
        for call, row in zip(self.calls, self.asked.rows, strict=True):
            while True:
                if not _is_whole(row):
                    for chunk in chunks.pieces(index, pieces):
                        yield chunk
                if call.result is not None:
                    break
                with faults.of_losses():
                    pieces = await call.pieces(KEEP_ALIVE_SECONDS)
                if not pieces and call.result is None:
                    yield KEEP_ALIVE
            results.append(self._good(call.result))
            ending = chunks.end(index, call.result)
            if row.params.logprobs is not None:  # megabytes, perhaps
                ending = iter(await run_in_threadpool(list, ending))
            for chunk in ending:
                yield chunk
            index, pieces = index + len(call.result.choices), []
        for chunk in chunks.last(results):
            yield chunk

    def _good(self, result: Result) -> Result:
        """The result of a row that did not fail. Raises ApiError for one that did."""
        if result.outcome != "ok":
            raise faults.of_result(result, self.endpoint)
        return result


async def begin(
    calls: Calls,
    connection: Redis,
    limits: RowLimits,
    caller: Caller,
    raw: bytes,
    endpoint: Endpoint,
) -> Answering:
    """Ask the rows of a body. Raises ApiError for a wrong one, or if nobody can answer it now."""
    asked = await _read(raw, endpoint)
    if caller.cache_salt is not None:
        rows = tuple(replace(row, cache_salt=caller.cache_salt) for row in asked.rows)
        asked = replace(asked, rows=rows)
    num_rows = len(asked.rows)
    limits.take(caller, num_rows)
    try:
        found, model = await _ask(calls, connection, asked)
    except BaseException:
        limits.release(caller, num_rows)
        raise

    def leave() -> None:
        limits.release(caller, num_rows)
        for call in found:
            calls.leave(call)

    return Answering(found, asked, endpoint, model, leave)


async def _ask(calls: Calls, connection: Redis, asked: SingleRequest) -> tuple[list[Call], str]:
    """Ask the rows of a request. Returns their calls, and the model that answers."""
    model = asked.model
    if model is None:
        model = await run_in_threadpool(_only_model, connection, calls.last_model)
    has_pieces = asked.is_stream and not _is_whole(asked.rows[0])
    try:
        with faults.of_losses():
            return await calls.ask(asked.rows, model, "all" if has_pieces else "none"), model
    except LaneRefusedError as fault:
        row = asked.rows[0]
        raise await run_in_threadpool(faults.of_refusal, connection, fault, model, row) from fault


async def _read(raw: bytes, endpoint: Endpoint) -> SingleRequest:
    """The request in a body. Raises ApiError for a wrong one."""
    try:
        if len(raw) > LARGE_BYTES:
            return await run_in_threadpool(read_single, raw, endpoint)
        return read_single(raw, endpoint)
    except RowFault as fault:
        raise faults.of_intake(fault) from fault


def _body(row_id: str, results: list[Result]) -> bytes:
    return json.dumps(body_of(row_id, results), separators=(",", ":")).encode("ascii")


def _only_model(connection: Redis, last: str) -> str:
    """The model of a request that names none. ``last``: of the last one that was answered."""
    served = served_models(connection, with_loading=True)  # the refusal says that it loads
    if len(served) == 1:
        return served[0]
    if not served:
        if last:  # it may come back: the call is refused like one with the name
            return last
        message = "no worker answers: start one with `batchkv worker -m MODEL`"
        raise ApiError(NOT_FOUND, message, code="model_not_found", param="model")
    raise invalid(
        f"model is missing, and {len(served)} models are served: {', '.join(served)[:400]}",
        "model",
        "missing_required_parameter",
    )


def _is_whole(row: Request) -> bool:
    """Whether a stream sends the row's answer at its end: log-probabilities come with the text."""
    return row.params.logprobs is not None or (row.params.n or 1) > 1

"""What is refused, or fails, as errors of HTTP. OpenAI's client repeats 429 and 500 and above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis

from batchkv_gateway.errors import (
    BAD_REQUEST,
    INTERNAL,
    LATE,
    NOT_FOUND,
    TOO_MANY,
    UNAVAILABLE,
    ApiError,
)
from batchkv_producer.intake.checks import RowFault
from batchkv_producer.intake.single import param_of
from batchkv_producer.live import LaneRefusedError, LostAnswerError
from batchkv_producer.monitor.hosts import wish_for
from batchkv_producer.monitor.workers import (
    hosts_of,
    listed_workers,
    refusing_hosts,
    served_models,
    serving_workers,
)
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.error_codes import REFUSED_CODES, ErrorCode
from batchkv_producer.wire.job import Endpoint, Request, Result
from batchkv_producer.wire.maker import needs_of

_REFUSED: dict[str, tuple[int, str]] = {
    "away": (UNAVAILABLE, "model_unavailable"),
    "loading": (UNAVAILABLE, "model_loading"),
    "full": (TOO_MANY, "rate_limit_exceeded"),
}
_FAILED = {
    ErrorCode.TIMEOUT: LATE,
    ErrorCode.EXPIRED: LATE,
    ErrorCode.LOST: UNAVAILABLE,
    ErrorCode.CANCELED: UNAVAILABLE,
    ErrorCode.OUT_OF_MEMORY: UNAVAILABLE,
}


def of_intake(fault: RowFault) -> ApiError:
    """The error for a wrong body."""
    return ApiError(
        BAD_REQUEST, str(fault), code=fault.code, param=param_of(fault.code, str(fault))
    )


def of_refusal(
    connection: Redis, fault: LaneRefusedError, model: str, request: Request
) -> ApiError:
    """The error for a row that no worker can answer now. It may ask Redis."""
    if fault.why in _REFUSED:
        status, code = _REFUSED[fault.why]
        return ApiError(status, str(fault), code=code)
    found = serving_workers(connection, redis_keys.queue_name(model))
    workers = [worker for worker in found if not worker.is_away]
    listed = [] if workers else listed_workers(connection)
    if hosts_of(listed, model):
        wish_for(connection, model)
        message = f"no worker holds {model} now. One may load it soon: try again in some seconds"
        return ApiError(UNAVAILABLE, message, code="model_loading")
    if refusing := refusing_hosts(listed, model):
        wish_for(connection, model)  # the host tries again after a while, if somebody wants it
        message = f"{', '.join(refusing)} failed to load {model}: the log there says why"
        return ApiError(UNAVAILABLE, message, code="model_unavailable")
    if not workers:
        message = _nobody(connection, fault)
        return ApiError(NOT_FOUND, message, code="model_not_found", param="model")
    needed = needs_of(request)
    # A worker that can by now began to serve after the row was refused.
    has_begun = any({*needed} <= {*w.abilities} for w in workers if w.abilities is not None)
    if has_begun or any(worker.is_loading or not worker.num_slots for worker in workers):
        message = f"the worker of {model} is starting: try again in a few seconds"
        return ApiError(UNAVAILABLE, message, code="model_loading")
    needs = ", ".join(needed)
    lack = f"this request needs ({needs})" if needs else "answers at once need"
    message = f"the workers of {model} do not have what {lack}: update batchkv there"
    return ApiError(BAD_REQUEST, message, code="unsupported_parameter")


def _nobody(connection: Redis, fault: LaneRefusedError) -> str:
    """The refusal, with the names that would be answered."""
    served = served_models(connection)
    return f"{fault}. Served now: {', '.join(served)[:400]}" if served else str(fault)


@contextmanager
def of_losses() -> Iterator[None]:
    """Raises ApiError for a row that will have no result. It may be asked again."""
    try:
        yield
    except LostAnswerError as fault:
        raise ApiError(UNAVAILABLE, str(fault), code="answer_lost") from fault


def of_result(result: Result, endpoint: Endpoint) -> ApiError:
    """The error for a row that failed."""
    code, message = result.error or (result.outcome, "there is no answer")
    status = BAD_REQUEST if code in REFUSED_CODES else _FAILED.get(code, INTERNAL)
    param = param_of(code, message) if status == BAD_REQUEST else None
    if code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        param = "messages" if endpoint == "chat" else "prompt"
    return ApiError(status, message, code=code, param=param)

"""The refusals of a gateway as errors of this package, with the gateway's own sentences."""

from __future__ import annotations

import json
from http.client import HTTPResponse
from typing import Any

from batchkv_producer.errors import (
    AwayError,
    BatchkvError,
    ExpiredError,
    NotFoundError,
    ServerError,
    UsageError,
)
from batchkv_producer.remote.address import KEY_VARIABLE, Address

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT = 400, 401, 403, 404, 409
TOO_LARGE, LONG_HEADERS = 413, 431
TIMED_OUT, TOO_MANY, FULL = 408, 429, 507
AWAY = (TIMED_OUT, 502, 503, 504)
MAX_TEXT_CHARS = 2000
MAX_RETRY_AFTER_SECONDS = 30.0


class OtherBatchError(UsageError):
    """The input makes another batch than the one whose results the client has."""

    def __init__(self, message: str, batch_id: str) -> None:
        super().__init__(message)
        self.batch_id = batch_id


def refusal(address: Address, response: HTTPResponse, raw: bytes) -> BatchkvError:
    """The error of an answer that is no success."""
    status, fault = response.status, _fault(raw)
    if status in AWAY:
        text = _text(fault) or f"it answers {status} {response.reason}"
        return AwayError(
            f"the gateway at {address.url} is not available: {text}", _retry_after(response)
        )
    if fault is None:
        return ServerError(
            f"the server at {address.url} is no gateway of batchkv (it answers {status} "
            f"{response.reason}): check the URL"
        )
    text, code, param = _text(fault), fault.get("code"), fault.get("param")
    if status == UNAUTHORIZED:
        why = f"refuses the key in {KEY_VARIABLE}" if address.key else "needs a key"
        where = "another one" if address.key else f"one, and put it into {KEY_VARIABLE}"
        return ServerError(
            f"the gateway at {address.url} {why}: ask its operator for {where}. "
            "`batchkv keys add NAME` makes one"
        )
    if status == FORBIDDEN:
        return ServerError(f"the gateway at {address.url} refuses the request: {text}")
    if status == NOT_FOUND and code in ("not_found", "expired"):
        return (ExpiredError if code == "expired" else NotFoundError)(text)
    if status == CONFLICT and code == "other_batch":
        return OtherBatchError(text, str(param))
    if status in (BAD_REQUEST, CONFLICT, TOO_LARGE, LONG_HEADERS, TOO_MANY):
        return UsageError(text)
    if status == NOT_FOUND:
        return ServerError(
            f"the server at {address.url} has no API of batchkv: it is another server, or an older "
            "version of `batchkv serve`"
        )
    if status == FULL:
        return ServerError(f"the gateway at {address.url} has no room: {text}")
    return ServerError(f"the gateway at {address.url} failed: {text} ({status})")


def _fault(raw: bytes) -> dict[str, Any] | None:
    """The error object of an answer; None if it is none of a gateway."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    fault = found.get("error") if isinstance(found, dict) else None
    return fault if isinstance(fault, dict) else None


def _text(fault: dict[str, Any] | None) -> str:
    return str(fault.get("message", ""))[:MAX_TEXT_CHARS] if fault else ""


def _retry_after(response: HTTPResponse) -> float:
    text = response.getheader("retry-after", "") or ""
    return min(float(text), MAX_RETRY_AFTER_SECONDS) if text.isdecimal() else 0.0

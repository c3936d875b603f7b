"""Errors of a request. ``http.errors`` writes them in OpenAI's shape."""

from __future__ import annotations

from batchkv_producer.errors import BatchkvError

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NO_METHOD, TIMED_OUT = 400, 401, 403, 404, 405, 408
CONFLICT, TOO_LARGE, UNSUPPORTED, NO_RANGE, TOO_MANY, LONG_HEADERS = 409, 413, 415, 416, 429, 431
INTERNAL, UNAVAILABLE, LATE, FULL = 500, 503, 504, 507


class ApiError(BatchkvError):
    """A refused request: the status code of HTTP, a sentence, OpenAI's ``code`` and ``param``."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error for a wrong value in a request."""
    return ApiError(BAD_REQUEST, message, code=code, param=param)


def unknown(kind: str, name: str, param: str = "id") -> ApiError:
    """The error for an id that does not exist, or that belongs to another key."""
    message = f"there is no {kind} {name[:80]!r}"
    return ApiError(NOT_FOUND, message, code="not_found", param=param)

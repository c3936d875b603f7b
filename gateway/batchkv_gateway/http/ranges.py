"""Ranges of a file's bytes: which are ignored, and which are refused (RFC 9110, section 14)."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from batchkv_gateway.errors import NO_RANGE, ApiError
from batchkv_gateway.http.errors import error_response

_RANGES = re.compile(r"bytes\s*=\s*(?:\d+-\d*|-\d+)(?:\s*,\s*(?:\d+-\d*|-\d+))*", re.IGNORECASE)
_RANGE = re.compile(r"(\d*)-(\d*)")
MAX_DIGITS = 18


def refused_range(request: Request, num_bytes: int) -> Response | None:
    """The response to a range that begins after the file's end; None if the file is to be sent.

    A header that is no range of bytes, or of which a part is not in the file, is taken away from
    the request. Then the whole file is sent. So it is where the range depends on ``If-Range``.
    """
    given = request.headers.get("range")
    if given is None:
        return None
    pairs = _RANGE.findall(given) if _RANGES.fullmatch(given.strip()) else []
    has_order = all(_has_order(first, last) for first, last in pairs)
    there = [_is_there(first, last, num_bytes) for first, last in pairs]
    if pairs and has_order and not any(there) and "if-range" not in request.headers:
        fault = ApiError(NO_RANGE, f"the file has {num_bytes:,} bytes", code="invalid_range")
        response = error_response(fault)
        response.headers["content-range"] = f"bytes */{num_bytes}"
        return response
    if not pairs or not has_order or not all(there):
        headers = request.scope["headers"]
        request.scope["headers"] = [one for one in headers if one[0].lower() != b"range"]
    return None


def _has_order(first: str, last: str) -> bool:
    if max(len(first), len(last)) > MAX_DIGITS:
        return False
    return not first or not last or int(first) <= int(last)


def _is_there(first: str, last: str, num_bytes: int) -> bool:
    """Whether some byte of the range is in the file. ``-N`` are the last N bytes."""
    if max(len(first), len(last)) > MAX_DIGITS:
        return False
    return int(first) < num_bytes if first else int(last) > 0 and num_bytes > 0

"""Reads the query of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request

from batchkv_gateway.errors import invalid

MAX_NUMBER_CHARS = 12  # as of a line in the id of a job
MAX_LINE = 10**MAX_NUMBER_CHARS - 1
OUTCOMES = ("ok", "failed", "canceled")


def checked_query(request: Request, *names: str) -> Mapping[str, str]:
    """The query. Raises ApiError for a name that the route does not know."""
    for name in request.query_params:
        if name not in names:
            known = ", ".join(names) or "none"
            raise invalid(f"unknown query {name[:80]!r}: this path has {known}", name[:80])
    return request.query_params


def whole(query: Mapping[str, str], name: str, *, default: int, low: int = 0, high: int) -> int:
    """A whole number of the query. Raises ApiError for one that is none, or out of range."""
    text = query.get(name, str(default))
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_NUMBER_CHARS
    if not (is_number and low <= int(text) <= high):
        raise invalid(f"{name} must be a whole number of {low} to {high}", name)
    return int(text)


def switch(query: Mapping[str, str], name: str) -> bool:
    """A switch of the query: 1 or 0."""
    return one_of(query, name, ("0", "1")) == "1"


def one_of(query: Mapping[str, str], name: str, values: Collection[str]) -> str:
    """A word of the query; the first one if there is none. Raises ApiError for another one."""
    text = query.get(name, next(iter(values)))
    if text not in values:
        raise invalid(f"{name} must be one of {', '.join(filter(None, values))}", name)
    return text


def plain(value: Any) -> Any:
    """A value for JSON: sets become sorted lists."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value

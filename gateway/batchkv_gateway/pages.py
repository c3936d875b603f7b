"""Pages of ids, exact also while others are deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for: ``limit`` ids that come after one id in this order; "": the first."""

    after: str
    limit: int
    order: Order = "desc"


@dataclass(frozen=True, slots=True)
class Page:
    """The ids of a page, and whether there are more after it."""

    ids: tuple[str, ...]
    has_more: bool


def read_page(connection: Redis, key: str, asked: Asked) -> Page:
    """One page of a sorted set whose members have the same score."""
    if asked.order == "asc":
        ends = (f"({asked.after}" if asked.after else "-", "+")
    else:
        ends = (f"({asked.after}" if asked.after else "+", "-")
    found: Any = connection.zrange(
        key,
        *ends,
        desc=asked.order == "desc",
        bylex=True,
        offset=0,
        num=asked.limit + 1,
    )
    ids = tuple(each.decode("utf-8", "replace") for each in found)
    return Page(ids[: asked.limit], len(ids) > asked.limit)


def as_list(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }

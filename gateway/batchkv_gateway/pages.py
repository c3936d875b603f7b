"""Pages of records, exact also while others are deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from redis import Redis

Order = Literal["asc", "desc"]
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for: ``limit`` ids that come after one id in this order; "": the first."""

    after: str
    limit: int
    order: Order = "desc"


def read_page(
    connection: Redis,
    key: str,
    asked: Asked,
    hash_of: Callable[[str], str],
    read: Callable[[str, dict[bytes, bytes]], Record | None],
) -> tuple[list[Record], bool]:
    """One page of a sorted set of ids, whose members have the same score.

    ``hash_of`` names the hash of an id, and ``read`` makes a record of it. Ids without a record are
    left out. Also returns whether there are more after the page.
    """
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
    ids = [each.decode("utf-8", "replace") for each in found]
    with connection.pipeline(transaction=False) as pipeline:
        for one in ids[: asked.limit]:
            pipeline.hgetall(hash_of(one))
        stored: list[Any] = pipeline.execute()
    records = map(read, ids, stored)
    return [record for record in records if record is not None], len(ids) > asked.limit


def as_list(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }

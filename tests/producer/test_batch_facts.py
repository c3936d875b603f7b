"""The facts of a batch that are computed from its results."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchkv_producer.batch_facts import tokens_per_second
from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire.job import Result


def test_a_retried_first_row_does_not_begin_the_batch() -> None:
    """It keeps its place in the order, but has the time of its second result."""
    ends = ((1000, 50), (105, 5000), (110, 4000))  # seconds since 1970, busy_ms
    rows = [
        StoredRow(str(line), line, line, cast(Result, SimpleNamespace(created=end, busy_ms=busy)))
        for line, (end, busy) in enumerate(ends)
    ]

    def results(_: str, after: int = 0) -> Iterator[StoredRow]:
        # The finish order has the retried row twice: first and last.
        return iter([*rows, rows[0]][after:])

    client = cast(BatchClient, SimpleNamespace(results=results))
    values: dict[str, Any] = dict.fromkeys(BatchStatus.__dataclass_fields__, 0)
    values |= {"total": 3, "ok": 3, "is_submitted": True, "completion_tokens": 1800}
    batch = BatchStatus(**values)
    assert batch.is_done
    assert tokens_per_second(client, batch) == pytest.approx(1800 / (1000 - 100))

"""The facts of a batch that are computed from its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchkv_producer import batch_facts
from batchkv_producer.batch_facts import counts_pauses, tokens_per_second
from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire.job import Result, Usage

Ends = Sequence[tuple[int, int]]  # seconds since 1970, busy_ms


def speed_of(ends: Ends, batch: BatchStatus) -> float | None:
    """The speed of a batch whose rows ended so."""
    rows = [
        StoredRow(str(line), line, line, Result("", "chat", "ok", usage=Usage(1, 600),
                                                created=end, busy_ms=busy))
        for line, (end, busy) in enumerate(ends)
    ]  # fmt: skip

    def results(_: str, after: int = 0) -> Iterator[StoredRow]:
        # The finish order has the retried row twice: first and last.
        return iter([*rows, rows[0]][after:] if after else rows)

    return tokens_per_second(cast(BatchClient, SimpleNamespace(results=results)), batch)


def batch_of(**more: Any) -> BatchStatus:
    values: dict[str, Any] = dict.fromkeys(BatchStatus.__dataclass_fields__, 0)
    values |= {"total": 3, "ok": 3, "is_submitted": True, "completion_tokens": 1800}
    values |= {"busy_ms": 14_000}
    return BatchStatus(**{**values, **more})


def test_a_pause_before_a_retry_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed is that of the time in which rows were under way, also after an hour without any.

    A batch with too many rows to read has the time from the first row to the last, and is told
    apart.
    """
    batch = batch_of()
    busy = (105, 5000), (110, 4000)
    assert batch.is_done and speed_of([(115, 5000), *busy], batch) == pytest.approx(1800 / 15)
    assert (speed_of([(3715, 5000), *busy], batch) or 0) > 1800 / 60
    assert not counts_pauses(batch)
    monkeypatch.setattr(batch_facts, "MAX_COUNTED_ROWS", 2)
    assert counts_pauses(batch)
    # The retried row keeps its place in the order, with the time of its second result.
    assert speed_of([(1000, 50), *busy], batch) == pytest.approx(1800 / (1000 - 100))


def test_there_is_no_speed_without_times() -> None:
    """Rows of files say in which second they ended, and nothing more."""
    assert speed_of([(105, 0), (110, 0)], batch_of(busy_ms=0)) is None


def test_a_batch_that_runs_has_the_speed_of_its_ended_rows() -> None:
    """Rows that have not ended count neither as time nor as tokens."""
    batch = batch_of(total=4, running=1)
    assert not batch.is_done
    assert speed_of([(105, 5000), (110, 4000), (115, 5000)], batch) == pytest.approx(1800 / 15)
    assert not counts_pauses(batch)

"""The contents of a plan, and the chunks in which it is queued."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchkv_producer.intake.formats import RowError
from batchkv_producer.wire.row_facts import NO_FACTS, RowFacts


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """The totals of a plan. ``num_chars`` counts the text of the valid rows.

    ``num_duplicates`` rows wait for their leader, a row with the same request.
    """

    total: int
    num_bad: int
    num_chars: int
    last_line: int
    num_chunks: int
    num_duplicates: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that are queued in one step, and the bad ones among them.

    A job is (line, data, shared bytes). Another row of the batch begins with this many bytes of its
    text, and a worker writes only these to the store for others. ``starts``: lines of the jobs that
    are the first of their prefix in the queue.
    A chunk of duplicates has only ``duplicates``: (line, job data, custom_id, line of the leader).
    ``needs``: line -> the abilities that it needs and that older workers lack. ``facts`` are those
    of a stretch of lines, not of the chunk's rows. ``kept``: line -> (line of an answered row with
    the same request in an earlier batch, custom_id). ``reuse``: line -> the digest of its request,
    then its custom_id, of rows that may end with a remembered answer.
    """

    number: int
    jobs: list[tuple[int, bytes, int]]
    bad_rows: list[RowError]
    starts: set[int] = field(default_factory=set)
    duplicates: list[tuple[int, bytes, str, int]] = field(default_factory=list)
    needs: dict[int, str] = field(default_factory=dict)
    facts: RowFacts = NO_FACTS
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)
    reuse: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.jobs) + len(self.bad_rows) + len(self.duplicates)

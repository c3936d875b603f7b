"""Follows a batch: writes its results to OUT and reports its progress."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from batchkv_producer.intake.expected import Expected
from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.progress import Snapshot
from batchkv_producer.results import outfile, output
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.outfile import ResultsFile
from batchkv_producer.results.target import ResultStream
from batchkv_producer.retry import read_with_retry
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result


class Follower:
    """Appends the rows to OUT that have ended since the last ``collect``, in the order of ends."""

    def __init__(
        self,
        client: BatchClient,
        batch_id: str,
        results: ResultsFile | ResultStream,
        expected: Expected | None = None,
    ) -> None:
        self.results = results
        self.expected = expected or Expected(array("Q"))
        self.num_right = 0
        self._client = client
        self._batch_id = batch_id
        self._position = 0
        self._scored = LineSet()
        self._seen_failed = LineSet()
        self._must_reread = False

    def collect(self) -> int:
        """Write all rows that have ended. Returns the number of new entries in the finish order."""
        num_seen = 0
        for row in self._client.results(self._batch_id, after=self._position):
            num_seen += 1
            self._position = row.position + 1
            self._score(row.line, row.result)
            is_failed = row.result.outcome != "ok"
            if is_failed and not self._seen_failed.add(row.line):
                self._must_reread = True  # it failed again, perhaps with another error
            if self.results.lacks(row.line, is_failed=is_failed):
                text = output.output_line(row.job_id, row.result)
                self.results.append(row.line, text, is_failed=is_failed)
        self.results.flush()
        return num_seen

    def refresh(self, stale: outfile.Stale) -> None:
        """At the end: write the new lines of rows that were retried meanwhile and failed again.

        A server that crashed may have lost its last second, and have other rows now at places that
        were read already. Then all is read again, too.
        """
        if self._must_reread:
            self.results.refresh(stale)
        status = read_with_retry(partial(self._client.status, self._batch_id))
        has_passed_some = status.is_done and self.results.num_rows < status.num_ended
        if self._must_reread or has_passed_some:
            self._position, self._must_reread, self._seen_failed = 0, False, LineSet()
            self.collect()

    def _score(self, line: int, result: Result) -> None:
        if result.outcome == "ok" and self._scored.add(line):
            self.num_right += self.expected.is_right(line, result.text)


def snapshot_of(status: BatchStatus, delay: str = "") -> Snapshot:
    """The progress of a batch. ``delay``: why it is slow, if it is."""
    return Snapshot(
        total=status.total,
        ok=status.ok,
        failed=status.failed,
        canceled=status.canceled,
        running=status.running,
        completion_tokens=status.completion_tokens,
        delay=delay,
    )


def stale_rows(client: BatchClient, batch_id: str) -> outfile.Stale:
    """A function that finds the rows of the errors file that were queued again, or have changed."""

    def stale(lines: Sequence[int], rows: Sequence[bytes]) -> set[int]:
        found = set()
        for (line, result), row in zip(client.results_of(batch_id, lines), rows, strict=True):
            job_id = redis_keys.job_id(batch_id, line)
            if result is None or row != outfile.encoded(output.output_line(job_id, result)):
                found.add(line)
        return found

    return stale

"""The files of an ended batch: answers in one, everything else in the other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from redis import Redis

from batchkv_gateway.files.folder import Folder, Incoming
from batchkv_producer.errors import BatchkvError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.output import output_line
from batchkv_producer.results.stored_rows import in_input_order, none_missing
from batchkv_producer.wire.job import ErrorCode, Usage

NOTHING = Usage()
MAX_BYTES = 2**50  # answers may be larger than any upload


@dataclass(slots=True)
class Outputs:
    """Two contents that are being written, and what they count. Rows are in the file's order.

    The rows of an ended batch do not change. So a gateway that is killed writes the same bytes
    again.
    """

    answers: Incoming
    errors: Incoming
    num_answers: int = 0
    num_errors: int = 0
    num_expired: int = 0
    usage: Usage = NOTHING

    @classmethod
    def begin(cls, folder: Folder) -> Outputs:
        """Two empty contents."""
        with ExitStack() as unless_both:
            answers = unless_both.enter_context(folder.begin(MAX_BYTES))
            errors = folder.begin(MAX_BYTES)
            unless_both.pop_all()
        return cls(answers, errors)

    def write(self, connection: Redis, queued: BatchStatus) -> None:
        """Write every row. Raises BatchkvError if one has no result."""
        rows = in_input_order(connection, queued.batch_id)
        for row in none_missing(connection, queued.batch_id, rows):
            result = row.result
            line = output_line(row.job_id, result).encode() + b"\n"
            if result.outcome == "ok":
                self.num_answers += 1
                self.answers.write(line)
            else:
                self.num_errors += 1
                self.errors.write(line)
                is_expired = result.error is not None and result.error[0] == ErrorCode.EXPIRED
                self.num_expired += is_expired
            self._count(result.usage)
        if self.num_answers + self.num_errors != queued.total:
            raise BatchkvError(
                f"batch {queued.batch_id} has {queued.total:,} rows, but "
                f"{self.num_answers + self.num_errors:,} results are in Redis"
            )

    def close(self) -> None:
        """Delete what was not kept."""
        self.answers.__exit__(None, None, None)
        self.errors.__exit__(None, None, None)

    def _count(self, more: Usage) -> None:
        now = self.usage
        self.usage = Usage(
            prompt=now.prompt + more.prompt,
            completion=now.completion + more.completion,
            cached=now.cached + more.cached,
            reasoning=now.reasoning + more.reasoning,
        )

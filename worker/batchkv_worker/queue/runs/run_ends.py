"""How much of a row's prompt other workers may have, as far as the queue tells. Pure.

A run is a stretch of the queue, which is in prefix order. So a prefix that some rows of a run have
can only be elsewhere if the run's first or last row has it: the rows before and after the run are
with other workers, or will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from batchkv_producer.errors import WireError
from batchkv_producer.order.canonical import canonical_text
from batchkv_producer.wire.job import Request, decode_job
from batchkv_producer.wire.transitions import Pulled
from batchkv_worker.queue.runs.pace import Crowd


class RunEnds:
    """The first and the last job of a run, and jobs given back; decoded when they are needed."""

    def __init__(self, jobs: Sequence[Pulled]) -> None:
        self._jobs = [jobs[0], jobs[-1]]

    def note_gone(self, job: Pulled) -> None:
        """A job of the run goes to another worker: the first of those that go together."""
        self._jobs.append(job)
        self.__dict__.pop("_texts", None)

    @cached_property
    def _texts(self) -> tuple[bytes, ...] | None:
        try:
            return tuple(_text(decode_job(job.data)) for job in self._jobs)
        except WireError:  # that row will fail; nothing is known
            return None

    def elsewhere_bytes(self, request: Request, shared_bytes: int | None) -> int | None:
        """Bytes of a row's text that rows outside the run may begin with; None if unknown.

        ``shared_bytes``: those that any other row of the batch begins with.
        """
        if not shared_bytes or self._texts is None:
            return shared_bytes
        text = _text(request)
        return min(shared_bytes, max(_num_common(text, other) for other in self._texts))


def slowdown(crowd: Crowd) -> float:
    """How many times slower than this worker the slowest other one is; 1 if none is."""
    speeds = [crowd.speed_of(pace) for pace in crowd.present]
    return max(1.0, crowd.own_speed / min(speeds)) if speeds and crowd.is_known else 1.0


def _text(request: Request) -> bytes:
    return canonical_text(request).encode("utf-8", "surrogatepass")


def _num_common(left: bytes, right: bytes) -> int:
    """The length of the common prefix, by halves: comparing slices is quick."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""The rows that a worker has: which of them one exchange with Redis stores."""

from __future__ import annotations

from batchkv_producer.wire.transitions import ENOUGH_BYTES, JobLease, JobResult
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.redis_side import FINISH_GROUP
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest


def state_with(*sizes: int) -> WorkerState:
    """Rows have ended, with results of so many bytes."""
    state = WorkerState(InFlight("m", "w"), StopRequest(lambda: None))
    state.results = [
        JobResult(JobLease(f"a-{n}", "e"), "ok", bytes(size)) for n, size in enumerate(sizes)
    ]
    return state


def groups_of(state: WorkerState) -> list[int]:
    """How many results each exchange stores."""
    sizes = []
    while group := state.next_results(FINISH_GROUP, ENOUGH_BYTES):
        assert group == state.results[: len(group)]
        state.note_stored(len(group))
        sizes.append(len(group))
    return sizes


def test_large_results_are_stored_in_parts() -> None:
    """What ended while Redis was away is sent 16 MiB at a time, so that a slow line gets it through
    before leases lapse. One result that is larger goes alone, and small ones go 200 at a time."""
    mib = 2**20
    assert groups_of(state_with(*[5 * mib] * 7)) == [3, 3, 1]
    assert groups_of(state_with(mib, 40 * mib, mib, 15 * mib, 40 * mib)) == [1, 1, 2, 1]
    assert groups_of(state_with(*[1] * 401)) == [200, 200, 1]
    assert groups_of(state_with()) == []

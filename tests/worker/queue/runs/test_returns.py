"""Jobs that a worker gives back do not go back and forth."""

from __future__ import annotations

import math

from batchkv_producer.wire.transitions import JobLease
from batchkv_worker.queue.runs.returns import COOL_SECONDS, SETTLE_SECONDS, Returns

LEASES = [JobLease(f"{number:016x}-1", "e") for number in range(3)]


def test_too_much_for_a_moment_is_not_too_much() -> None:
    """Others may have taken jobs and not told it yet. So may this worker."""
    returns = Returns()
    returns.look(10.0, has_surplus=True)
    assert not returns.is_sure(10.0)
    returns.look(10.0 + SETTLE_SECONDS, has_surplus=True)
    assert returns.is_sure(10.0 + SETTLE_SECONDS)
    returns.look(11.0, has_surplus=False)
    assert not returns.is_sure(math.nextafter(math.inf, 0))
    returns.look(12.0, has_surplus=True)
    returns.note_taken()
    assert not returns.is_sure(20.0)


def test_a_job_goes_back_once() -> None:
    """Who gave jobs back takes none for a while, and keeps those that come again."""
    returns = Returns()
    assert not returns.is_cooling(0.0)
    returns.note(LEASES[:2], 5.0)
    assert returns.is_cooling(5.0) and not returns.is_cooling(5.0 + COOL_SECONDS)
    assert returns.fresh(LEASES) == LEASES[2:]

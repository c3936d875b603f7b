"""What a worker knows of jobs for others while it looks through many of them."""

from __future__ import annotations

from batchkv_producer.wire.transitions import JobLease, Pulled, Run
from batchkv_worker.queue.runs.passed_over import PassedOver

LENGTHS = (30_000, 500, 0)
JOB = Pulled(JobLease("a-1", "x"), b"")


def make() -> PassedOver:
    return PassedOver()


def look(*jobs: Pulled, num_passed: int = 0, seen: int = 10_000) -> Run:
    """A pull that saw some of the urgent rows, all of them for others, and took these jobs."""
    return Run(list(jobs), LENGTHS, num_passed, (seen, 0, 0), seen < LENGTHS[0])


def test_many_urgent_rows_of_others_are_known_while_own_ones_are_taken() -> None:
    """They are no reason to give own rows back, also when they are looked through anew."""
    passing = make()
    for _ in range(3):
        passing.note(look(JOB))
    assert passing.ours(LENGTHS) == (0, 500, 0)
    for _ in range(4):
        passing.note(look(JOB))
        assert passing.ours(LENGTHS) == (0, 500, 0)
    passing.note(look(seen=30_000))
    assert passing.ours(LENGTHS) == (0, 500, 0)
    assert passing.ours((30_001, 500, 0)) == (1, 500, 0)


def test_suspects_behind_many_rows_of_others_are_waited_for() -> None:
    """Nothing more is found by asking at once while a worker may not take what it met."""
    passing = make()
    for _ in range(5):
        passing.note(run := look(num_passed=1))
        assert passing.pause(run, 1.0) == 1.0


def test_a_look_ends_when_all_lists_were_seen() -> None:
    """What brings nothing is asked for again at once until then, and not forever."""
    passing = make()
    pauses = []
    for _ in range(4):
        run = Run([], LENGTHS, 0, (10_000, 500, 0), True)
        passing.note(run)
        pauses.append(passing.pause(run, 0.1))
    assert [pause > 0 for pause in pauses] == [False, False, True, False]
    assert passing.ours(LENGTHS) == (0, 0, 0)

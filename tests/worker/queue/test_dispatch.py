"""How many jobs a worker takes: runs while there are many, free slots at the end, backlogs back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_producer.agreed import RUN_ROWS
from batchkv_worker.queue.dispatch import (
    View,
    is_ending,
    jobs_to_recall,
    jobs_to_return,
    jobs_to_start,
    jobs_to_take,
)
from benchmarks.bench_plan import (
    WRITES,
    Job,
    Simulation,
    by_runs,
    ceiling,
    prefix_order,
)

EMPTY = View(slots=32, prefetch=8, num_started=0, backlog=0, queued=10_000, num_workers=8)
FULL = replace(EMPTY, num_started=40)
VIEWS = st.builds(
    View,
    slots=st.integers(1, 300),
    prefetch=st.integers(0, 300),
    num_started=st.integers(0, 700),
    choices=st.sampled_from([1.0, 1.5, 8.0, 128.0]),
    backlog=st.integers(0, 500),
    queued=st.integers(0, 5_000),
    num_workers=st.integers(0, 40),
)


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (EMPTY, RUN_ROWS),
        (replace(EMPTY, num_started=36), RUN_ROWS),  # little room, no backlog: a whole run again
        (replace(EMPTY, num_started=36, backlog=3), RUN_ROWS),  # the backlog runs low
        (replace(EMPTY, num_started=36, backlog=4), 0),  # it has what the engine wants
        (FULL, 0),
        (replace(EMPTY, slots=500), 508),  # an engine that is larger than a run is filled
        (replace(EMPTY, queued=800), 100),  # an equal share is less than a run
        (replace(EMPTY, queued=80), 10),  # and less than half an engine
        (replace(EMPTY, queued=80, num_started=30), 2),  # only free slots are filled
        (replace(EMPTY, queued=80, num_started=32), 0),  # none is free: the rest is for others
        (replace(EMPTY, queued=160, num_started=32), 20),  # not the end yet
        (replace(EMPTY, queued=3), 1),
        (replace(EMPTY, queued=0), 1),  # what was empty may not be any more
        (replace(EMPTY, queued=36, num_workers=1), 36),  # alone: nobody to leave anything to
        (replace(EMPTY, queued=36, num_workers=0), 36),
    ],
)
def test_how_many_are_taken(view: View, count: int) -> None:
    """Whole runs while there are many; the nearer the end, the fewer."""
    assert jobs_to_take(view) == count


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (replace(FULL, backlog=88, queued=0), 88),
        (replace(EMPTY, num_started=30, backlog=5, queued=0), 3),  # two can be started here
        (replace(FULL, backlog=88, queued=1), 0),  # others find something
        (replace(FULL, backlog=88, queued=0, num_workers=1), 0),  # there are no others
    ],
)
def test_how_many_go_back(view: View, count: int) -> None:
    """A backlog goes back when the queue is empty and there are others."""
    assert jobs_to_return(view) == count


@pytest.mark.parametrize(
    ("view", "taken", "returned"),
    [
        (replace(EMPTY, choices=8.0), 16, 0),  # a run of 128 rows
        (replace(EMPTY, choices=128.0), 1, 0),
        (replace(EMPTY, choices=8.0, num_started=36, backlog=1), 0, 0),  # 4 rows are wanted
        (replace(EMPTY, choices=8.0, num_started=20, backlog=1), 16, 0),  # 20 rows, so 3 jobs
        (replace(EMPTY, choices=8.0, queued=16, num_started=24), 1, 0),  # 8 slots are free
        (replace(FULL, choices=8.0, backlog=88), 0, 72),  # more than a run
        (replace(FULL, choices=8.0, backlog=88, num_workers=1), 0, 0),  # nobody else takes them
        (replace(EMPTY, choices=8.0, num_started=20, backlog=5, queued=0), 0, 3),  # 12 slots
    ],
)
def test_choices_count_as_rows(view: View, taken: int, returned: int) -> None:
    """Jobs with several choices: as many rows are taken and kept as of jobs with one."""
    assert (jobs_to_take(view), jobs_to_return(view)) == (taken, returned)


@given(VIEWS)
def test_what_holds_for_every_view(view: View) -> None:
    """Counts are never negative, starts fit, takes are no more than a share or what is asked."""
    assert 0 <= jobs_to_start(view) <= min(view.backlog, view.room)
    assert 0 <= jobs_to_return(view) <= view.backlog
    taken = jobs_to_take(view)
    assert 0 <= taken <= max(1, view.share)
    if view.num_workers > 1 and taken > view.free_slots:
        assert not is_ending(view)
    if not view.num_started and not view.backlog:
        assert taken >= 1, "an empty worker always asks"


def documents(num_documents: int, num_questions: int, num_blocks: int = 12) -> list[Job]:
    """Questions about documents in no order, and as many single prompts."""
    rng = random.Random(5)
    jobs, next_block = [], 0
    for _ in range(num_documents):
        document = tuple(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        for _ in range(num_questions):
            num_answer = int(rng.lognormvariate(4, 1))
            jobs.append(Job((*document, next_block), 512 * num_blocks + 300, num_answer))
            jobs.append(Job((next_block + 1,), 400, num_answer))
            next_block += 2
    rng.shuffle(jobs)
    return jobs


def test_shared_prefixes_are_hit_in_any_crowd() -> None:
    """On a synthetic trace eight unequal workers hit nearly all that one endless memory would, and
    are not done later than by taking single jobs; the store gets what is wanted again."""
    jobs = documents(60, 20)
    order, best = prefix_order(jobs), ceiling(jobs)
    shipped = Simulation(
        order, write=WRITES["shared"], slots=8, prefetch=4, memory_blocks=100
    ).run()
    single = Simulation(order, by_runs(1), slots=8, prefetch=4, memory_blocks=100).run()
    assert best - shipped.local < 0.03
    assert best - shipped.total < 0.03
    assert single.local < best - 0.2
    assert shipped.seconds < single.seconds
    num_shared = 60 * 12
    num_unique = num_shared + 2 * 60 * 20
    assert shipped.written <= num_shared / num_unique + 1e-9


def test_a_slow_worker_holds_up_nobody() -> None:
    """One of eight at a twentieth of the speed costs less than the rows that it had in its slots;
    with runs that nobody gives back it works on for long."""
    rng = random.Random(6)
    jobs = [Job((n,), 400, rng.randrange(20, 60)) for n in range(2_000)]
    speeds = (1.0,) * 7 + (0.05,)
    shipped = Simulation(jobs, slots=4, prefetch=0, speeds=speeds).run()
    stubborn = Simulation(jobs, by_runs(128), slots=4, prefetch=0, speeds=speeds).run()
    assert shipped.seconds * 2 < stubborn.seconds


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (View(32, 64, num_started=96, backlog=0, queued=0, num_workers=2), 56),
        (View(32, 64, num_started=36, backlog=0, queued=0, num_workers=2), 0),  # a few may wait
        (View(32, 64, num_started=96, backlog=0, queued=1, num_workers=2), 0),
        (View(32, 64, num_started=96, backlog=0, queued=0, num_workers=1), 0),
        (View(32, 4, num_started=36, backlog=0, queued=0, num_workers=2), 0),
    ],
)
def test_how_many_are_recalled(view: View, count: int) -> None:
    """The engine keeps what it computes and a few rows beside it, once others may be idle."""
    assert jobs_to_recall(view) == count


@given(VIEWS)
def test_what_is_recalled_is_not_started_again(view: View) -> None:
    """An engine that has given rows back has no room for them until some have ended."""
    count = jobs_to_recall(view)
    after = replace(view, num_started=view.num_started - count, backlog=view.backlog + count)
    assert not count or jobs_to_start(after) == 0

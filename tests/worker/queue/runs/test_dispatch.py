"""How many jobs a worker takes: runs while there are many, free slots at the end, backlogs back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_producer.agreed import RUN_ROWS
from batchkv_worker.queue.runs.dispatch import (
    View,
    fewest_to_take,
    is_ending,
    jobs_to_recall,
    jobs_to_return,
    jobs_to_start,
    jobs_to_take,
    rows_to_hand_over,
)
from batchkv_worker.queue.runs.pace import Crowd, Pace
from benchmarks.plan.simulation import (
    WRITES,
    Job,
    Simulation,
    by_runs,
    ceiling,
    prefix_order,
)
from benchmarks.plan.workloads import least_seconds, many_small_groups

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


def crowd(own: Pace, *others: Pace, silent: int = 0) -> Crowd:
    return Crowd(own, others, silent)


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (replace(FULL, backlog=88, queued=0, num_workers=2), 48),  # half of 88 and of 8 in front
        (replace(FULL, backlog=88, queued=0), 84),  # an eighth stays
        (replace(EMPTY, num_started=30, backlog=5, queued=0), 4),
        (replace(FULL, backlog=88, queued=1), 0),  # others find something
        (replace(FULL, backlog=88, queued=0, num_workers=1), 0),  # there are no others
    ],
)
def test_how_many_go_back(view: View, count: int) -> None:
    """When the queue is empty, others get their share of a backlog, if nothing is known of them."""
    assert jobs_to_return(view) == count


SHARING = View(32, 64, num_started=32, backlog=60, queued=0, num_workers=2, num_waiting=0)


@pytest.mark.parametrize(
    ("told", "count"),
    [
        (crowd(Pace(10.0, 60.0), Pace(10.0, 60.0)), 0),  # both hold as much
        (crowd(Pace(10.0, 60.0), Pace(10.0, 0.0)), 25),  # half, and what is done in half a second
        (crowd(Pace(10.0, 60.0), Pace(20.0, 0.0)), 35),  # a third stays
        (crowd(Pace(10.0, 60.0), Pace(0.0, 0.0)), 25),  # its speed is not known: as fast
        (crowd(Pace(10.0, 60.0), silent=1), 25),  # it tells nothing
        (crowd(Pace(10.0, 60.0), Pace(10.0, 0.0, is_away=True)), 0),  # it takes none now
        (crowd(Pace(10.0, 60.0), Pace(1.0, 60.0)), 0),  # a slow one holds too much itself
    ],
)
def test_work_is_shared_by_speed(told: Crowd, count: int) -> None:
    """What is above the share of a worker goes back, if another one has less than its share."""
    assert jobs_to_return(replace(SHARING, told=told)) == count


def test_a_whole_run_may_be_shorter_by_a_quarter() -> None:
    """So that it divides no prefix. What is due near the end is taken as a whole, and a worker
    that is alone divides none."""
    assert fewest_to_take(EMPTY, RUN_ROWS) == RUN_ROWS * 3 // 4
    assert fewest_to_take(replace(EMPTY, slots=500), 508) == 381
    assert fewest_to_take(EMPTY, RUN_ROWS - 1) == RUN_ROWS - 1
    assert fewest_to_take(replace(EMPTY, num_workers=1), RUN_ROWS) == RUN_ROWS
    assert fewest_to_take(replace(EMPTY, choices=4.0), RUN_ROWS // 4) == RUN_ROWS * 3 // 16


def test_what_was_promised_is_started() -> None:
    """Redis counts the rows as begun for which there was room. The queue may be empty since."""
    view = View(slots=16, prefetch=32, num_started=48, backlog=40, queued=0, num_workers=2)
    assert jobs_to_start(view) == 0
    assert jobs_to_start(view, promised=18) == 18
    assert jobs_to_start(replace(view, backlog=4), promised=18) == 4


def test_the_engine_gets_at_the_end_what_it_begins_soon() -> None:
    """Many rows end at one moment. What waits in the engine has their slots at once."""
    told = crowd(Pace(30.0, 60.0), Pace(10.0, 0.0))  # 60 units of work in two seconds
    view = View(16, 32, 30, 40, queued=0, num_workers=2, told=told, job_work=2.0)
    assert is_ending(view)
    assert jobs_to_start(view) == 16 + 30 - 30
    assert jobs_to_start(replace(view, job_work=1.0)) == 16 + 32 - 30, "no more than ever"
    assert jobs_to_start(replace(view, job_work=12.0)) == 0, "a slow worker has eight ahead"
    assert jobs_to_start(replace(view, job_work=12.0, num_started=20)) == 16 + 8 - 20
    assert jobs_to_start(replace(view, choices=2.0, job_work=4.0)) == 16, "rows, not jobs"
    silent = crowd(Pace(0.0, 60.0), Pace(10.0, 0.0))
    assert jobs_to_start(replace(view, told=silent, num_started=20)) == 4, "its speed is not known"
    assert jobs_to_take(replace(view, backlog=0)) == 0, "and it asks for no more than it needs"


def test_a_slow_worker_leaves_the_last_rows() -> None:
    """Faster workers would end them sooner. If they take none for a while, it does take them."""
    told = crowd(Pace(1.0, 0.0), Pace(9.0, 0.0))
    late = View(32, 64, 0, 0, queued=40, num_workers=2, told=told, row_seconds=10.0)
    assert late.seconds_left == pytest.approx(40 / 9), "the slow one does none"
    assert jobs_to_take(late) == 0
    assert jobs_to_take(replace(late, is_patient=False)) == 4
    assert jobs_to_take(replace(late, queued=400)) == 32  # in 41 s, less the 9 s that it is late
    quick = crowd(Pace(9.0, 0.0), Pace(1.0, 0.0))
    assert jobs_to_take(replace(late, told=quick)) > 0
    assert jobs_to_take(replace(late, queued=0)) == 0


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
        (replace(EMPTY, choices=8.0, num_started=20, backlog=16, queued=0), 0, 14),  # an eighth
    ],
)
def test_choices_count_as_rows(view: View, taken: int, returned: int) -> None:
    """Jobs with several choices: as many rows are taken and kept as of jobs with one."""
    assert (jobs_to_take(view), jobs_to_return(view)) == (taken, returned)


@given(VIEWS)
def test_what_holds_for_every_view(view: View) -> None:
    """Counts are never negative, starts fit, takes are no more than a share or what is asked."""
    most = max(0, view.slots + view.prefetch - view.num_started)
    assert min(view.backlog, view.room) <= jobs_to_start(view) <= min(view.backlog, most)
    assert 0 <= jobs_to_return(view) <= view.backlog
    taken = jobs_to_take(view)
    assert 0 <= taken <= max(1, view.queued)
    assert 0 <= jobs_to_recall(view) <= view.waiting
    if view.num_workers > 1 and view.queued and taken > view.free_slots:
        assert not is_ending(view)
    if not view.num_started and not view.backlog:
        assert taken >= 1, "an empty worker always asks"


LAST = View(32, 64, num_started=3, backlog=0, queued=0, num_workers=2, num_waiting=0)
SLOW, FAST = Pace(1.0, 9.0), Pace(3.0, 0.0, free_slots=32)
LAST_TWO = replace(LAST, told=crowd(SLOW, FAST))


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (LAST_TWO, 3),
        (replace(LAST, told=crowd(SLOW, replace(FAST, free_slots=2))), 2),
        (replace(LAST, told=crowd(SLOW, replace(FAST, free_slots=0))), 0),
        (replace(LAST, told=crowd(SLOW, replace(FAST, speed=2.0))), 0),  # not so much faster
        (replace(LAST, told=crowd(SLOW, replace(FAST, is_away=True))), 0),
        (replace(LAST, told=crowd(replace(SLOW, speed=0.0), FAST)), 0),  # nothing is known
        (replace(LAST, told=crowd(SLOW, silent=1)), 0),
        (replace(LAST_TWO, queued=1), 0),
        (replace(LAST_TWO, num_waiting=1), 0),
        (replace(LAST_TWO, num_started=0), 0),
    ],
)
def test_the_last_rows_go_to_a_much_faster_worker(view: View, count: int) -> None:
    """Begun rows go back only if another worker has free slots and would end them sooner."""
    assert rows_to_hand_over(view) == count


def documents(num_documents: int, num_questions: int, num_blocks: int = 12) -> list[Job]:
    """Questions about documents in no order, and as many single prompts."""
    rng = random.Random(5)
    jobs, next_block = [], 0
    for _ in range(num_documents):
        document = tuple(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        for _ in range(num_questions):
            num_answer = int(rng.lognormvariate(3, 1))
            jobs.append(Job((*document, next_block), 512 * num_blocks + 300, num_answer))
            jobs.append(Job((next_block + 1,), 400, num_answer))
            next_block += 2
    rng.shuffle(jobs)
    return jobs


def test_shared_prefixes_are_hit_in_any_crowd() -> None:
    """On a synthetic trace eight unequal workers hit nearly all that one endless memory would, and
    are not done later than by taking single jobs; the store gets what is wanted again."""
    jobs = documents(20, 20)
    order, best = prefix_order(jobs), ceiling(jobs)
    shipped = Simulation(order, write=WRITES["shared"], slots=8, prefetch=4, memory_blocks=40).run()
    single = Simulation(order, by_runs(1), slots=8, prefetch=4, memory_blocks=40).run()
    assert best - shipped.local < 0.03
    assert best - shipped.total < 0.03
    assert single.local < best - 0.2
    assert shipped.seconds < single.seconds
    num_shared = 20 * 12
    num_unique = num_shared + 2 * 20 * 20
    assert shipped.written <= num_shared / num_unique + 1e-9


def test_a_slow_worker_holds_up_nobody() -> None:
    """One of eight at a twentieth of the speed costs less than the rows that it had in its slots;
    with runs that nobody gives back it works on for long."""
    rng = random.Random(6)
    jobs = [Job((n,), 100, rng.randrange(5, 15)) for n in range(1_200)]
    speeds = (1.0,) * 7 + (0.05,)
    shipped = Simulation(jobs, slots=4, prefetch=0, speeds=speeds).run()
    stubborn = Simulation(jobs, by_runs(128), slots=4, prefetch=0, speeds=speeds).run()
    assert shipped.seconds * 4 < stubborn.seconds


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (View(32, 64, num_started=96, backlog=0, queued=0, num_workers=2), 32),
        (View(32, 64, num_started=96, backlog=0, queued=0, num_workers=2, num_waiting=90), 45),
        (View(32, 64, num_started=96, backlog=96, queued=0, num_workers=2), 0),  # the backlog is it
        (View(32, 64, num_started=96, backlog=0, queued=1, num_workers=2), 0),
        (View(32, 64, num_started=96, backlog=0, queued=0, num_workers=1), 0),
        (View(32, 4, num_started=33, backlog=0, queued=0, num_workers=2), 0),
    ],
)
def test_how_many_are_recalled(view: View, count: int) -> None:
    """Rows that wait in the engine go back after the backlog, as many as others should do."""
    assert jobs_to_recall(view) == count


@given(VIEWS)
def test_what_went_back_is_not_taken_again(view: View) -> None:
    """A worker that gave jobs back takes at most the next one, as long as nothing else changes."""
    num_jobs, num_rows = jobs_to_return(view), jobs_to_recall(view)
    after = replace(
        view,
        backlog=view.backlog - num_jobs,
        num_started=view.num_started - num_rows,
        num_waiting=view.waiting - num_rows,
        queued=view.queued + num_jobs + int(num_rows / view.choices),
    )
    if (num_jobs or num_rows) and view.queued == 0:
        assert jobs_to_take(after) <= 1


def test_unequal_workers_are_done_together() -> None:
    """Eight workers, the slowest at a fifth of the speed, need little more than the least time."""
    order = prefix_order(many_small_groups()[:800])
    outcome = Simulation(order).run()
    assert outcome.seconds <= 1.1 * least_seconds(order)
    assert outcome.idle < 0.08


def test_few_long_rows_do_not_stay_on_a_slow_worker() -> None:
    """With as many rows as slots of the fastest worker, the slow one does not end last by far."""
    jobs = [Job((n,), 400, 3000) for n in range(40)]
    speeds = (1.0, 0.1)
    got = Simulation(jobs, slots=32, speeds=speeds).run()
    assert got.seconds < 2.5 * least_seconds(jobs, speeds)

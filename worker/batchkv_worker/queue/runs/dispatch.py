"""How many jobs a worker takes from the queue, and when it gives some of them back. Pure.

The queue is in prefix order, so consecutive jobs share prefixes. A worker that takes single jobs as
its slots become free rarely gets rows with a common prefix. A worker therefore takes whole *runs*.
The jobs of a run that its engine has no room for yet are its *backlog*. It takes no new run while
the backlog is enough.

The end of a queue is what matters for time. There all workers should be done at one moment:

- A worker takes no more than its share of all work that has not begun, by its speed (``pace``).
- A slow worker leaves the last rows to faster ones, which would end them sooner.
- When the queue is empty and another worker has less than its share, what is more than the own
  share goes back. First that is the end of the backlog, then rows that wait in the engine.

Jobs also go back when jobs of a higher priority come: those wait for rows that have begun, but not
for a backlog. ``tests/benchmarks/bench_plan.py`` measures hits and time.

A job with several choices (``n``) is as many rows for the engine. Jobs of the queue and the backlog
are not decoded, so they are assumed to have as many choices as those that started last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_producer.agreed import RUN_ROWS
from batchkv_worker.queue.runs.pace import Crowd, Pace

AHEAD_AT_END = 8  # rows that wait in the engine when others may soon have nothing to do
SOON_SECONDS = 2.0  # rows that are begun within so long may wait in it, too: they end together
WHOLE_RUN_PART = 3 / 4  # of a run that is enough, so that no prefix is divided
HAND_OVER_SPEED = 2.5  # of the other worker, against the own one: a row is half done on average
SLACK_SECONDS = 0.5  # of work above the share that a worker keeps, as giving it back takes a while


@dataclass(frozen=True, slots=True)
class View:
    """The queue and the engine, as one worker sees them.

    ``slots``: rows that its engine decodes at once. ``prefetch``: further rows that wait in it.
    ``num_started``: rows that the engine has. ``backlog``: jobs taken, not started.
    ``queued``: jobs in the queue when last looked, of the highest priority that has any: only those
    are taken. ``num_workers``: live workers of the queue, this one too. ``choices``: rows that a
    job has in the engine, on average. ``num_waiting``: rows of ``num_started`` that have not begun;
    None if that is not known. ``told``: the pace of all workers, None if it is not known.
    ``job_work``: the work of a job, on average, in its unit.
    ``row_seconds``: how long a row is computed here. ``is_patient``: faster workers may take what
    this one leaves; else they have not done so for a while.
    """

    slots: int
    prefetch: int
    num_started: int
    backlog: int
    queued: int
    num_workers: int = 1
    choices: float = 1.0
    num_waiting: int | None = None
    told: Crowd | None = None
    job_work: float = 1.0
    row_seconds: float = 0.0
    is_patient: bool = True

    def jobs(self, num_rows: int) -> int:
        """The jobs with so many rows, rounded up."""
        return math.ceil(num_rows / self.choices)

    @property
    def ahead(self) -> int:
        """Rows that it takes before there are slots for them: few if others could soon do them."""
        return min(self.prefetch, AHEAD_AT_END) if is_ending(self) else self.prefetch

    @property
    def startable(self) -> int:
        """Rows that may be handed to the engine now: near the end, what it begins soon.

        What waits in the engine fills the slots of many rows that end at one moment. It goes back
        only between two steps, and these are long on a slow worker.
        """
        soon = self.crowd.own.speed * SOON_SECONDS / self.job_work * self.choices
        ahead = min(self.prefetch, max(self.ahead, math.floor(soon)))
        return max(0, self.slots + ahead - self.num_started)

    @property
    def room(self) -> int:
        """Rows that it could take now for slots, and ahead."""
        return max(0, self.slots + self.ahead - self.num_started)

    @property
    def free_slots(self) -> int:
        """Rows that would be computed at once."""
        return max(0, self.slots - self.num_started)

    @property
    def share(self) -> int:
        """An equal share of the queue, rounded up."""
        return -(-self.queued // max(1, self.num_workers))

    @property
    def waiting(self) -> int:
        """Rows that the engine has and has not begun."""
        beyond_slots = max(0, self.num_started - self.slots)
        return beyond_slots if self.num_waiting is None else self.num_waiting

    @property
    def crowd(self) -> Crowd:
        """All workers. If nothing is known of their pace, the others hold nothing."""
        if self.told is not None:
            return self.told
        held = (self.backlog + self.waiting / self.choices) * self.job_work
        return Crowd(Pace(held=held), num_silent=max(0, self.num_workers - 1))

    @property
    def seconds_left(self) -> float:
        """The time until all work is done, if all workers are done together."""
        queued_work = self.queued * self.job_work
        return self.crowd.seconds_left(queued_work, self.job_work, self.row_seconds)

    @property
    def due_work(self) -> float:
        """The work that this worker should hold, of all that has not begun."""
        return self._due_in(self.seconds_left)

    def _due_in(self, seconds: float) -> float:
        """The work that it should hold if all are done in so many seconds.

        A row takes longer here than on the fastest worker. A slow worker begins its last row
        earlier by so much.
        """
        crowd = self.crowd
        late = crowd.lateness(crowd.own, self.row_seconds) if self.is_patient else 0.0
        return crowd.own_speed * (seconds - late)

    @property
    def surplus_jobs(self) -> int:
        """Jobs that it holds above what is due, and that another worker could do now."""
        if self.num_workers <= 1 or self.queued > 0:
            return 0
        crowd, seconds = self.crowd, self.seconds_left
        if not crowd.has_hungry(seconds):
            return 0
        slack = SLACK_SECONDS * crowd.own_speed if crowd.is_known else 0.0
        surplus = crowd.own.held - self._due_in(seconds) - slack
        return max(0, math.floor(surplus / self.job_work))


def is_ending(view: View) -> bool:
    """Whether the queue is near its end: no share would fill half the slots."""
    few = min(view.prefetch, AHEAD_AT_END)
    return view.num_workers > 1 and view.share * view.choices * 2 < view.slots + few


def jobs_to_take(view: View) -> int:
    """How many jobs to ask the queue for now; 0 while the backlog has what the engine wants.

    A run has ``RUN_ROWS`` rows, or all that an empty engine has room for if that is more, and never
    more than what is due. Near the end only free slots are filled. A queue that was empty when last
    looked at is asked for one job.
    """
    if view.jobs(view.room) <= view.backlog:
        return 0
    if view.num_workers <= 1:
        return min(_run(view), max(1, view.queued))
    due_work = view.due_work
    may_take = due_work >= 0 or not view.is_patient
    if view.queued == 0:
        return int(may_take)
    due = math.ceil((due_work - view.crowd.own.held) / view.job_work - 0.5)
    if may_take and view.backlog + view.waiting == 0:
        due = max(1, due)
    count = min(_run(view), view.queued, max(0, due))
    if is_ending(view):
        count = min(count, max(0, view.jobs(view.free_slots) - view.backlog))
    return count


def fewest_to_take(view: View, count: int) -> int:
    """How many of ``count`` jobs are enough, if the run then ends before another prefix.

    A whole run may be shorter by a quarter. Fewer jobs are what is due near the end of a queue.
    There, workers that take less are idle in the end, and that costs more than a prefix does.
    """
    is_whole = view.num_workers > 1 and count >= _run(view)
    return math.ceil(count * WHOLE_RUN_PART) if is_whole else count


def _run(view: View) -> int:
    """Jobs of a whole run."""
    return view.jobs(max(RUN_ROWS, view.slots + view.prefetch))


def jobs_to_start(view: View, promised: int = 0) -> int:
    """How many rows of the backlog to hand to the engine now, or fewer jobs with as many rows.

    ``promised``: rows for which there was room when they were pulled. Redis counts them as begun.
    """
    return min(view.backlog, max(view.startable, promised))


def jobs_to_return(view: View) -> int:
    """How many jobs, the last of the backlog, go back because others may have nothing to do.

    More than a run goes back at once: the jobs turned out to have several choices.
    """
    if view.num_workers <= 1:
        return 0
    if view.queued > 0:
        return max(0, view.backlog - _run(view))
    return min(view.backlog, view.surplus_jobs)


def jobs_to_recall(view: View) -> int:
    """How many rows that wait in the engine go back, because others may have nothing to do."""
    surplus = max(0, view.surplus_jobs - jobs_to_return(view))
    return min(view.waiting, math.floor(surplus * view.choices))


def rows_to_hand_over(view: View) -> int:
    """How many rows that this worker computes go back, because others would end them sooner.

    They are the last of the queue. Another worker has free slots, and is so much faster that it
    would, on average, end them from their beginning before this one does.
    """
    crowd = view.crowd
    if view.num_workers <= 1 or view.queued or view.backlog or view.waiting or not crowd.own.speed:
        return 0
    least = HAND_OVER_SPEED * crowd.own.speed
    fast = (pace for pace in crowd.others if pace.speed >= least and not pace.is_away)
    return min(view.num_started, sum(pace.free_slots for pace in fast))


def queued_first(lengths: Sequence[int]) -> int:
    """How many jobs wait in the first list that has any."""
    return next((length for length in lengths if length), 0)


def must_yield(backlog_rank: int, lengths: Sequence[int]) -> bool:
    """Whether the backlog goes back because jobs of a higher priority wait.

    Ranks and lists are in the order of priorities, the highest first.
    """
    return any(lengths[:backlog_rank])

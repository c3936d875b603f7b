"""How many jobs a worker takes from the queue, and when it gives some of them back. Pure.

The queue is in prefix order, so consecutive jobs share prefixes. A worker that takes single jobs as
its slots become free rarely gets rows with a common prefix: eight workers hit 16 % of a production
trace's blocks that way, and 36 % with runs of 128 jobs (``tests/benchmarks/bench_plan.py``). A
worker therefore takes whole *runs*. The jobs of a run that its engine has no room for yet are its
*backlog*. It takes no new run while the backlog is enough.

With a long backlog a slow worker would delay the others at the end. So no worker takes more than an
equal share of the queue, and near the end none takes more than its free slots. When the queue is
empty and others may be idle, backlogs go back into it. They also go back when jobs of a higher
priority come: those wait for rows that have started, but not for a backlog.

A job with several choices (``n``) is as many rows for the engine. Jobs of the queue and the backlog
are not decoded, so they are assumed to have as many choices as those that started last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_producer.agreed import RUN_ROWS

AHEAD_AT_END = 8  # rows that wait in the engine when others may soon have nothing to do


@dataclass(frozen=True, slots=True)
class View:
    """The queue and the engine, as one worker sees them.

    ``slots``: rows that its engine decodes at once. ``prefetch``: further rows that wait in it.
    ``num_started``: rows that the engine has. ``backlog``: jobs taken, not started.
    ``queued``: jobs in the queue when last looked, of the highest priority that has any: only those
    are taken. ``num_workers``: live workers of the queue, this one too. ``choices``: rows that a
    job has in the engine, on average.
    """

    slots: int
    prefetch: int
    num_started: int
    backlog: int
    queued: int
    num_workers: int = 1
    choices: float = 1.0

    def jobs(self, num_rows: int) -> int:
        """The jobs with so many rows, rounded up."""
        return math.ceil(num_rows / self.choices)

    @property
    def ahead(self) -> int:
        """Rows that may wait in the engine now: few when others could soon do them."""
        return min(self.prefetch, AHEAD_AT_END) if is_ending(self) else self.prefetch

    @property
    def room(self) -> int:
        """Rows that the engine has room for, those that wait in it included."""
        return max(0, self.slots + self.ahead - self.num_started)

    @property
    def free_slots(self) -> int:
        """Rows that would be computed at once."""
        return max(0, self.slots - self.num_started)

    @property
    def share(self) -> int:
        """An equal share of the queue, rounded up."""
        return -(-self.queued // max(1, self.num_workers))


def is_ending(view: View) -> bool:
    """Whether the queue is near its end: no share would fill half the slots."""
    few = min(view.prefetch, AHEAD_AT_END)
    return view.num_workers > 1 and view.share * view.choices * 2 < view.slots + few


def jobs_to_take(view: View) -> int:
    """How many jobs to ask the queue for now; 0 while the backlog has what the engine wants.

    A run has ``RUN_ROWS`` rows, or all that an empty engine has room for if that is more, and never
    more than an equal share of the queue. A queue that was empty when last looked at is asked for
    one job.
    """
    if view.jobs(view.room) <= view.backlog:
        return 0
    share = max(1, view.share)
    if is_ending(view):
        return min(max(0, view.jobs(view.free_slots) - view.backlog), share)
    return min(_run(view), share)


def _run(view: View) -> int:
    """Jobs of a whole run."""
    return view.jobs(max(RUN_ROWS, view.slots + view.prefetch))


def jobs_to_start(view: View) -> int:
    """How many rows of the backlog to hand to the engine now, or fewer jobs with as many rows."""
    return min(view.backlog, view.room)


def jobs_to_return(view: View) -> int:
    """How many jobs, the last of the backlog, go back because others may have nothing to do.

    More than a run goes back at once: the jobs turned out to have several choices.
    """
    if view.num_workers <= 1:
        return 0
    if view.queued > 0:
        return max(0, view.backlog - _run(view))
    return max(0, view.backlog - view.jobs(view.free_slots))


def jobs_to_recall(view: View) -> int:
    """How many rows that wait in the engine go back, because others may have nothing to do."""
    if view.num_workers <= 1 or view.queued > 0:
        return 0
    return max(0, view.num_started - view.slots - view.ahead)


def queued_first(lengths: Sequence[int]) -> int:
    """How many jobs wait in the first list that has any."""
    return next((length for length in lengths if length), 0)


def must_yield(backlog_rank: int, lengths: Sequence[int]) -> bool:
    """Whether the backlog goes back because jobs of a higher priority wait.

    Ranks and lists are in the order of priorities, the highest first.
    """
    return any(lengths[:backlog_rank])

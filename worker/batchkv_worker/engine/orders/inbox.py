"""The orders to an engine, and the rows on their way to it. Any thread may call it.

A row goes from ``add`` to a thread that prepares it (``ahead``), and from there to the engine's
thread. An engine that does not prepare ahead gets it at once. Several rows may be prepared at once.
They come to the engine in the order in which they were added. Rows that somebody waits for go
before all others. All other orders overtake rows. So each of them sees every row that was added
before it, wherever that row is: here or in the engine. A row that is cancelled here never comes to
the engine. So rows may come again after they were cancelled.

``max_in_flight`` of the engine limits how many rows are here, because the main thread counts them
as the engine's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchkv_worker.events import Work

LONGEST_WAIT_SECONDS = 60.0  # of one wait: an infinite one cannot be asked for

Add = Callable[[], object]  # adds a prepared row to the engine, on its thread


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a row that the engine has."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Cancel up to ``count`` of these rows, if nothing of them was computed."""

    job_ids: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Exchange the adapter."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine's thread ends."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A thread that prepares rows has ended by itself."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Row:
    """A row for the engine. ``add`` adds it; None: it is not prepared."""

    work: Work
    add: Add | None = None


@dataclass(slots=True, eq=False)
class Taken:
    """A row that a thread prepares, until all that were taken before it are prepared, too.

    A dropped one is waited for by none, however long it is still prepared.
    """

    row: Row
    add: Add | None = None  # None: it is still being prepared
    is_dropped: bool = False  # the engine will not get it

    @property
    def work(self) -> Work:
        return self.row.work


Order = Cancel | Recall | Serve | Stop | Failed | Row


class Inbox:
    """Owns all orders that were not carried out yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # and the lock of all below
        self._orders: deque[Cancel | Recall | Serve | Stop | Failed] = deque()
        self._raw, self._ready = _Rows(), _Rows()  # to be prepared; to be added
        self._taken = _TakenRows()
        self._is_ahead = self._is_stopped = False
        self.num_prepared = 0

    # -- called by those who give orders

    def add(self, works: Iterable[Work]) -> None:
        """Give the engine rows, all at once, so that it can group all of them."""
        with self._changed:
            rows = self._raw if self._is_ahead else self._ready
            for work in works:
                rows.put(Row(work))
            self._changed.notify_all()

    def cancel(self, job_id: str) -> None:
        """Drop a row if it is here, and else have the engine cancel it."""
        with self._changed:
            if not self._drop(job_id):
                self._orders.append(Cancel(job_id))
            self._changed.notify_all()

    def give(self, order: Recall | Serve | Stop) -> None:
        """Give an order that is no row and cancels none. After Stop no row is prepared."""
        with self._changed:
            self._orders.append(order)
            self._is_stopped |= isinstance(order, Stop)
            self._changed.notify_all()

    @property
    def num_rows(self) -> int:
        """How many rows the engine does not have yet."""
        return self.num_raw + len(self._ready)

    @property
    def num_raw(self) -> int:
        """How many rows cannot be added yet. 0 if the engine prepares them itself."""
        return len(self._raw) + len(self._taken)

    # -- called by the engine's thread

    def wait(self, seconds: float) -> bool:
        """Wait for an order or a row, prepared or not; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._orders or self.num_rows), seconds)

    def next(self, until: float = -math.inf) -> Order | None:
        """The next order; None if there is none.

        Waits until then (``time.monotonic``), as long as there are rows to prepare.
        """
        with self._changed:
            while True:
                if self._orders:
                    return self._orders.popleft()
                if len(self._ready):
                    return self._ready.take()
                seconds = until - time.monotonic()
                if seconds <= 0 or not self.num_raw:
                    return None
                self._changed.wait(min(seconds, LONGEST_WAIT_SECONDS))

    def recall(self, order: Recall) -> tuple[list[str], int]:
        """Drop rows that are here, the last first. Returns their ids, and what the count leaves."""
        wanted, left, found = {*order.job_ids}, order.count, []
        with self._changed:
            for row in [*reversed(self._raw), *reversed(self._taken), *reversed(self._ready)]:
                job_id, num_choices = row.work.job_id, row.work.num_choices
                if job_id in wanted and num_choices <= left and self._drop(job_id):
                    left -= num_choices
                    found.append(job_id)
            self._changed.notify_all()
        return found, left

    # -- called by the threads that prepare rows

    def begin_ahead(self) -> None:
        """From now on other threads prepare the rows, those that are here, too."""
        with self._changed:
            self._raw, self._ready, self._is_ahead = self._ready, self._raw, True

    def next_raw(self) -> Taken | None:
        """The next row to prepare, after waiting for it; None: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or bool(self._raw))
            return None if self._is_stopped else self._taken.begin(self._raw.take())

    def put(self, taken: Taken, add: Add) -> None:
        """A row of ``next_raw`` is prepared. It waits here for those that were taken before it."""
        with self._changed:
            self.num_prepared += 1
            taken.add = add
            self._release()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A thread that prepares rows has ended, for this reason: the engine ends, too."""
        with self._changed:
            self._orders.append(Failed(error))
            self._changed.notify_all()

    def close(self) -> None:
        """Drop everything, and end the threads that prepare rows, each after its row."""
        with self._changed:
            self._orders.clear()
            self._raw, self._ready, self._taken = _Rows(), _Rows(), _TakenRows()
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def held_up(self) -> tuple[Taken, ...]:
        """The rows that are being prepared and that others wait for: one of each lane at most."""
        with self._changed:
            return self._taken.heads()

    def _release(self) -> None:
        """The rows that wait for none any more can be added."""
        for row in self._taken.ended():
            self._ready.put(row)

    def _drop(self, job_id: str) -> bool:
        if self._taken.drop(job_id):
            self._release()
            return True
        return self._raw.drop(job_id) or self._ready.drop(job_id)


class _Rows:
    """Rows in their order; those that somebody waits for come first."""

    def __init__(self) -> None:
        self._live: deque[Row] = deque()
        self._others: deque[Row] = deque()

    def put(self, row: Row) -> None:
        (self._live if row.work.is_live else self._others).append(row)

    def take(self) -> Row:
        return (self._live or self._others).popleft()

    def drop(self, job_id: str) -> bool:
        for rows in (self._live, self._others):
            for index, row in enumerate(rows):
                if row.work.job_id == job_id:
                    del rows[index]
                    return True
        return False

    def __len__(self) -> int:
        return len(self._live) + len(self._others)

    def __reversed__(self) -> Iterator[Row]:
        yield from reversed(self._others)
        yield from reversed(self._live)


class _TakenRows:
    """Rows that are prepared, several at once. Those of a lane leave in the order of coming."""

    def __init__(self) -> None:
        self._live: deque[Taken] = deque()
        self._others: deque[Taken] = deque()

    def begin(self, row: Row) -> Taken:
        taken = Taken(row)
        (self._live if row.work.is_live else self._others).append(taken)
        return taken

    def ended(self) -> Iterator[Row]:
        """Take out the rows that can be added now: they and all before them are prepared."""
        for rows in (self._live, self._others):
            while rows and (rows[0].add is not None or rows[0].is_dropped):
                taken = rows.popleft()
                if not taken.is_dropped:
                    yield Row(taken.work, taken.add)

    def heads(self) -> tuple[Taken, ...]:
        """The first row of each lane."""
        return tuple(rows[0] for rows in (self._live, self._others) if rows)

    def drop(self, job_id: str) -> bool:
        for taken in (*self._live, *self._others):
            if taken.work.job_id == job_id and not taken.is_dropped:
                taken.is_dropped = True
                return True
        return False

    def __len__(self) -> int:
        return sum(not taken.is_dropped for taken in (*self._live, *self._others))

    def __reversed__(self) -> Iterator[Row]:
        return (
            taken.row
            for taken in (*reversed(self._others), *reversed(self._live))
            if not taken.is_dropped
        )

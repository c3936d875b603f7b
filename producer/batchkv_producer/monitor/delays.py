"""Explains why a batch is slow: a few words for the progress bar, a sentence if there is a fix.

Each reason is one function of the table below. The first one that applies is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchkv_producer.agreed import SHORT_OF_MEMORY
from batchkv_producer.monitor.mismatch import find_mismatch
from batchkv_producer.monitor.remaining import queue_order
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import (
    ASK_NAME_PREFIX,
    WorkerInfo,
    hosts_of,
    local_name_prefix,
    refusing_hosts,
)
from batchkv_producer.progress import rows
from batchkv_producer.retry import read_with_retry
from batchkv_producer.wire.redis_keys import PRIORITIES

LOOK_SECONDS = 1.0  # between two reads of the workers
GONE_SECONDS = 30.0  # how long a note waits for the last worker of a queue to come back
STALLED_SECONDS = 30.0  # a submit that adds nothing for so long counts as interrupted
MAX_NAMED = 3  # hosts
HOPELESS_SECONDS = 30.0  # a run ends if for so long only its own workers serve, and none fits


@dataclass(frozen=True, slots=True)
class Delay:
    """Why a batch is slow. The progress shows ``words``. ``note`` is printed once, if not empty.

    ``is_hopeless``: these workers will never compute the rows.
    ``is_certain``: a new worker would change nothing, so the note does not wait for one.
    """

    words: str
    note: str = ""
    is_hopeless: bool = False
    is_certain: bool = False


Reason = Callable[[BatchStatus, Sequence[WorkerInfo], int], Delay | None]


def unserved_note(status: BatchStatus, listed: Sequence[WorkerInfo] = ()) -> str:
    """The note for a batch whose queue has no worker. ``listed``: the workers of all queues."""
    if hosts := hosts_of(listed, status.model):
        return hosted_note(status, hosts)
    if refusing := refusing_hosts(listed, status.model):
        return refused_note(status, refusing)
    who = f" of {status.model}" if status.adapter else ""
    what = "the model and the adapter" if status.adapter else "the model"
    return (
        f"nobody serves the queue {status.queue}{who}. A worker that was just started needs some "
        f"seconds to show. Otherwise run on a machine with {what}: {status.worker_command}"
    )


def hosted_note(status: BatchStatus, hosts: Sequence[str]) -> str:
    """The note for a batch whose model no worker holds, but these hosts may load."""
    verb = "loads" if len(hosts) == 1 else "load"
    return (
        f"no worker holds {status.model} now; {', '.join(hosts[:MAX_NAMED])} {verb} it as soon as "
        "rows of other models leave room for it"
    )


def refused_note(status: BatchStatus, hosts: Sequence[str]) -> str:
    """The note for a batch whose model these hosts could not load, and no other worker serves."""
    verb, whose = ("has", "its log says") if len(hosts) == 1 else ("have", "their logs say")
    return (
        f"{', '.join(hosts[:MAX_NAMED])} {verb} tried to load {status.model} and failed: {whose} "
        f"why. Correct that there, or run on another machine: {status.worker_command}"
    )


def _unserved(status: BatchStatus, serving: Sequence[WorkerInfo], num_local: int) -> Delay | None:
    if serving:
        return None
    if num_local:
        return Delay("a worker is starting")
    return Delay("nobody serves the queue", unserved_note(status))


def _loading(_: BatchStatus, serving: Sequence[WorkerInfo], __: int) -> Delay | None:
    if not all(worker.is_loading for worker in serving):
        return None
    return Delay(next(worker.doing for worker in serving))


def _resting(_: BatchStatus, serving: Sequence[WorkerInfo], __: int) -> Delay | None:
    resting = [worker for worker in serving if worker.is_resting]
    if not resting or any(not (worker.is_resting or worker.is_away) for worker in serving):
        return None
    first = resting[0]
    if not first.is_drained:
        return Delay(f"{first.name} is {first.doing}")
    command = f"batchkv workers --resume {first.name}"
    return Delay(f"{first.name} is {first.doing}", f"`{command}` lets it take rows again")


def _away(_: BatchStatus, serving: Sequence[WorkerInfo], __: int) -> Delay | None:
    holding = [worker for worker in serving if worker.is_away and worker.num_running]
    if not holding:
        return None
    first = max(holding, key=lambda worker: worker.num_running)
    return Delay(f"{first.name} is asleep or away and holds {rows(first.num_running)}")


def _short_of_memory(_: BatchStatus, serving: Sequence[WorkerInfo], __: int) -> Delay | None:
    short = [worker for worker in serving if worker.doing == SHORT_OF_MEMORY]
    if not short:
        return None
    return Delay(f"{short[0].name} is {SHORT_OF_MEMORY}, so fewer rows decode at once")


def _apart(num_apart: int) -> Delay | None:
    if not num_apart:
        return None
    verb, them = ("waits", "it") if num_apart == 1 else ("wait", "them")
    return Delay(f"{rows(num_apart)} {verb} to run apart: a worker died with {them}")


def _behind(status: BatchStatus, open_batches: Sequence[BatchStatus]) -> Delay | None:
    """No worker holds a row of the batch, and others of its queue are before it."""
    mine = queue_order(status)
    before = [one for one in open_batches if queue_order(one) < mine and one.queued + one.running]
    if not before:
        return None
    first = min(before, key=queue_order).batch_id
    way = "" if status.priority == PRIORITIES[0] else ", and --priority high goes before them"
    note = f"rows of batch {first} come first: `batchkv cancel {first}` ends them{way}"
    return Delay("rows of other batches come first", note, is_certain=True)


def _unfit(status: BatchStatus, serving: Sequence[WorkerInfo], num_local: int) -> Delay | None:
    found = find_mismatch(status, serving)
    if found is None:
        return None
    own = (local_name_prefix(status.batch_id), ASK_NAME_PREFIX)
    if num_local and not any(worker.name.startswith(own) for worker in serving):
        return Delay("a worker is starting")  # our own, which fits
    is_hopeless = num_local > 0 and all(worker.name.startswith(own) for worker in serving)
    return Delay(found.words, found.note, is_hopeless and not status.running)


# Arguments of a reason: the batch, the workers of its queue, the number of our own workers.
REASONS: tuple[Reason, ...] = (_unserved, _loading, _unfit, _resting, _away, _short_of_memory)


def find_delay(
    status: BatchStatus, serving: Sequence[WorkerInfo], num_local: int = 0
) -> Delay | None:
    """Why rows of this batch wait. None if no reason is known."""
    if status.is_done:
        return None
    found = (reason(status, serving, num_local) for reason in REASONS)
    return next((delay for delay in found if delay is not None), None)


class Delays:
    """Finds the current delay of one batch, about once a second. Prints each note once.

    ``read`` returns the workers of a queue. ``count_apart`` returns the number of its suspects that
    wait, ``open_batches`` the batches of queues that are not done. ``refused_writes`` returns a
    sentence if the server refuses writes, else "". ``listed`` returns the workers of all queues;
    hosts among them may load the model.
    """

    def __init__(
        self,
        read: Callable[[str], Sequence[WorkerInfo]],
        note: Callable[[str], None],
        num_local: int = 0,
        clock: Callable[[], float] = time.monotonic,
        count_apart: Callable[[str], int] = lambda _: 0,
        refused_writes: Callable[[], str] = str,
        listed: Callable[[], Sequence[WorkerInfo]] = tuple,
        open_batches: Callable[[Sequence[str]], Sequence[BatchStatus]] = lambda _: (),
    ) -> None:
        self._open_batches = open_batches
        self._listed = listed
        self.words = ""
        self._refused_writes = refused_writes
        self._num_ended = -1
        self._chunks, self._chunks_at = -1, 0.0  # chunks of the submit; when the last one came
        self._count_apart = count_apart
        self._read = read
        self._note = note
        self._num_local = num_local
        self._clock = clock
        self._look_at = -float("inf")
        self._served_at = -float("inf")
        self._said: set[str] = set()
        self._hopeless_since = float("inf")

    @property
    def is_hopeless(self) -> bool:
        """Whether for ``HOPELESS_SECONDS`` only our own workers have served, and none fits."""
        return self._clock() - self._hopeless_since >= HOPELESS_SECONDS

    def look(self, status: BatchStatus) -> str:
        """The words for the progress at this moment; "" if there is no delay."""
        now = self._clock()
        if status.is_done:
            self.words, self._hopeless_since = "", float("inf")
        elif now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            serving = read_with_retry(lambda: self._read(status.queue))
            if serving:
                self._served_at = now
            delay = self._full_disk(status) or self._stalled_submit(status, now)
            delay = delay or self._hosted(status, serving)
            delay = delay or find_delay(status, serving, self._num_local)
            if delay is None and status.queued:
                delay = _apart(read_with_retry(lambda: self._count_apart(status.queue)))
            if delay is None and status.is_submitted and status.queued and not status.running:
                others = read_with_retry(lambda: self._open_batches([status.queue]))
                delay = _behind(status, others)
            self.words = delay.words if delay else ""
            is_hopeless = delay is not None and delay.is_hopeless
            self._hopeless_since = min(now, self._hopeless_since) if is_hopeless else float("inf")
            is_certain = delay is not None and delay.is_certain
            if delay and (is_certain or serving or now - self._served_at >= GONE_SECONDS):
                self._say(delay.note)
        return self.words

    def _full_disk(self, status: BatchStatus) -> Delay | None:
        """The server refuses writes, so workers keep their results.

        It is asked only if no row has ended since the last look.
        """
        if status.num_ended != self._num_ended:
            self._num_ended = status.num_ended
            return None
        sentence = read_with_retry(self._refused_writes)
        return Delay("the server's disk is full", sentence) if sentence else None

    def _hosted(self, status: BatchStatus, serving: Sequence[WorkerInfo]) -> Delay | None:
        """Nobody holds the model, but a host may load it."""
        if serving or self._num_local:
            return None
        listed = read_with_retry(self._listed)
        if hosts := hosts_of(listed, status.model):
            note = hosted_note(status, hosts)
            return Delay("a worker loads the model when it can", note, is_certain=True)
        if refusing := refusing_hosts(listed, status.model):
            note = refused_note(status, refusing)
            return Delay("the model could not be loaded", note, is_certain=True)
        return None

    def _stalled_submit(self, status: BatchStatus, now: float) -> Delay | None:
        """A part of the batch is missing from the queue, and nothing is added any more."""
        if status.chunks != self._chunks:
            self._chunks, self._chunks_at = status.chunks, now
        if status.is_submitted or now - self._chunks_at < STALLED_SECONDS:
            return None
        return Delay(
            "the submit was interrupted",
            f"a part of batch {status.batch_id} is not in the queue: its submit was interrupted. "
            "The same submit command again brings the rest",
            is_certain=True,
        )

    def _say(self, note: str) -> None:
        if note and note not in self._said:
            self._said.add(note)
            self._note(note)

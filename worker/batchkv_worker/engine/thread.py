"""The engine on its own thread, the only one that touches MLX.

The main thread puts orders into the inbox (``add``, ``cancel``, ``stop``) and reads lists of
notices from the outbox. Other threads prepare the rows of the inbox, if the engine allows that.
The engine waits only for its inbox, and only while it is idle or begins. It does not know Redis. A
slow main thread only lets the outbox grow. Events of live rows do not go through it: ``on_live``
gets them on the engine's thread.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_worker.engine.orders.ahead import Ahead, num_threads
from batchkv_worker.engine.orders.inbox import (
    Cancel,
    Failed,
    Inbox,
    Order,
    Recall,
    Row,
    Serve,
    Stop,
)
from batchkv_worker.errors import WorkerError
from batchkv_worker.events import (
    EngineDied,
    EngineLike,
    Event,
    ExchangesAdapters,
    HasFigures,
    HasProgress,
    Piece,
    PreparesAhead,
    Recalled,
    Serving,
    Work,
)
from batchkv_worker.faults import WORKAROUNDS, is_device_fault
from batchkv_worker.figures.engine import IN_WAITING, EngineFigures, Progress
from batchkv_worker.figures.histogram import STEP_BOUNDS, Histogram
from batchkv_worker.model.load_progress import listening
from batchkv_worker.trace import DECODE, END, ENGINE, IDLE, PREPARE, START, note

log = logging.getLogger("batchkv.worker")

ORDERS_SECONDS = 0.05  # spent on new rows between two steps
IDLE_SECONDS = 5.0  # after which, and every so often, an idle engine gives memory back
FIRST_ORDERS_SECONDS = 1.0  # the same when no row decodes: rows that start together end together
AHEAD_STOP_SECONDS = 0.5  # waited for a row that is being prepared, once the engine has ended


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built and accepts work."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The engine could not be built. The configuration is at fault, not a job."""

    error: WorkerError


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends a wait of the main loop; nothing happened in the engine."""


LiveEvents = Callable[[list[Event]], object]
Notice = Event | Ready | LoadFailed | Wake | Recalled | Serving


class EngineThread:
    """Owns the thread. The main thread calls the methods; they return at once, except ``join``."""

    def __init__(self, factory: Callable[[], EngineLike]) -> None:
        self._factory = factory
        self._inbox = Inbox()
        self._outbox: SimpleQueue[Sequence[Notice]] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="batchkv-engine", daemon=True)
        self._engine: EngineLike | None = None
        self._read_figures: Callable[[], EngineFigures] | None = None  # once it is built
        self._read_progress: Callable[[], Progress] | None = None  # the same
        self._ahead: Ahead | None = None  # once it is built, if it allows that
        self._num_done = 0  # steps, and orders that take long
        self.steps = Histogram(STEP_BOUNDS)  # how long each took
        self.num_slots = self.max_in_flight = 0  # until it is built
        self.maker: Maker = NOBODY  # until it is built
        self.makers: Mapping[str, Maker] = {}  # by adapter, once it is built and if it has any
        self.on_live: LiveEvents = self._outbox_of_live  # gets all events of live rows
        self._live: set[str] = set()  # ids of the live rows that the engine has
        self.loading = ""  # how far building the engine is; empty once it is there

    def start(self) -> None:
        """Start the thread, which builds the engine and then sends ``Ready``."""
        self.loading = "loading"
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread was started and has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def add(self, works: Sequence[Work]) -> None:
        """Give the engine rows to generate, all at once, so that it can group all of them."""
        if works:
            self._inbox.add(works)

    def cancel(self, job_id: str) -> None:
        """Cancel a row; an event that was already sent may still come."""
        self._inbox.cancel(job_id)

    def recall(self, job_ids: Sequence[str], count: int) -> None:
        """Cancel up to ``count`` of these rows if they wait; ``Recalled`` names those."""
        self._inbox.give(Recall(tuple(job_ids), count))

    def serve(self, adapter: str) -> None:
        """Exchange the adapter while no row is in the engine; ``Serving`` says when it is done."""
        self.loading = f"loading adapter {adapter}" if adapter else "loading the model alone"
        self._inbox.give(Serve(adapter))

    def stop(self) -> None:
        """Ask the thread to end after its current step."""
        self._inbox.give(Stop())

    @property
    def num_steps(self) -> int:
        """Grows with each step, and with each prepared row: a long prompt takes time, too."""
        return self._num_done + self._inbox.num_prepared

    @property
    def held_up(self) -> tuple[object, ...]:
        """The rows that are being prepared and that others wait for."""
        return self._inbox.held_up

    @property
    def memory_bytes(self) -> int:
        """Bytes that MLX had allocated after the last step; 0 before the engine is built."""
        return 0 if self._engine is None else self._engine.memory_bytes()

    @property
    def trouble(self) -> str:
        """Why the engine computes less than it could, in a few words; mostly empty."""
        return "" if self._engine is None else self._engine.trouble()

    def has_changed(self) -> bool:
        """Whether the model's files have changed since they were loaded. May take seconds."""
        return self._engine is not None and self._engine.has_changed()

    def figures(self) -> EngineFigures | None:
        """The engine's figures; None if it has none, or is just being changed."""
        try:
            if self._read_figures is None:
                return None
            found, num_here = self._read_figures(), self._inbox.num_rows
            levels = {**found.levels, IN_WAITING: found.levels.get(IN_WAITING, 0) + num_here}
            return replace(found, levels=levels)
        except Exception:
            log.debug("the engine's figures cannot be read", exc_info=True)
            return None

    def progress(self) -> Progress | None:
        """How far the engine is; None if it does not say, or is just being changed."""
        try:
            if self._read_progress is None:
                return None
            found = self._read_progress()
            return replace(found, num_waiting=found.num_waiting + self._inbox.num_rows)
        except Exception:
            log.debug("the engine's progress cannot be read", exc_info=True)
            return None

    def report(self) -> str:
        """The engine's state, for a log; it works even when the engine hangs."""
        if self._engine is None:
            return "it was still being built"
        try:
            waiting = f"{self._inbox.num_rows} rows on their way to it"
            return f"{self._engine.report()}; {waiting}, {self._inbox.num_raw} not prepared"
        except Exception as fault:  # noqa: BLE001 - it may be half way through anything
            return f"its state cannot be read: {type(fault).__name__}"

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end. Returns whether it has ended and no row is being prepared.

        A long prompt is not waited for.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        return self._ahead is None or self._ahead.join(min(AHEAD_STOP_SECONDS, timeout_seconds))

    def wake(self) -> None:
        """End a wait in ``notices``. Safe in a signal handler and from any thread."""
        self._outbox.put((Wake(),))

    def notices(self, timeout_seconds: float) -> list[Notice]:
        """All notices in the outbox, after waiting up to ``timeout_seconds`` for the first."""
        found: list[Notice] = []
        try:
            found += self._outbox.get(timeout_seconds > 0, max(timeout_seconds, 0) or None)
            while True:
                found += self._outbox.get_nowait()
        except Empty:
            return found

    def _main(self) -> None:
        engine: EngineLike | None = None
        ENGINE.enter(START)
        try:
            with listening(self._note_loading):
                engine = self._engine = self._factory()
            self.loading = ""
            self._serve(engine)
        except WorkerError as error:
            self._outbox.put((LoadFailed(error),))
        except Exception as error:  # noqa: BLE001 - after any fault, the jobs must go back
            log.error("the engine died:\n%s", traceback.format_exc())
            if is_of_device := is_device_fault(error):
                log.error("the device failed, for no reason of the rows. %s", WORKAROUNDS)
            self._outbox.put((EngineDied(f"{type(error).__name__}: {error}", is_of_device),))
        finally:
            ENGINE.enter(END)
            self._inbox.close()
            _note_memory()
            try:
                if engine is not None:
                    engine.close()
            finally:
                _end_streams()
                ENGINE.enter(None)

    def _note_loading(self, text: str) -> None:
        self.loading = text

    def _serve(self, engine: EngineLike) -> None:
        self.num_slots, self.max_in_flight = engine.num_slots, engine.max_in_flight
        self.maker = engine.maker
        if isinstance(engine, ExchangesAdapters):
            self.makers = engine.makers
        if isinstance(engine, HasFigures):
            self._read_figures = engine.figures
        if isinstance(engine, HasProgress):
            self._read_progress = engine.progress
        if isinstance(engine, PreparesAhead) and engine.prepares_ahead:
            count = min(num_threads(), engine.prepares_ahead)
            self._ahead = Ahead(self._inbox, engine.prepare, count)
            self._ahead.start()
        self._outbox.put((Ready(),))
        while self._take_orders(engine):
            if engine.is_idle:
                continue
            ENGINE.enter(DECODE)
            began = time.perf_counter()
            events = engine.step()
            self.steps.add(time.perf_counter() - began)
            self._num_done += 1
            self.max_in_flight = engine.max_in_flight
            if self._live:
                events = self._without_live(events)
            if events:
                self._outbox.put(events)

    def _without_live(self, events: list[Event]) -> list[Event]:
        """Hand over the events of live rows, which need not wait for the main thread."""
        live: list[Event] = []
        others: list[Event] = []
        for event in events:
            (live if _job_of(event) in self._live else others).append(event)
        self._live.difference_update(_job_of(one) for one in live if not isinstance(one, Piece))
        if live:
            self.on_live(live)
        return others

    def _outbox_of_live(self, events: list[Event]) -> None:
        self._outbox.put(events)

    def _take_orders(self, engine: EngineLike) -> bool:
        """Carry out the orders in the inbox; wait for one while the engine is idle. False: stop."""
        was_idle = engine.is_idle
        if was_idle:
            ENGINE.enter(IDLE)
            if not self._inbox.wait(IDLE_SECONDS):
                engine.rest()
                return True
        ENGINE.enter(PREPARE)
        until = time.monotonic() + (FIRST_ORDERS_SECONDS if was_idle else ORDERS_SECONDS)
        num_missing = engine.num_slots if was_idle else 0
        while True:
            waits = num_missing > 0 and not self._live
            order = self._inbox.next(math.inf if engine.is_idle else until if waits else -math.inf)
            if order is None:
                return True
            if isinstance(order, Stop):
                return False
            self._carry_out(order, engine)
            if isinstance(order, Row):
                num_missing -= order.work.num_choices
            if not engine.is_idle and time.monotonic() > until:
                return True  # the other orders wait, so that rows in slots go on

    def _carry_out(self, order: Order, engine: EngineLike) -> None:
        match order:
            case Cancel(job_id):
                engine.cancel(job_id)
                self._live.discard(job_id)
            case Recall(job_ids):
                found, left = self._inbox.recall(order)
                found += engine.recall(job_ids, left)
                self._outbox.put((Recalled(tuple(found)),))
            case Serve(adapter):
                self._exchange(engine, adapter)
            case Failed(error):
                reason = f"a thread that prepares rows ended: {type(error).__name__}: {error}"
                raise RuntimeError(reason) from error
            case Row(work, add):
                if work.is_live:
                    self._live.add(work.job_id)
                if add is None:
                    engine.add(work)
                else:
                    add()
                self._num_done += 1

    def _exchange(self, engine: EngineLike, adapter: str) -> None:
        assert isinstance(engine, ExchangesAdapters)
        with listening(self._note_loading):
            engine.serve(adapter)
        self.num_slots, self.max_in_flight = engine.num_slots, engine.max_in_flight
        self.maker, self.loading = engine.maker, ""
        self._num_done += 1
        self._outbox.put((Serving(adapter),))


def _job_of(event: Event) -> str:
    return "" if isinstance(event, EngineDied) else event.job_id


def _note_memory() -> None:
    """Write MLX's peak memory into the trace, if there is one."""
    mlx = sys.modules.get("mlx.core")
    if ENGINE.is_traced and mlx is not None:
        note("memory", peak_mb=round(mlx.get_peak_memory() / 1e6, 1))


def _end_streams() -> None:
    """End MLX's streams of this thread, if it had any.

    Otherwise the interpreter destroys their threads at exit while they run, and the process ends in
    ``std::terminate``.
    """
    mlx = sys.modules.get("mlx.core")
    if mlx is not None:
        mlx.clear_streams()

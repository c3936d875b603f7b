"""The engine on its own thread, the only one that touches MLX.

The main thread puts orders into the inbox (``add``, ``cancel``, ``stop``) and reads lists of
notices from the outbox. The engine waits only for its inbox, and only while it is idle. It does not
know Redis. A slow main thread only lets the outbox grow. Events of live rows do not go through it:
``on_live`` gets them on the engine's thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_worker.errors import WorkerError
from batchkv_worker.events import (
    EngineDied,
    EngineLike,
    Event,
    ExchangesAdapters,
    HasFigures,
    HasProgress,
    Piece,
    Recalled,
    Serving,
    Work,
)
from batchkv_worker.faults import WORKAROUNDS, is_device_fault
from batchkv_worker.figures.engine import EngineFigures, Progress
from batchkv_worker.figures.histogram import STEP_BOUNDS, Histogram
from batchkv_worker.model.load_progress import listening
from batchkv_worker.trace import DECODE, END, ENGINE, IDLE, PREPARE, START, note

log = logging.getLogger("batchkv.worker")

ORDERS_SECONDS = 0.05  # spent on new rows between two steps
IDLE_SECONDS = 5.0  # after which, and every so often, an idle engine gives memory back
FIRST_ORDERS_SECONDS = 1.0  # the same when no row decodes: rows that start together end together


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


@dataclass(frozen=True, slots=True)
class _Cancel:
    job_id: str


@dataclass(frozen=True, slots=True)
class _Recall:
    job_ids: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class _Serve:
    adapter: str


_Order = Work | _Cancel | _Recall | _Serve | None  # None: stop


class EngineThread:
    """Owns the thread. The main thread calls the methods; they return at once, except ``join``."""

    def __init__(self, factory: Callable[[], EngineLike]) -> None:
        self._factory = factory
        self._inbox: SimpleQueue[Sequence[_Order]] = SimpleQueue()
        self._orders: deque[_Order] = deque()  # taken from the inbox, not carried out yet
        self._outbox: SimpleQueue[Sequence[Notice]] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="batchkv-engine", daemon=True)
        self._engine: EngineLike | None = None
        self._read_figures: Callable[[], EngineFigures] | None = None  # once it is built
        self._read_progress: Callable[[], Progress] | None = None  # the same
        self.num_steps = 0
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
            self._inbox.put(tuple(works))

    def cancel(self, job_id: str) -> None:
        """Cancel a row; an event that was already sent may still come."""
        self._inbox.put((_Cancel(job_id),))

    def recall(self, job_ids: Sequence[str], count: int) -> None:
        """Cancel up to ``count`` of these rows if they wait; ``Recalled`` names those."""
        self._inbox.put((_Recall(tuple(job_ids), count),))

    def serve(self, adapter: str) -> None:
        """Exchange the adapter while no row is in the engine; ``Serving`` says when it is done."""
        self.loading = f"loading adapter {adapter}" if adapter else "loading the model alone"
        self._inbox.put((_Serve(adapter),))

    def stop(self) -> None:
        """Ask the thread to end after its current step."""
        self._inbox.put((None,))

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
            return None if self._read_figures is None else self._read_figures()
        except Exception:
            log.debug("the engine's figures cannot be read", exc_info=True)
            return None

    def progress(self) -> Progress | None:
        """How far the engine is; None if it does not say, or is just being changed."""
        try:
            return None if self._read_progress is None else self._read_progress()
        except Exception:
            log.debug("the engine's progress cannot be read", exc_info=True)
            return None

    def report(self) -> str:
        """The engine's state, for a log; it works even when the engine hangs."""
        if self._engine is None:
            return "it was still being built"
        try:
            return self._engine.report()
        except Exception as fault:  # noqa: BLE001 - it may be half way through anything
            return f"its state cannot be read: {type(fault).__name__}"

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end. Returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

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
        self._outbox.put((Ready(),))
        while self._take_orders(engine):
            if engine.is_idle:
                continue
            ENGINE.enter(DECODE)
            began = time.perf_counter()
            events = engine.step()
            self.steps.add(time.perf_counter() - began)
            self.num_steps += 1
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
        try:
            order = self._next_order(block=was_idle)
            ENGINE.enter(PREPARE)
            until = time.monotonic() + (FIRST_ORDERS_SECONDS if was_idle else ORDERS_SECONDS)
            while order is not None:
                if isinstance(order, _Cancel):
                    engine.cancel(order.job_id)
                    self._live.discard(order.job_id)
                elif isinstance(order, _Recall):
                    found = engine.recall(order.job_ids, order.count)
                    self._outbox.put((Recalled(tuple(found)),))
                elif isinstance(order, _Serve):
                    self._exchange(engine, order.adapter)
                else:
                    if order.is_live:
                        self._live.add(order.job_id)
                    engine.add(order)
                    self.num_steps += 1  # progress too: a long prompt takes time to tokenize
                if not engine.is_idle and time.monotonic() > until:
                    return True  # the other orders wait, so that rows in slots go on
                order = self._next_order(block=False)
        except Empty:
            if was_idle and engine.is_idle:
                engine.rest()
            return True
        return False

    def _exchange(self, engine: EngineLike, adapter: str) -> None:
        assert isinstance(engine, ExchangesAdapters)
        with listening(self._note_loading):
            engine.serve(adapter)
        self.num_slots, self.max_in_flight = engine.num_slots, engine.max_in_flight
        self.maker, self.loading = engine.maker, ""
        self.num_steps += 1
        self._outbox.put((Serving(adapter),))

    def _next_order(self, *, block: bool) -> _Order:
        """The oldest order; raises Empty when there is none, after IDLE_SECONDS with ``block``."""
        while not self._orders:
            self._orders.extend(self._inbox.get(block, IDLE_SECONDS if block else None))
        return self._orders.popleft()


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

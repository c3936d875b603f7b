"""How steps and chunks are launched: by the engine's thread, or by a thread beside it.

To launch a step, the host prepares each of its kernels. On CUDA this takes most of a step's time,
and MLX keeps Python free meanwhile. So another thread launches a step, and the engine's thread
builds the graph of the next one; and so with the layers of a chunk of prompts.

A step that is launched when the one before it has ended finds the device idle: the device waited
while the end was told and the first kernels were prepared. So the first layers of a step are
launched before that, and the others after it (``start_around``).

MLX computes a stream's work for one thread at a time. So the engine's thread calls ``join`` before
anything that MLX computes for it; what only builds graphs needs no such call. A model whose graphs
can be traced builds them without computing; others are launched by the engine's thread.

Until its first launch, the thread may compute something else (``warm_up``): on a stream of its own,
because the shared one serves the engine's thread meanwhile.

MLX keeps its plans of attention for the thread that made them. So one thread outlives its engine,
and serves the next one.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import mlx.core as mx

log = logging.getLogger("batchkv.engine")

Found = TypeVar("Found")


class Launches(Protocol):
    """Starts computations. ``close`` ends it, after a ``join``."""

    @property
    def starts_early(self) -> bool:
        """Whether ``start_around`` is worth what it needs."""

    def start(self, *arrays: Any) -> None:
        """Start to compute arrays. Those before must have been joined."""

    def start_around(
        self, first: list[mx.array], between: Callable[[], Found], *rest: list[mx.array]
    ) -> Found:
        """Start ``first``, do ``between``, and start each of the rest.

        What was started before must have been joined. Returns what ``between`` returned, perhaps
        while the last of the rest is started. It may compute.
        """

    def join(self) -> None:
        """Wait until all is launched. Raises what MLX raised meanwhile, once."""

    def settle(self) -> Exception | None:
        """The same after a fault. Returns what MLX raised meanwhile."""

    def close(self) -> None: ...


class AtOnce:
    """By the calling thread."""

    starts_early = False

    def start(self, *arrays: Any) -> None:
        mx.async_eval(*arrays)

    def start_around(
        self, first: list[mx.array], between: Callable[[], Found], *rest: list[mx.array]
    ) -> Found:
        self.start(first)
        found = between()
        for arrays in rest:
            self.start(arrays)
        return found

    def join(self) -> None:
        """All is launched."""

    def settle(self) -> None:
        """All is launched, and nothing was raised."""

    def close(self) -> None:
        """Nothing is held."""


AT_ONCE = AtOnce()


class Never(AtOnce):
    """Starts nothing: for graphs that are built and dropped."""

    def start(self, *arrays: Any) -> None:
        """Nothing is launched."""


@dataclass(slots=True)
class _Around:
    """What a thread is given by ``start_around``. ``found`` gets nothing if it fails before."""

    first: list[mx.array]
    between: Callable[[], Any]
    rest: tuple[list[mx.array], ...]
    found: SimpleQueue[list[Any]]

    def do(self) -> None:
        mx.async_eval(self.first)
        self.first = []
        found, count = self.between(), len(self.rest)
        for arrays in self.rest[: count - 1]:
            mx.async_eval(arrays)
        # Whoever is told goes on, and Python changes threads only after 5 ms, or where one waits.
        # So no more than one launch is left: between two this thread would need Python.
        self.found.put([found])
        for arrays in self.rest[count - 1 :]:
            mx.async_eval(arrays)


class Beside:
    """By a thread of its own. The default stream must be one that any thread may use.

    ``close`` leaves the thread to the next one (``choose``), unless another waits already.
    """

    starts_early = True

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_open = True
        self._given: SimpleQueue[tuple[Any, ...] | _Around | Callable[[], None] | None] = (
            SimpleQueue()
        )
        self._is_begun, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._is_busy = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="batchkv-launch", daemon=True)
        self._thread.start()

    def warm_up(self, works: Sequence[Callable[[], None]]) -> None:
        """Do ``works`` in turn. The first launch, or the end, waits only for the one at hand.

        What they raise is dropped, and ends them.
        """
        self._given.put(partial(self._do_meanwhile, works))

    def end_warm_up(self) -> None:
        """Do no more of ``works``, and wait for the one at hand."""
        is_over = threading.Event()
        self._given.put(is_over.set)
        is_over.wait()

    def start(self, *arrays: Any) -> None:
        assert not self._is_busy, "the step before was not joined"
        self._is_busy = True
        self._given.put(arrays)
        # Python changes threads after 5 ms, or where one waits. The other one soon lets Python go.
        self._is_begun.acquire()

    def start_around(
        self, first: list[mx.array], between: Callable[[], Found], *rest: list[mx.array]
    ) -> Found:
        assert not self._is_busy, "the step before was not joined"
        self._is_busy = True
        found: SimpleQueue[list[Any]] = SimpleQueue()
        self._given.put(_Around(first, between, rest, found))
        told = found.get()
        if not told:
            self.join()  # which raises the reason
        only: Found = told[0]
        return only

    def join(self) -> None:
        if not self._is_busy:
            return
        self._is_done.acquire()
        self._is_busy = False
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # whose traceback has this frame, and those with the step's arrays

    def settle(self) -> Exception | None:
        try:
            self.join()
        except Exception as fault:  # noqa: BLE001 - the caller decides
            return fault
        return None

    def open(self, stream: Any) -> None:
        """Launch on this stream from now on, after a ``close``."""
        self._stream, self._is_open = stream, True
        self._given.put(partial(mx.set_default_stream, stream))

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.settle()
        self.end_warm_up()
        if _left:
            self.end()
        else:
            _left.append(self)

    def end(self) -> None:
        """End the thread. No other call may follow."""
        self._given.put(None)
        self._thread.join()

    def _serve(self) -> None:
        mx.set_default_stream(self._stream)
        while (given := self._given.get()) is not None:
            if callable(given):
                given()
                continue
            try:
                if isinstance(given, _Around):
                    given.do()
                else:
                    self._is_begun.release()
                    mx.async_eval(*given)
            except BaseException as fault:  # noqa: BLE001 - the engine's thread raises it
                self._fault = fault
            if isinstance(given, _Around):
                given.found.put([])  # if there is nothing, it waits in vain
            # MLX writes into buffers in place if nobody else holds them.
            del given
            self._is_done.release()

    def _do_meanwhile(self, works: Sequence[Callable[[], None]]) -> None:
        num_done = 0
        try:
            mx.set_default_stream(mx.new_stream(self._stream.device))
            for work in works:
                if not self._given.empty():
                    break
                work()
                num_done += 1
        except Exception as fault:  # noqa: BLE001 - the thread lives on, and launches
            log.debug("the thread that launches begins without all plans: %s", fault)
        finally:
            mx.set_default_stream(self._stream)
        log.debug("the thread that launches has done %d of %d works", num_done, len(works))


def choose(*, is_beside: bool) -> Launches:
    """``is_beside``: by a thread of its own, if MLX lets it compute for this one."""
    if not is_beside:
        return AT_ONCE
    stream = mx.default_stream(mx.default_device())
    launches = _left_over(stream) or Beside(stream)
    try:
        launches.start(mx.zeros((1,)) + 1)
        launches.join()
    except (RuntimeError, MemoryError, ValueError) as fault:
        log.info("steps are launched by the engine's thread: %s", fault)
        launches.end()
        return AT_ONCE
    return launches


def _left_over(stream: Any) -> Beside | None:
    """The thread that waits for an engine, if there is one."""
    try:
        launches = _left.pop()
    except IndexError:
        return None
    launches.open(stream)
    return launches


_left: list[Beside] = []  # a thread that no engine has, if there is one


def end_thread() -> None:
    """End the thread that waits for an engine, if there is one; before the process ends, too."""
    while _left:
        _left.pop().end()


atexit.register(end_thread)


def share_stream() -> None:
    """Make the calling thread's default stream one that any thread may use, if MLX has such."""
    make = getattr(mx, "new_thread_unsafe_stream", None)
    if make is not None:
        mx.set_default_stream(make(mx.default_device()))

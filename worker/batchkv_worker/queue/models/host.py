"""The loop of a host: look at the queues, let ``choice`` choose, claim, load.

A host takes no rows and has no model. Its processes do the work, each as it would without a host.
So a hang, a crash or a refusal of one model leaves the others alone, and whatever becomes of the
host, the rows are safe: each is leased by a worker that can die.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.errors import BatchkvError
from batchkv_producer.local.presence import Presence, reclaim_dead_of_home
from batchkv_producer.manage import drain as orders
from batchkv_producer.wire import redis_keys
from batchkv_worker.errors import EXIT_ENGINE_DIED, EXIT_MODEL_CHANGED, WorkerError
from batchkv_worker.queue.models.choice import Choice, Held, Queue, Rules, choose
from batchkv_worker.queue.models.groups import Group
from batchkv_worker.queue.models.holding import Command, Process, Processes
from batchkv_worker.queue.models.record import HostRecord
from batchkv_worker.queue.models.setbacks import Setbacks
from batchkv_worker.queue.models.view import View, Watcher, is_ready
from batchkv_worker.queue.stop import StopRequest

log = logging.getLogger("batchkv.worker")

LOOK_SECONDS = 1.0
SHORT_SECONDS = 0.1  # until the next look, while something is about to happen
EXIT_CONFIGURATION = WorkerError.exit_code


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What a host serves. ``load_seconds``: a guess for each model, in the order of the command.

    ``is_burst``: end when all queues are empty. ``max_idle_seconds``: end after so long without a
    row; None: never.
    """

    name: str
    groups: Sequence[Group]
    load_seconds: Mapping[str, float]
    stay_seconds: float
    command: Command
    is_burst: bool = False
    max_idle_seconds: float | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models, in the order of the command."""
        return tuple(self.load_seconds)


class Host:
    """Runs on the main thread. ``stop`` is set by signals.

    Raises SettingsError if another worker has its name.
    """

    def __init__(self, connection: Redis, plan: HostPlan) -> None:
        self._connection = connection
        self._plan = plan
        self._record = HostRecord(connection, plan.name, plan.models)
        self._record.register()  # before the file, which would count as a life of that name
        first, *more = map(redis_keys.queue_name, plan.models)
        self._presence = Presence(connection, plan.name, first, LOOK_SECONDS, more)
        groups = [group.models for group in plan.groups]
        self._rules = Rules(groups, plan.stay_seconds, is_eager=not plan.is_burst)
        self._flags = {model: one.flags for one in plan.groups for model in one.models}
        self._processes = Processes(plan.command, plan.name)
        self._watcher = Watcher(connection, plan.name, plan.models)
        self._setbacks = Setbacks()
        self._load_seconds = dict(plan.load_seconds)
        self._next: Choice | None = None  # claimed; its processes to end have not all ended
        self._awake = threading.Event()
        self._idle_since: float | None = None
        self._drained: set[str] = set()  # own workers that this host drains
        self._is_away = False
        self.num_loads = 0
        self.stop = StopRequest(self._awake.set)

    def run(self) -> int:
        """Serve until asked to stop or out of work; the exit code."""
        is_over, code = False, 0
        try:
            while not is_over and not self.stop.is_asked:
                wait = self._turn()
                is_over, code = self._is_over()
                self._awake.wait(0 if is_over else wait)
                self._awake.clear()
            self._leave()
        finally:
            self._processes.abandon()
            self._presence.remove()
            self._record.remove()
        return code if is_over else 0

    # -- one turn

    def _turn(self) -> float:
        """Look and act; returns the seconds until the next turn."""
        self._collect_ended()
        self._processes.kill_late()
        try:
            view = self._look()
            if self._is_away:
                log.info("Redis is back")
                self._is_away = False
            return self._act(view)
        except RedisError as fault:
            if not self._is_away:
                log.warning("Redis is away, no model is changed meanwhile: %s", fault)
            self._is_away = True
            return LOOK_SECONDS

    def _look(self) -> View:
        held = {one.model: one.name for one in self._processes if not one.is_ending}
        if self._next is not None:
            held[self._next.model] = self._next_name
        self._record.refused = self._refused
        self._version = self._record.beat(held, self._words())
        view = self._watcher.look({one.name for one in self._processes})
        self._note_progress(view)
        self._heed_drain(view)
        self._idle_since = None if self._has_work(view) else self._idle_since or time.monotonic()
        self._view = view
        return view

    def _act(self, view: View) -> float:
        if self._next is not None:
            return self._go_on_changing()
        if view.is_suspended or view.is_drained or self._presence.is_drained():
            return LOOK_SECONDS
        now = time.monotonic()
        held = {one.model: _held(one) for one in self._processes}
        if any(one.is_ending for one in self._processes):
            return SHORT_SECONDS
        choice = choose(self._rules, held, self._open_queues(view), self._load_seconds, now)
        if choice is None:
            return LOOK_SECONDS
        name = self._processes.new_name(choice.model)
        claimed = {model: one.name for model in held if (one := self._processes.of(model))}
        claimed = {model: its for model, its in claimed.items() if model not in choice.ends}
        words = f"changing to {choice.model}" if choice.ends else f"loading {choice.model}"
        if not self._record.claim(self._version, {**claimed, choice.model: name}, words):
            return 0.0  # another host was faster: look what it has claimed
        self._next, self._next_name = choice, name
        log.info("%s, %s", words, _why(view.queues[choice.model]))
        for model in choice.ends:
            if (process := self._processes.of(model)) is not None:
                self._processes.end(process)
        return self._go_on_changing()

    def _go_on_changing(self) -> float:
        """Start the process of the claimed model, once those before it have ended."""
        assert self._next is not None
        if any(one.is_ending for one in self._processes):
            return SHORT_SECONDS
        model, self._next = self._next.model, None
        self.num_loads += 1
        try:
            self._processes.start(model, self._next_name, self._flags[model])
        except OSError as fault:  # too many processes, or too little memory for one more
            pause = self._setbacks.note_end(model, EXIT_ENGINE_DIED, time.monotonic())
            log.error("%s cannot be started: %s; again in %.0f s", model, fault, pause)
        return LOOK_SECONDS

    def _open_queues(self, view: View) -> dict[str, Queue]:
        """The queues of the models that may be loaded now, and of those that are held."""
        now = time.monotonic()
        found = {}
        for model, queue in view.queues.items():
            if self._setbacks.is_aside(model, now) and self._processes.of(model) is None:
                continue
            found[model] = Queue(is_asked=queue.is_asked) if self._is_barren(model) else queue
        return found

    def _is_barren(self, model: str) -> bool:
        return self._setbacks.is_barren(model, time.monotonic())

    # -- the processes

    def _note_progress(self, view: View) -> None:
        """Which processes are ready, and which have rows."""
        now = time.monotonic()
        for one in self._processes:
            info = view.workers.get(one.name)
            if info is None or one.is_ending:
                continue
            has_model = is_ready(info)
            if has_model and not one.is_ready:
                one.is_ready, one.idle_since = True, now
                self._setbacks.note_ready(one.model)
                self._load_seconds[one.model] = now - one.since
                one.since = now
                log.info("%s serves %s", one.name, one.model)
            is_busy = info.state == "busy" or info.is_resting
            # A pull and the record's state are two writes: once idle is not enough.
            one.is_busy, one.was_busy = is_busy or one.was_busy or not has_model, is_busy
            if is_busy:
                one.idle_since = None
                self._setbacks.note_work(one.model)
            elif has_model and one.idle_since is None:
                one.idle_since = now
            has_rows = view.queues[one.model].has_work
            if has_model and has_rows and one.idle_since is not None:
                self._setbacks.note_idle(one.model, now - one.idle_since, now)

    def _collect_ended(self) -> None:
        for model, (process, code) in self._processes.ended().items():
            self._drained.discard(process.name)
            if process.is_ending and code == 0:
                continue
            now = time.monotonic()
            pause = self._setbacks.note_end(model, code, now)
            if code == EXIT_MODEL_CHANGED:
                log.info("the files of %s have changed: it is loaded again", model)
            elif code == EXIT_CONFIGURATION:
                log.error("%s is refused, see above; it is tried again in %.0f s", model, pause)
            else:
                log.warning("%s ended with code %d; again in %.0f s", process.name, code, pause)
            if code not in (0, EXIT_CONFIGURATION):
                try:
                    reclaim_dead_of_home(self._connection)
                except RedisError as fault:
                    log.warning("its rows come back when their leases lapse: %s", fault)

    def _heed_drain(self, view: View) -> None:
        """Pass draining and resuming on to the processes."""
        is_drained = view.is_drained or self._presence.is_drained()
        for one in self._processes:
            if one.name not in view.workers or one.is_ending:
                continue
            if is_drained == (one.name in self._drained):
                continue
            try:
                (orders.drain if is_drained else orders.resume)(self._connection, one.name)
            except BatchkvError as fault:  # it has just ended
                log.debug("%s: %s", one.name, fault)
                continue
            self._drained ^= {one.name}
        self._is_drained = is_drained

    def _words(self) -> str:
        """The host's state for people."""
        if self.stop.is_asked:
            return "stopping"
        if self._next is not None:
            return f"changing to {self._next.model}"
        if self._is_drained:
            # Not ``Process.is_busy``: a drained worker counts as busy, so that its model stays.
            states = [
                info.state for name, info in self._view.workers.items() if name in self._drained
            ]
            return "draining" if "busy" in states else "drained"
        loading = [one.model for one in self._processes if not one.is_ready]
        if loading:
            return f"loading {loading[0]}"
        held = ", ".join(one.model for one in self._processes)
        words = f"holds {held}" if held else "holds no model"
        return f"{words}, failed to load {', '.join(self._refused)}" if self._refused else words

    @property
    def _refused(self) -> list[str]:
        """Models that could not be loaded, because their configuration is wrong."""
        return [model for model in self._plan.models if self._setbacks.is_refused(model)]

    # -- the end

    def _has_work(self, view: View) -> bool:
        if self._next is not None or any(not one.is_ready for one in self._processes):
            return True
        if any(one.is_busy for one in self._processes):
            return True
        return any(
            queue.has_work and not self._is_barren(model) and not self._setbacks.failure(model)
            for model, queue in view.queues.items()
        )

    def _is_over(self) -> tuple[bool, int]:
        """Whether to end by itself, and the exit code."""
        if not len(self._processes) and len(self._refused) == len(self._plan.models):
            log.error("no model of this worker can be served")
            return True, EXIT_CONFIGURATION
        if self._idle_since is None or self._is_away:
            return False, 0
        # Why rows may be left; the worst is a wrong configuration, which has the lowest code.
        code = min(filter(None, map(self._setbacks.failure, self._plan.models)), default=0)
        if self._plan.is_burst:
            return True, code
        most = self._plan.max_idle_seconds
        return most is not None and time.monotonic() - self._idle_since >= most, code

    def _leave(self) -> None:
        """End the processes as the stop asks for it: warm, at once, or because nobody waits."""
        with suppress(RedisError):
            self._record.beat({}, self._words())
        for one in self._processes:
            self._processes.end(one)
        while len(self._processes) and not self.stop.is_orphaned:
            self._collect_ended()
            self._processes.kill_late()
            if self.stop.is_cold:
                self._processes.hasten()
            self._awake.wait(SHORT_SECONDS)
            self._awake.clear()

    # Set by the first look.
    _version: str = "0"
    _view: View = View()
    _next_name: str = ""
    _is_drained: bool = False


def _held(one: Process) -> Held:
    return Held(one.since, is_ready=one.is_ready, is_busy=one.is_busy)


def _why(queue: Queue) -> str:
    """Why a model is loaded, for the log."""
    if queue.num_live:
        return "somebody waits for an answer"
    others = f", which {queue.num_holders} others serve" if queue.num_holders else ""
    return f"{queue.num_rows:,} rows wait{others}"

"""The main loop: between the queue and the engine, until it is asked to stop.

Each turn takes what the engine has to say, then does its business with Redis in one go: finish what
ended, stop what was canceled, look after the leases, fill up. While Redis is slow to answer (see
``beside``) or away only the first half runs, and what ended waits in a list.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from redis.exceptions import RedisError

from batchkv_producer.wire.transitions import Ending, Held
from batchkv_worker.engine.thread import EngineThread, LoadFailed, Notice, Ready
from batchkv_worker.errors import EXIT_ENGINE_DIED, EXIT_ENGINE_HUNG, EXIT_MODEL_CHANGED
from batchkv_worker.events import Completed, EngineDied, Recalled, Rejected
from batchkv_worker.queue.background import Beside
from batchkv_worker.queue.in_flight import Flights
from batchkv_worker.queue.intake import Intake, Limits
from batchkv_worker.queue.redis_side import FINISH_GROUP, RedisSide, is_outage
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.queue.timers import Outage, Timer, Watchdog
from batchkv_worker.queue.worker_record import Telling
from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.worker")

TURN_SECONDS = 1.0  # the longest wait of one turn
POLL_SECONDS = 1.0  # how often to look whether a lease was lost
OTHERS_SECONDS = 15.0  # by when after an outage every worker has noticed that Redis is back
MAINTENANCE_SECONDS = 0.5  # of cleaning in one turn; the rest comes with the next ones
LEAVE_SECONDS = 5.0  # how long to try to give jobs back when Redis is away


class Session:
    """All the mutable state of the main thread, in parts: flights, intake, clocks, lists."""

    def __init__(
        self,
        side: RedisSide,
        engine: EngineThread,
        flights: Flights,
        settings: WorkerSettings,
        stop: StopRequest,
        limits: Limits,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._side = side
        self._engine = engine
        self._flights = flights
        self._settings = settings
        self._stop = stop
        self._hard_exit = hard_exit
        self._endings: list[Ending] = []
        self._beside = Beside(engine.wake, lambda: self._tend_engine(TURN_SECONDS))
        self._intake = Intake(
            side, engine, flights, self._endings, limits, settings.rows_ahead, self._beside
        )
        self._telling = Telling(settings, engine, flights, self._publish)
        self._outage = Outage()
        self._watchdog = Watchdog(settings)
        self._poll_timer = Timer(min(POLL_SECONDS, settings.heartbeat_seconds))
        self._beat_timer = Timer(settings.heartbeat_seconds)
        self._maintenance_timer = Timer(settings.maintenance_seconds)
        self._canceled: list[tuple[str, bytes]] = []
        self._wanted_cancels: SimpleQueue[str] = SimpleQueue()
        self._is_ready = False
        self._is_suspended = True  # until the first look
        self._death: str | None = None
        self._last_turn = time.monotonic()
        self._busy_seconds = 0.0

    @property
    def num_taken(self) -> int:
        """How many jobs were pulled in all."""
        return self._intake.num_taken

    def request_cancel(self, job_id: str) -> None:
        """Stop a job if it is ours. Called from RQ's thread of commands."""
        self._wanted_cancels.put(job_id)
        self._engine.wake()

    def run(self) -> int:
        """Work until told to stop or out of work; the exit code. May raise WorkerError."""
        while not self._is_over():
            self._tend_engine(self._patience())
            self._outage.attempt(self._exchange)
        return self.leave()

    def leave(self) -> int:
        """Store what has ended and give back the rest; the exit code. Tries for a while."""
        self._tell_stop()
        self._engine.stop()
        self._watchdog.disarm()
        self._beside.close()
        in_haste = self._stop.is_cold or self._stop.is_orphaned or not self._endings
        patience = LEAVE_SECONDS if in_haste else float(self._settings.lease_seconds)
        deadline = time.monotonic() + patience
        while not self._try_to_leave(deadline):
            time.sleep(0.2)
        if self._death is None:
            is_asked = self._stop.is_asked
            return EXIT_MODEL_CHANGED if self._intake.is_outdated and not is_asked else 0
        log.critical("the engine died (%s); its jobs went back to the queue", self._death)
        return EXIT_ENGINE_DIED

    def _try_to_leave(self, deadline: float) -> bool:
        try:
            self._finish()
            self._cancel_in_redis()
            self._side.return_unanswered()
            waiting = self._flights.recalled + self._flights.backlog
            self._give_back(waiting, died=False)  # they had no part in a death
            self._give_back(self._flights.started, died=self._death is not None)
        except RedisError as fault:
            if is_outage(fault) and time.monotonic() < deadline:
                return False
            num_left = len(self._flights) + len(self._endings)
            log.error("%d jobs come back only when their leases lapse: %s", num_left, fault)
        return True

    def _give_back(self, held: list[Held], *, died: bool) -> None:
        if held:
            given = self._side.give_back(held, died=died)
            for lease in held:
                self._flights.drop(lease.job_id)
            log.info("gave %d jobs back to the queue", given)

    def _is_over(self) -> bool:
        if self._death is not None or self._stop.is_cold or self._stop.is_orphaned:
            return True
        is_empty = not (self._flights or self._endings or self._canceled)
        if self._stop.warm_since is not None:
            drained_for = time.monotonic() - self._stop.warm_since
            return is_empty or drained_for >= self._settings.drain_seconds
        return is_empty and self._intake.is_spent()

    # -- the engine's half of a turn ----------------------------------------------------------

    def _patience(self) -> float:
        """How long this turn may wait for the engine, in seconds."""
        now = time.monotonic()
        until = min(now + TURN_SECONDS, self._flights.next_deadline)
        if self._stop.warm_since is not None:
            until = min(until, self._stop.warm_since + self._settings.drain_seconds)
        if self._outage.is_on:
            return max(0.0, min(until, self._outage.retry_at) - now)
        flights = self._flights
        if self._endings or self._canceled or flights.untold or flights.recalled:
            return 0.0
        if self._intake.wants_jobs():
            until = min(until, self._intake.next_pull)
        timers = (self._poll_timer, self._beat_timer, self._maintenance_timer)
        return max(0.0, min(until, *(timer.at for timer in timers)) - now)

    def _tend_engine(self, patience_seconds: float) -> None:
        """All but Redis: hear what the engine says, and give it what it has room for."""
        self._hear(self._engine.notices(patience_seconds))
        self._telling.log_loading()
        self._tell_stop()
        self._cancel_wanted()
        self._expire()
        self._start_some()
        self._check_engine()

    def _hear(self, notices: list[Notice]) -> None:
        for notice in notices:
            match notice:
                case Completed() | Rejected():
                    if isinstance(notice, Completed):
                        self._telling.count(notice)
                    ending = self._flights.end(notice)
                    if ending is not None:
                        self._endings.append(ending)
                case Ready():
                    self._is_ready = True
                    self._side.maker = self._flights.maker = self._engine.maker
                    log.info("the engine is ready: up to %d jobs", self._engine.max_in_flight)
                case Recalled(job_ids):
                    self._flights.take_back(job_ids)
                case EngineDied(reason):
                    self._death = reason
                case LoadFailed(error):
                    raise error

    def _cancel_wanted(self) -> None:
        wanted = []
        try:
            while True:
                wanted.append(self._wanted_cancels.get_nowait())
        except Empty:
            rows = self._flights.cancel(wanted)
        for job_id, _ in rows:
            self._engine.cancel(job_id)
        self._canceled += rows

    def _expire(self) -> None:
        for ending in self._flights.expire(time.monotonic()):
            self._engine.cancel(ending.lease.job_id)
            self._endings.append(ending)

    def _start_some(self) -> None:
        if self._update_intake():
            self._intake.feed()

    def _update_intake(self) -> bool:
        """Whether jobs may be taken and started."""
        intake, is_well = self._intake, self._is_ready and self._death is None
        is_barred = self._is_suspended or self._intake.is_outdated or self._stop.is_asked
        intake.is_open = is_well and not is_barred
        return intake.is_open

    def _check_engine(self) -> None:
        if self._engine.has_ended:
            self._hear(self._engine.notices(0))  # its last words, if any
            self._death = self._death or "its thread ended"
        now = time.monotonic()
        if self._flights.num_started:
            self._busy_seconds += now - self._last_turn
        self._last_turn = now
        self._watchdog.arm()
        has_work = not self._is_ready or self._flights.num_started > 0
        if self._death is None and self._watchdog.is_hung(self._engine.num_steps, has_work):
            job_ids = [lease.job_id for lease in self._flights.started]
            self._watchdog.dump(self._engine.report(), job_ids)
            self._death = "it hung"
            self.leave()
            self._hard_exit(EXIT_ENGINE_HUNG)

    # -- Redis's half of a turn ---------------------------------------------------------------

    def _exchange(self) -> None:
        now = time.monotonic()
        if self._outage.seconds > self._settings.lease_seconds - self._settings.heartbeat_seconds:
            # Leases lapsed meanwhile, and their holders may be a moment behind us.
            self._maintenance_timer.at = max(self._maintenance_timer.at, now + OTHERS_SECONDS)
        self._finish()
        self._cancel_in_redis()
        self._intake.return_recalled()
        self._telling.look()
        if self._poll_timer.is_due(now):
            self._poll()
            self._poll_timer.restart(now)
        if self._beat_timer.is_due(now):
            self._beat()
            self._beat_timer.restart(now)
        if self._maintenance_timer.is_due(now):
            is_over = self._beside(partial(self._side.maintain, MAINTENANCE_SECONDS))
            if is_over:
                self._maintenance_timer.restart(now)
        if not self._update_intake():
            self._intake.close()
        if self._intake.wants_jobs() and time.monotonic() >= self._intake.next_pull:
            self._intake.refill()

    def _finish(self) -> None:
        """Store what has ended, and tell in the same call which rows have begun since."""
        while self._endings or self._flights.untold:
            group, begun = self._endings[:FINISH_GROUP], self._flights.untold[:FINISH_GROUP]
            verdicts = self._beside(partial(self._side.finish, group, begun))
            del self._endings[: len(group)]
            self._flights.note_told(begun)
            num_dropped = len(verdicts) - verdicts.count("ok")
            if num_dropped:
                log.info("%d results dropped: their jobs were taken over or ended", num_dropped)
            if not self._flights:
                self._intake.next_pull = 0.0

    def _cancel_in_redis(self) -> None:
        if self._canceled:
            self._side.cancel(self._canceled)
            self._canceled.clear()

    def _poll(self) -> None:
        poll = self._beside(partial(self._side.poll, self._flights.leases))
        self._forget(poll.lost)
        self._is_suspended = poll.is_suspended
        self._intake.look(poll)
        if poll.is_suspended and not self._flights:
            self._intake.suspend()

    def _beat(self) -> None:
        busy, self._busy_seconds = self._busy_seconds, 0.0
        try:
            fields = self._telling.fields()
            beat = partial(self._side.beat, self._flights.leases, busy, fields)
            self._forget(self._beside(beat))
        except RedisError:
            self._busy_seconds += busy
            raise

    def _tell_stop(self) -> None:
        if self._stop.is_asked and not self._stop.is_orphaned:
            self._telling.stop()

    def _publish(self, fields: dict[str, str]) -> None:
        self._beside(partial(self._side.publish, fields))

    def _forget(self, job_ids: list[str]) -> None:
        """Drop jobs that are no longer ours: canceled, deleted, or taken over."""
        for job_id in job_ids:
            if self._flights.drop(job_id):
                self._engine.cancel(job_id)
                log.info("dropped %s: canceled or taken over", job_id)

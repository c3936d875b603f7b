"""The main loop of a worker: between the queue and the engine, until it is asked to stop.

Each turn serves the engine first: it handles the engine's events and hands it rows. Then it makes
one exchange with Redis: store results, cancel rows, renew leases, pull jobs. While Redis is slow
(see ``background``) or away the engine is still served, and results are kept in a list.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from redis.exceptions import RedisError

from batchkv_producer.wire.transitions import ENOUGH_BYTES, JobLease
from batchkv_worker.engine.thread import EngineThread, LoadFailed, Notice, Ready
from batchkv_worker.errors import (
    EXIT_DEVICE_FAULT,
    EXIT_ENGINE_DIED,
    EXIT_ENGINE_HUNG,
    EXIT_MODEL_CHANGED,
)
from batchkv_worker.events import Completed, EngineDied, Recalled, Rejected, Serving
from batchkv_worker.queue.background import Background
from batchkv_worker.queue.job_puller import JobPuller, Limits
from batchkv_worker.queue.redis_side import FINISH_GROUP, RedisSide, is_outage
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.timers import RedisOutage, Timer
from batchkv_worker.queue.watchdog import Watchdog
from batchkv_worker.queue.worker_record import WorkerRecord
from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.worker")

TURN_SECONDS = 1.0  # the longest wait of one turn
POLL_SECONDS = 1.0  # how often to check whether a lease was lost
OTHERS_SECONDS = 15.0  # by when after an outage every worker has noticed that Redis is back
MAINTENANCE_SECONDS = 0.5  # of maintenance in one turn; the rest follows in later turns
LEAVE_SECONDS = 5.0  # how long to try to give jobs back when Redis is away

T = TypeVar("T")


class Session:
    """Runs the main thread. It shares ``state`` with the job puller."""

    def __init__(
        self,
        side: RedisSide,
        engine: EngineThread,
        state: WorkerState,
        settings: WorkerSettings,
        limits: Limits,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._side = side
        self._engine = engine
        self._state = state
        self._in_flight = state.in_flight
        self._stop = state.stop
        self._settings = settings
        self._hard_exit = hard_exit
        self._background = Background(engine.wake)
        queues = list(settings.queues)
        self._puller = JobPuller(side, engine, state, limits, self._serve_engine_until, queues)
        self._record = WorkerRecord(settings, engine, state, self._publish)
        self._outage = RedisOutage()
        self._watchdog = Watchdog(settings)
        self._poll_timer = Timer(min(POLL_SECONDS, settings.heartbeat_seconds))
        self._heartbeat_timer = Timer(settings.heartbeat_seconds)
        self._maintenance_timer = Timer(settings.maintenance_seconds)
        self._wanted_cancels: SimpleQueue[str] = SimpleQueue()
        self._unknown_cancels: list[str] = []  # of jobs that a pull may bring, which is under way
        self._is_asking = False  # Redis, in the background
        self._serving: Serving | None = None  # the engine has exchanged its adapter
        self._last_turn = time.monotonic()
        self._busy_seconds = 0.0

    @property
    def num_taken(self) -> int:
        """How many jobs were pulled in all."""
        return self._puller.num_taken

    def request_cancel(self, job_id: str) -> None:
        """Stop a job if this worker holds it. Called from RQ's thread of commands."""
        self._wanted_cancels.put(job_id)
        self._engine.wake()

    def run(self) -> int:
        """Work until asked to stop or out of work. Returns the exit code. May raise WorkerError."""
        while not self._is_over():
            self._serve_engine(self._wait_seconds())
            self._outage.attempt(self._exchange)
        return self.leave()

    def leave(self) -> int:
        """Store results and give back the other jobs; the exit code. Tries for a while."""
        self._report_stop()
        self._state.live.close()
        self._engine.stop()
        self._watchdog.disarm()
        self._background.close()
        in_haste = self._stop.is_cold or self._stop.is_orphaned or not self._state.results
        seconds = LEAVE_SECONDS if in_haste else float(self._settings.lease_seconds)
        deadline = time.monotonic() + seconds
        while not self._try_to_leave(deadline):
            time.sleep(0.2)
        fault = self._state.engine_fault
        if fault is None:
            is_asked = self._stop.is_asked
            return EXIT_MODEL_CHANGED if self._state.is_outdated and not is_asked else 0
        if self._state.is_device_fault:
            log.critical(
                "the device failed (%s); the jobs went back to the queue, and no death of theirs "
                "is counted. Ending with code %d, to be started again",
                *(fault, EXIT_DEVICE_FAULT),
            )
            return EXIT_DEVICE_FAULT
        log.critical("the engine died (%s); its jobs went back to the queue", fault)
        return EXIT_ENGINE_DIED

    def _try_to_leave(self, deadline: float) -> bool:
        has_died = self._state.engine_fault is not None and not self._state.is_device_fault
        try:
            self._finish()
            self._cancel_in_redis()
            self._side.return_unanswered()
            waiting = self._in_flight.recalled + self._in_flight.backlog
            self._give_back(waiting, died=False)  # the engine had not begun them
            self._give_back(self._in_flight.started, died=has_died)
            self._side.count_work(self._record.figures.name, self._record.figures.work)
        except RedisError as fault:
            if is_outage(fault) and time.monotonic() < deadline:
                return False
            num_left = len(self._in_flight) + len(self._state.results)
            log.error("%d jobs come back only when their leases lapse: %s", num_left, fault)
        return True

    def _give_back(self, leases: list[JobLease], *, died: bool) -> None:
        if leases:
            num_given = self._side.give_back(leases, died=died)
            for lease in leases:
                self._in_flight.drop(lease.job_id)
            log.info("gave %d jobs back to the queue", num_given)

    def _is_over(self) -> bool:
        if self._state.engine_fault is not None or self._stop.is_cold or self._stop.is_orphaned:
            return True
        is_empty = self._state.is_empty
        if self._stop.warm_since is not None:
            drained_for = time.monotonic() - self._stop.warm_since
            return is_empty or drained_for >= self._settings.drain_seconds
        return is_empty and self._puller.is_spent()

    # -- the engine's half of a turn ----------------------------------------------------------

    def _wait_seconds(self) -> float:
        """How long this turn may wait for the engine, in seconds."""
        now = time.monotonic()
        until = min(now + TURN_SECONDS, self._in_flight.next_deadline)
        if self._stop.warm_since is not None:
            until = min(until, self._stop.warm_since + self._settings.drain_seconds)
        if self._outage.is_on:
            return max(0.0, min(until, self._outage.retry_at) - now)
        state, in_flight = self._state, self._in_flight
        if state.may_switch or self._serving is not None:
            return 0.0
        if state.results or state.canceled or in_flight.unreported or in_flight.recalled:
            return 0.0
        timers = (self._poll_timer, self._heartbeat_timer, self._maintenance_timer)
        until = min(until, self._puller.pull_at(), *(timer.at for timer in timers))
        return max(0.0, until - now)

    def _serve_engine(self, wait_seconds: float) -> None:
        """Handle the engine's events, and give it the rows that it has room for. No Redis."""
        self._handle(self._engine.notices(wait_seconds))
        self._record.log_loading()
        self._report_stop()
        self._cancel_wanted()
        self._heed_pause()
        for job_id in self._state.expire(time.monotonic()):
            self._engine.cancel(job_id)
        if self._state.may_start:
            self._puller.feed()
        self._check_engine()

    def _serve_engine_until(self, call: Callable[[], T]) -> T:
        """Run a call of Redis in the background, and serve the engine until it has answered."""
        self._is_asking = True
        try:
            return self._background.run(call, meanwhile=partial(self._serve_engine, TURN_SECONDS))
        finally:
            self._is_asking = False

    def _handle(self, notices: list[Notice]) -> None:
        for notice in notices:
            match notice:
                case Completed() | Rejected():
                    if isinstance(notice, Completed):
                        self._record.count(notice)
                        self._puller.pacing.meter.add_answer(notice.usage.completion)
                    self._state.end(notice)
                case Ready():
                    self._state.is_ready = True
                    self._side.maker = self._in_flight.maker = self._engine.maker
                    log.info(
                        "the engine is ready: up to %d rows at once, those that wait included",
                        self._engine.max_in_flight,
                    )
                case Serving():
                    self._serving = notice
                case Recalled(job_ids):
                    self._in_flight.recall(job_ids)
                case EngineDied(reason, is_device_fault):
                    self._state.engine_fault = reason
                    self._state.is_device_fault = is_device_fault
                case LoadFailed(error):
                    raise error

    def _cancel_wanted(self) -> None:
        """End rows that were stopped, if they are held.

        Redis knows of a pull before its answer is here, so a row may be stopped that is not held
        yet. While Redis is asked for anything, such a stop is kept.
        """
        wanted, self._unknown_cancels = self._unknown_cancels, []
        with suppress(Empty):
            while True:
                wanted.append(self._wanted_cancels.get_nowait())
        held = self._state.cancel(wanted)
        for job_id in held:
            self._engine.cancel(job_id)
        if self._is_asking:
            self._unknown_cancels = [job_id for job_id in wanted if job_id not in held]

    def _heed_pause(self) -> None:
        """Begin or end a pause. It begins with a recall of rows that only wait in the engine."""
        started = self._in_flight.started
        if self._state.pause.look(len(started)):
            job_ids = [lease.job_id for lease in started]
            self._engine.recall(job_ids, self._in_flight.num_started)
        self._record.paused = self._state.pause.text

    def _heed_drain(self, *, is_asked: bool) -> None:
        """Begin or end draining. It begins with a recall of rows that only wait in the engine."""
        started, state = self._in_flight.started, self._state
        was_on, num_rows = state.drain.is_on, len(started) + state.live.num_rows
        if state.drain.look(is_asked=is_asked, num_rows=num_rows):
            job_ids = [lease.job_id for lease in started]
            self._engine.recall(job_ids, self._in_flight.num_started)
        elif was_on and not is_asked:
            self._puller.pull_now()
        self._record.draining = state.drain.text

    def _check_engine(self) -> None:
        state = self._state
        if self._engine.has_ended:
            self._handle(self._engine.notices(0))  # its last events, if any
            state.engine_fault = state.engine_fault or "its thread ended"
        now = time.monotonic()
        if self._in_flight.num_started:
            self._busy_seconds += now - self._last_turn
        self._last_turn = now
        self._watchdog.arm()
        has_work = not state.is_ready or self._in_flight.num_started + state.live.num_rows > 0
        progress = self._engine.num_steps, has_work, self._engine.held_up
        if state.engine_fault is None and self._watchdog.is_hung(*progress):
            job_ids = [lease.job_id for lease in self._in_flight.started]
            self._watchdog.dump(self._engine.report(), job_ids)
            state.engine_fault = "it hung"
            self.leave()
            self._hard_exit(EXIT_ENGINE_HUNG)

    # -- Redis's half of a turn ---------------------------------------------------------------

    def _exchange(self) -> None:
        now = time.monotonic()
        if self._serving is not None:
            self._begin_queue(self._serving.adapter)
        if self._outage.seconds > self._settings.lease_seconds - self._settings.heartbeat_seconds:
            # Leases lapsed in the outage. Their holders may notice its end a moment later.
            self._maintenance_timer.at = max(self._maintenance_timer.at, now + OTHERS_SECONDS)
        self._finish()
        self._cancel_in_redis()
        self._puller.giving.return_recalled()
        self._switch_queue()
        self._record.update()
        if self._poll_timer.is_due(now):
            self._poll()
            self._poll_timer.restart(now)
        if self._heartbeat_timer.is_due(now):
            self._renew_leases()
            self._heartbeat_timer.restart(now)
        if self._maintenance_timer.is_due(now):
            maintain = partial(self._side.maintain, MAINTENANCE_SECONDS)
            if self._serve_engine_until(maintain):
                self._maintenance_timer.restart(now)
        if not self._state.may_start:
            self._puller.close()
        if self._state.pause.is_grace_over:
            self._puller.giving.return_started()
        if time.monotonic() >= self._puller.pull_at():
            self._puller.refill()
        self._poll_timer.hasten(time.monotonic() + self._puller.pacing.poll_seconds())

    def _finish(self) -> None:
        """Store results. The same call reports which other jobs have begun since the last one."""
        while self._state.results or self._in_flight.unreported:
            group = self._state.next_results(FINISH_GROUP, ENOUGH_BYTES)
            begun = self._in_flight.unreported[:FINISH_GROUP]
            verdicts = self._serve_engine_until(partial(self._side.finish, group, begun))
            self._state.note_stored(len(group))
            self._in_flight.note_reported(begun)
            num_dropped = len(verdicts) - verdicts.count("ok")
            if num_dropped:
                log.info("%d results dropped: their jobs were taken over or ended", num_dropped)
            if not self._in_flight:
                self._puller.pull_now()

    def _begin_queue(self, adapter: str) -> None:
        """The engine has exchanged its adapter: all calls of Redis are about its queue now."""
        self._serving = None
        self._count_work()
        self._side.maker = self._in_flight.maker = self._engine.maker
        self._in_flight.model = self._settings.served_name(adapter)
        self._puller.switch()
        self._state.is_ready = True
        self._state.live.serve(self._in_flight.model)

    def _switch_queue(self) -> None:
        """Have the engine serve the next queue, once nothing of the former one is held."""
        if not self._state.may_switch:
            return
        self._side.return_unanswered()
        self._puller.look_at_queues()  # its jobs may be gone by now
        if self._state.may_switch and self._state.live.hold():
            self._state.is_ready = False
            self._engine.serve(self._settings.queues[self._state.next_queue])

    def _cancel_in_redis(self) -> None:
        if rows := self._state.canceled[:]:
            self._side.cancel(rows)
            self._state.note_canceled(len(rows))

    def _poll(self) -> None:
        self._puller.pacing.look()
        pace = self._puller.pacing.pace(is_away=self._puller.is_away).encode()
        poll = self._serve_engine_until(partial(self._side.poll, self._in_flight.leases, pace))
        self._drop(poll.lost)
        self._state.is_suspended = poll.is_suspended
        self._puller.note_poll(poll)
        self._heed_drain(is_asked=poll.is_drained)
        self._puller.look_at_queues()
        if self._state.is_resting and not self._in_flight:
            self._puller.pause()
        elif poll.is_suspended and not self._in_flight:
            self._puller.suspend()

    def _renew_leases(self) -> None:
        busy, self._busy_seconds = self._busy_seconds, 0.0
        try:
            fields = self._record.fields()
            beat = partial(self._side.beat, self._in_flight.leases, busy, fields)
            self._drop(self._serve_engine_until(beat))
        except RedisError:
            self._busy_seconds += busy
            raise
        self._count_work()

    def _count_work(self) -> None:
        """Add the work so far to the totals of the queue that the engine serves."""
        figures = self._record.figures
        self._serve_engine_until(partial(self._side.count_work, figures.name, figures.work))

    def _report_stop(self) -> None:
        if self._stop.is_asked and not self._stop.is_orphaned:
            self._record.stop()

    def _publish(self, fields: dict[str, str]) -> None:
        self._serve_engine_until(partial(self._side.publish, fields))

    def _drop(self, job_ids: list[str]) -> None:
        """Drop jobs that this worker has lost: canceled, deleted, or taken over."""
        for job_id in job_ids:
            if self._in_flight.drop(job_id):
                self._engine.cancel(job_id)
                self._record.figures.num_lost += 1
                log.info("dropped %s: canceled or taken over", job_id)

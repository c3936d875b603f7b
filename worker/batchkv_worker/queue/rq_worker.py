"""``BatchWorker``: RQ's worker from the outside, a batch session inside.

RQ's keys, command line, registration, commands and states are kept, so that ``rq worker``,
``rq info`` and the dashboards work. Its way of running a job is not: nothing forks, no alarm is
set, no job is unpickled, imported or called, and every move of a job is one script
(``batchkv_producer.wire.transitions``).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import worker_registration
from rq.command import parse_payload
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import setup_loghandlers
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker

from batchkv_producer.errors import BatchkvError
from batchkv_producer.local.awake import Awake, kept_awake
from batchkv_producer.local.power import is_on_battery
from batchkv_producer.local.presence import Presence, reclaim_dead_of_home
from batchkv_producer.local.worker_checks import check_model_folder
from batchkv_producer.wire.live import LiveMoves
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.errors import SettingsError, WorkerError
from batchkv_worker.events import EngineLike
from batchkv_worker.model.adapter_files import read_all
from batchkv_worker.queue.abilities import log_missing, own_abilities
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.job_puller import Limits
from batchkv_worker.queue.live import LiveLane
from batchkv_worker.queue.pause import Pause, PowerWatch
from batchkv_worker.queue.redis_side import RedisSide, is_outage
from batchkv_worker.queue.session import Session
from batchkv_worker.queue.startup import (
    check_name,
    check_queue,
    default_name,
    exit_code_of,
    exit_with,
    refuse_options,
    refuse_scheduler,
    spell_out_logs,
    start_trace,
)
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.queue.worker_record import constant_fields
from batchkv_worker.settings import WorkerSettings, unknown_variables
from batchkv_worker.trace import close_trace

# A full server refuses this command, too. What comes after it says that.
warnings.filterwarnings("ignore", "CLIENT SETNAME command not supported")

SOCKET_TIMEOUT_SECONDS = 10
ENGINE_STOP_SECONDS = 5.0


def build_engine(settings: WorkerSettings) -> EngineLike:
    """The real engine. Called on the engine's thread: only there may MLX be imported."""
    from batchkv_worker.engine.factory import build_worker_engine as build

    return build(settings)


class BatchWorker(BaseWorker):  # type: ignore[misc]  # RQ is not checked
    """Serves the queue of one model: ``rq worker -w batchkv_worker.BatchWorker``.

    With adapters it serves the queue of each, too.

    Settings come from the environment unless given. A fault of configuration is one line on
    standard error and ``SystemExit(2)``: RQ's command line would turn any other exception into a
    traceback and exit code 1.
    """

    engine_factory: ClassVar[Callable[[WorkerSettings], EngineLike]] = staticmethod(build_engine)
    platform: ClassVar[str] = sys.platform  # decides how to stay awake and what power there is
    connection_timeout = SOCKET_TIMEOUT_SECONDS

    def __init__(
        self,
        queues: Sequence[Any],
        name: str | None = None,
        *,
        settings: WorkerSettings | None = None,
        prepare_for_work: bool = True,
        serializer: object = None,  # the default of RQ's command line is pickle
        **options: Any,
    ) -> None:
        names = [getattr(queue, "name", queue) for queue in queues]
        connection = options.pop("connection", None) or getattr(queues[0], "connection", None)
        if prepare_for_work:
            try:
                settings = settings or WorkerSettings.from_env(os.environ)
                check_model_folder(settings.model)
                read_all(settings.adapters)  # a faulty folder is refused before anything is loaded
                check_queue(settings, names)
                check_name(name)
                refuse_options(options)
            except BatchkvError as fault:
                exit_with(fault)
            name = name or default_name()
        super().__init__(
            names,
            name,
            connection=connection,
            prepare_for_work=prepare_for_work,
            serializer=JSONSerializer,
            **options,
        )
        self.settings = settings
        self._session: Session | None = None
        self._stop: StopRequest | None = None
        self._lane: LiveLane | None = None

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: object = None,  # there is one queue: every strategy is the same
        exit_with_parent: bool = False,
    ) -> bool:
        """Work until asked to stop. Returns whether a job was taken. Faults raise SystemExit."""
        assert self.settings is not None, "made with prepare_for_work=False: only for looking"
        settings, factory = self.settings, type(self).engine_factory
        engine = EngineThread(lambda: factory(settings))
        self._stop = StopRequest(engine.wake)
        if exit_with_parent:
            self._stop.watch_parent()
        try:
            refuse_scheduler(with_scheduler)
            start_trace(settings, self.name)
            setup_loghandlers(logging_level or "INFO", date_format, log_format, name="batchkv")
            self.bootstrap(logging_level, date_format, log_format)
            spell_out_logs(date_format, log_format)
        except WorkerError as fault:
            exit_with(fault)
        for warning in unknown_variables(os.environ):
            self.log.warning(warning)
        log_missing()
        limits = Limits(burst, max_jobs, max_idle_time)
        first, *more = (queue.name for queue in self.queues)
        presence = Presence(self.connection, self.name, first, settings.heartbeat_seconds, more)
        side = self._redis_side(settings, presence)
        with (
            self._signal_handlers(),
            kept_awake(self.platform) as awake,
            self._pause(settings, engine, awake) as pause,
        ):
            state = WorkerState(InFlight(settings.model, self.name), self._stop, pause)
            state.live = self._lane = self._live_lane(settings, engine, state)
            session = self._session = Session(side, engine, state, settings, limits)
            code = 0
            try:
                self._lane.start()
                engine.start()
                code = self._run(session)
            finally:
                self.teardown()
                presence.remove()
                self._end_engine(engine, code)
        if code:
            raise SystemExit(code)
        return session.num_taken > 0

    @contextmanager
    def _pause(
        self, settings: WorkerSettings, engine: EngineThread, awake: Awake
    ) -> Iterator[Pause]:
        """Inside, the power source is watched if the worker is to be polite."""
        if not settings.polite:
            yield Pause()
            return
        watch = PowerWatch(partial(is_on_battery, self.platform), engine.wake)
        watch.start()
        try:
            yield Pause(watch, awake)
        finally:
            watch.stop()

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Inside the block, RQ's signal handlers are set; then the former ones again."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._install_signal_handlers()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, session: Session) -> int:
        try:
            return session.run()
        except WorkerError as fault:
            session.leave()
            exit_with(fault)
        except BaseException:
            session.leave()
            raise

    def _end_engine(self, engine: EngineThread, code: int) -> None:
        """Let the engine's threads end, because native code must not run when the interpreter ends.

        Otherwise end the process at once, with the code of the error that is raised, or this one.
        Nobody else reports that error then.
        """
        engine.stop()
        is_over = engine.join(ENGINE_STOP_SECONDS)
        close_trace()
        if is_over:
            return
        self.log.warning("the engine is still in a step or a long prompt; leaving without it")
        error = sys.exception()
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if error is None else exit_code_of(error))

    def _redis_side(self, settings: WorkerSettings, presence: Presence) -> RedisSide:
        return RedisSide(
            self.connection,
            self.queues[0].name,
            self.name,
            settings,
            register=self._register_again,
            set_state=self.set_state,
            look_around=presence.reclaim_dead,
            look_for_ended=presence.reclaim_ended,
            is_drained_here=presence.is_drained,
        )

    def _live_lane(
        self, settings: WorkerSettings, engine: EngineThread, state: WorkerState
    ) -> LiveLane:
        rows = InFlight(settings.model, self.name)
        state.live_counts = rows.counts
        return LiveLane(
            LiveMoves(self.connection),
            *(self.queues[0].name, self.name, engine, rows),
            most=lambda: state.most_live(engine.num_slots),
            abilities=own_abilities(),
        )

    def _register_again(self) -> None:
        """Write the worker's record again: the server lost it, or it expired in an outage."""
        self.log.warning("Worker %s: registering again", self.name)
        with self.connection.pipeline() as pipeline:
            self.last_heartbeat = now()
            pipeline.hset(self.key, mapping=self.serialize())
            worker_registration.register(self, pipeline)
            pipeline.expire(self.key, self.worker_ttl + 60)
            pipeline.execute()

    # -- what RQ calls ------------------------------------------------------------------------

    def _set_connection(self, connection: Redis) -> Redis:
        """No call hangs for minutes or is silently repeated: the session waits instead."""
        pool = connection.connection_pool
        pool.connection_kwargs.update(
            socket_timeout=SOCKET_TIMEOUT_SECONDS, health_check_interval=30
        )
        connection.set_retry(Retry(NoBackoff(), 0))
        return connection

    def register_birth(self) -> None:
        """RQ's registration; SettingsError if another running worker has this name.

        The name of one that died on this machine is free at once, because its death is certain.
        """
        try:
            try:
                super().register_birth()
            except ValueError:
                reclaim_dead_of_home(self.connection)
                super().register_birth()
        except ValueError as fault:
            message = f"--name {self.name}: a worker of that name is running, or died a minute ago"
            raise SettingsError(message) from fault

    def serialize(self) -> dict[str, Any]:
        """RQ's fields of the record, and ours that never change: both come in one write.

        A record without abilities would look like that of an older version. The first heartbeat
        adds the other fields.
        """
        return {**super().serialize(), **constant_fields()}

    def request_stop(self, signum: int, frame: object) -> None:
        """SIGINT, SIGTERM: only a flag."""
        if self._stop is not None:
            self._stop.on_signal()

    request_force_stop = request_stop

    def handle_payload(self, message: dict[Any, Any]) -> None:
        """Commands: stop-job for any job in flight, shutdown, live. On RQ's pubsub thread."""
        try:
            payload = dict(parse_payload(message))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
            self.log.warning("Worker %s: command that cannot be read: %r", self.name, fault)
            return
        command, job_id = payload.get("command"), payload.get("job_id")
        if command == "stop-job" and isinstance(job_id, str) and self._session is not None:
            self._session.request_cancel(job_id)
        elif command == "live" and self._lane is not None:
            self._lane.wake()
        elif command == "shutdown" and self._stop is not None:
            self._stop.on_signal()
        else:
            self.log.info("Worker %s: command %r does nothing here", self.name, command)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        if isinstance(exc, RedisError) and is_outage(exc):
            exc = RedisConnectionError(str(exc))  # of any other error RQ's thread ends for good
        super()._pubsub_exception_handler(exc, pubsub, pubsub_thread)

    def unsubscribe(self) -> None:
        """As RQ does, but the thread is stopped first, so that this does not take a second."""
        if self.pubsub_thread is not None and self.pubsub is not None:
            self.pubsub_thread.stop()
            self.pubsub.unsubscribe()
            self.pubsub_thread.join(timeout=1)
            self.pubsub.close()

    def teardown(self) -> None:
        """Remove the worker's record. A server that is away does not delay the end."""
        try:
            super().teardown()
        except RedisError as fault:
            self.log.warning("Worker %s: could not sign off: %s", self.name, fault)

    def _start_scheduler(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("batchkv schedules nothing")

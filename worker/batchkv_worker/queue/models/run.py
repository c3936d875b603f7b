"""Runs a host as a process: log, signals, and its record file on this machine."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import setup_loghandlers

from batchkv_producer.local.awake import kept_awake
from batchkv_producer.server import connection
from batchkv_worker.queue.models.host import Host
from batchkv_worker.queue.models.start import Asked, make_plan, words_of
from batchkv_worker.queue.startup import check_name, spell_out_logs
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.settings import WorkerSettings, unknown_variables

log = logging.getLogger("batchkv.worker")


def run_host(asked: Asked, settings: WorkerSettings, *, exit_with_parent: bool = False) -> int:
    """Serve several models until asked to stop; the exit code.

    Raises WorkerError for settings that cannot be, ServerError if there is no server.
    """
    check_name(asked.name)
    level = "DEBUG" if asked.is_verbose else "WARNING" if asked.is_quiet else "INFO"
    begin_log(level)
    for warning in unknown_variables(os.environ):
        log.warning(warning)
    redis = connection.connect(asked.url, warn=log.warning)
    plan = make_plan(asked, settings)
    log.info("worker %s; %s", asked.name, words_of(plan.groups))
    host = Host(redis, plan)
    if exit_with_parent:
        host.stop.watch_parent()
    with heeded_signals(host.stop), kept_awake():
        return host.run()


def begin_log(level: str) -> None:
    """Log as RQ's workers do."""
    date_format, log_format = DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
    setup_loghandlers(level, date_format, log_format, name="batchkv")
    spell_out_logs(date_format, log_format)


@contextmanager
def heeded_signals(stop: StopRequest) -> Iterator[None]:
    """Inside, signals ask for a stop; then the former handlers are set again."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

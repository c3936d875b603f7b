"""Checks at a worker's start: its name, its queue, RQ's flags. Faults are printed as one line."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rq.defaults import DEFAULT_RESULT_TTL
from rq.logutils import ColorizingStreamHandler

from batchkv_producer.errors import BatchkvError
from batchkv_producer.progress import printable
from batchkv_worker import trace
from batchkv_worker.errors import QueueMismatchError, SettingsError
from batchkv_worker.settings import WorkerSettings


def default_name() -> str:
    """Host and a random suffix. After a crash the old name is in use until it expires."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname()).strip("-.") or "worker"
    return f"{host.removesuffix('.local')[:40]}-{secrets.token_hex(4)}"


def exit_with(fault: BatchkvError) -> NoReturn:
    """One line for people, and the fault's exit code."""
    sys.stderr.write(f"batchkv: {printable(' '.join(str(fault).split()))}\n")
    raise SystemExit(fault.exit_code) from fault


def exit_code_of(error: BaseException) -> int:
    """The code with which an interpreter ends that this error has reached."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if type(error.code) is int else int(error.code is not None)


def start_trace(settings: WorkerSettings, name: str) -> None:
    """Begin the trace, if one is wanted; SettingsError when its file cannot be written."""
    if settings.trace is None:
        return
    try:
        trace.open_trace(settings.trace, f"{name}: {settings.model}")
    except OSError as fault:
        problem = fault.strerror or fault
        raise SettingsError(f"--trace {settings.trace}: it cannot be written: {problem}") from fault
    trace.MAIN.enter(trace.START)


def check_name(name: str | None) -> None:
    """Refuse control characters in a worker's name, since RQ prints it as it is."""
    if name is not None and not name.isprintable():
        raise SettingsError("--name: it has a character that cannot be printed")


class SpelledOut(logging.Formatter):
    """Log lines whose control characters are spelled out."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def spell_out_logs(date_format: str, log_format: str) -> None:
    """Let all log handlers spell control characters out."""
    for name in ("batchkv", "rq.worker"):
        handlers = logging.getLogger(name).handlers
        for handler in (each for each in handlers if isinstance(each, ColorizingStreamHandler)):
            handler.setFormatter(SpelledOut(log_format, date_format))


def check_queue(settings: WorkerSettings, names: Sequence[str]) -> None:
    """Raise QueueMismatchError unless these are the queues of the model and its adapters."""
    expected = list(settings.queues)
    if list(names) != expected:
        asked = ", ".join(repr(name) for name in names) or "none"
        what = "queue" if len(expected) == 1 else "queues"
        raise QueueMismatchError(
            f"model {settings.model!r} has the {what} {', '.join(map(repr, expected))}, but the "
            f"worker should serve {asked}"
        )


def refuse_options(options: dict[str, Any]) -> None:
    """Refuse RQ's flags that would do nothing here."""
    if options.get("exception_handlers") or options.get("disable_default_exception_handler"):
        raise SettingsError("--exception-handler: no exception of a job ever reaches RQ here")
    if options.get("default_result_ttl", DEFAULT_RESULT_TTL) != DEFAULT_RESULT_TTL:
        raise SettingsError("--results-ttl: results belong to their batch and do not expire by job")


def refuse_scheduler(is_wanted: bool) -> None:
    """Refuse RQ's scheduler: it is a forked process, and batchkv schedules nothing."""
    if is_wanted:
        raise SettingsError("--with-scheduler: batchkv schedules nothing, and RQ's would fork")

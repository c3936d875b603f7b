"""The checks that need MLX or the tiers of the cache: made by a process of their own.

MLX may crash or hang where its build does not fit the machine. So what needs it runs in another
process, which writes a line of JSON when a check begins and one when it ends. A check that began
and did not end is named when the process is gone.

The entry-point group ``batchkv.doctor`` names the module to run. A machine without the worker's
packages has none of these checks. What the process needs to know comes on its standard input, for
it may hold passwords.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import IO, Any

from batchkv_producer.doctor.contract import Finding, Level, Verdict, fail, warn

GROUP = "batchkv.doctor"
MAX_LINE_CHARS = 20_000
NUM_ERROR_LINES = 3
JOIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """``seconds`` bound the whole process; ``values`` are read by the module.

    ``may_be_late``: the bound is tight, so that a busy machine may pass it without a fault.
    """

    seconds: float
    values: Mapping[str, Any]
    may_be_late: bool = False


def module_of(name: str) -> str | None:
    """The module behind an entry point of the group."""
    return next((each.module for each in entry_points(group=GROUP, name=name)), None)


def run_part(
    module: str, request: Request, environ: Mapping[str, str], command: list[str] | None = None
) -> Iterator[Finding]:
    """The findings of the module, as it makes them. The process is gone afterwards."""
    process = subprocess.Popen(
        command or [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environ),
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts ends with it
    )
    assert process.stdin is not None
    asked = process.stdin  # stays open, so that the process can tell when doctor is gone
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    threads = [
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=_read_errors, args=(process.stderr, errors), daemon=True),
    ]
    for thread in threads:
        thread.start()

    def all_errors() -> list[str]:
        """The last lines of errors, once the process has ended."""
        threads[1].join(JOIN_SECONDS)
        return errors

    try:
        with suppress(BrokenPipeError):
            asked.write(f"{json.dumps(dict(request.values))}\n")
            asked.flush()
        deadline = time.monotonic() + request.seconds
        late = warn if request.may_be_late else fail
        yield from _findings(process, lines, all_errors, deadline, late)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(BrokenPipeError):
            asked.close()
        for thread, stream in zip(threads, (process.stdout, process.stderr), strict=True):
            thread.join(JOIN_SECONDS)
            if stream is not None and not thread.is_alive():
                stream.close()


def _findings(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    errors: Callable[[], list[str]],
    deadline: float,
    late: Callable[[str, str], Verdict],
) -> Iterator[Finding]:
    """Until the process ends or the deadline comes."""
    began = ""
    while True:
        try:
            line = lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            yield Finding(
                began or "start",
                late(
                    "this did not end in time, and was given up",
                    "run it again when the machine is quiet: the first run also compiles a GPU's "
                    "kernels; if it stays so, report it",
                ),
            )
            return
        if line is None:
            break
        values = _parsed(line)
        if "begin" in values:
            began = str(values["begin"])
        elif finding := _finding(values):
            began = ""
            yield finding
    code = process.wait()
    if began or code:
        yield Finding(began or "start", _died(code, errors()))


def _died(code: int, errors: list[str]) -> Verdict:
    name = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
    last = " | ".join(errors[-NUM_ERROR_LINES:])
    return fail(
        f"the process that made this check died ({name}){f': {last}' if last else ''}",
        "run `make venv`, which installs the tested MLX; if it stays so, report it",
    )


def _parsed(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # somebody else's output
        return {}
    return values if isinstance(values, dict) else {}


def _finding(values: Mapping[str, Any]) -> Finding | None:
    try:
        verdict = Verdict(Level(values["level"]), str(values["found"]), str(values["todo"]))
        return Finding(str(values["name"]), verdict, float(values["seconds"]))
    except (KeyError, ValueError, TypeError):
        return None


def _read_lines(stream: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    with suppress(ValueError, OSError):  # closed meanwhile
        for line in stream or ():
            lines.put(line[:MAX_LINE_CHARS])
    lines.put(None)


def _read_errors(stream: IO[str] | None, errors: list[str]) -> None:
    with suppress(ValueError, OSError):
        for line in stream or ():
            if line.strip():
                errors.append(line.strip()[:300])
                del errors[:-NUM_ERROR_LINES]

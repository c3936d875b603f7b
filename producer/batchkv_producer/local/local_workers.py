"""The workers of ``batchkv run``: processes on this machine that end with the run.

A worker's standard input is a pipe whose other end only the run holds. When the run ends, however
it ends, the pipe closes and the worker ends too. The worker gets the Redis URL through its
environment, because everybody can read a command line.

When a worker dies, no row is lost: its jobs go back to the queue at once, and the run starts
another worker. Exit codes of a worker: 0 normal, 2 wrong configuration, 70 the engine died, 71 the
engine hung, 72 the model's files have changed, 74 the GPU failed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from batchkv_producer.errors import BatchkvError, UsageError
from batchkv_producer.local import presence
from batchkv_producer.progress import rows
from batchkv_producer.server import connection
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.wire.suspects import deaths_until_failed

# -P: a file called redis.py in the current folder must not be imported.
WORKER_COMMAND = (sys.executable, "-P", "-m", "batchkv_producer", "worker")
EXIT_CONFIGURATION = 2
READY_WORDS = b"the engine is ready"  # in a worker's log, when it begins to take rows
EXIT_MODEL_CHANGED = 72  # the next worker loads the new files
EXIT_DEVICE_FAULT = 74  # the GPU failed twice in a minute or at start, for no reason of the rows
EXIT_REASONS = {70: "its engine died", 71: "its engine hung"}
# No row can be the reason of these.
ORDERLY_EXITS = (0, EXIT_CONFIGURATION, EXIT_MODEL_CHANGED, EXIT_DEVICE_FAULT)
DEVICE_ADVICE = (
    "On a Mac, let the display sleep, or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 before you start "
    "the run"
)

MAX_IDLE_DEATHS = 3  # consecutive deaths without any row: the worker cannot start
# A row that kills every worker must be failed before the run gives up, or such a row would end
# every run. No engine holds more rows than 8,192: slots and prefetch end at 4,096 each.
MAX_BUSY_DEATHS = deaths_until_failed(8192) + 1
MAX_DEVICE_FAULTS = 5  # consecutive ends of a worker because the GPU failed
DEVICE_PAUSE_SECONDS = 5.0  # before the first restart after one; doubled with each
RESTART_SECONDS = 1.0  # doubled with each consecutive death
MAX_RESTART_SECONDS = 16.0
MAX_BUSY_RESTART_SECONDS = 4.0  # shorter, because the suspects wait for a worker
WARM_STOP_SECONDS = 45.0  # a worker finishes rows for 30 seconds and then gives back the rest
COLD_STOP_SECONDS = 4.0
ABANDON_SECONDS = 1.0  # while the server is away, a worker can give nothing back
LOG_TTL_SECONDS = 7 * 86400

Reclaim = Callable[[str, bool], int]
Note = Callable[[str], None]


class RefusedWorkerError(UsageError):
    """A worker refused its model or its settings; its log's last line is the message."""


class WorkerError(BatchkvError):
    """The workers keep dying, so the run gives up. The batch stays queued."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The number of workers and how to start them. Their names begin with ``name_prefix``.

    ``trace``: the trace file of the first worker. Others write to numbered files in its folder.
    ``variables`` (name, value) override those of this process.
    """

    model: str
    url: str
    logs: Path
    name_prefix: str
    num_workers: int = 1
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = WORKER_COMMAND
    trace: Path | None = None
    variables: tuple[tuple[str, str], ...] = ()

    def trace_of(self, number: int) -> Path | None:
        """The trace file of worker process ``number``: FILE for 1, then FILE-2, FILE-3."""
        if self.trace is None or number == 1:
            return self.trace
        return self.trace.with_name(f"{self.trace.stem}-{number}{self.trace.suffix}")


class _Slot:
    """The place of one worker. When its process ends, another one takes the place."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = ""
        self.log = Path()
        self.process: subprocess.Popen[bytes] | None = None
        self.num_idle_deaths = 0  # these are consecutive, while no row of the batch has ended
        self.num_busy_deaths = 0
        self.num_device_faults = 0
        self.restart_at = 0.0
        self.reloaded_at = -RESTART_SECONDS  # the last restart because the model's files changed

    @property
    def is_given_up(self) -> bool:
        has_died = self.num_idle_deaths >= MAX_IDLE_DEATHS
        has_died |= self.num_busy_deaths >= MAX_BUSY_DEATHS
        return has_died or self.num_device_faults >= MAX_DEVICE_FAULTS


class LocalWorkers:
    """Starts workers, starts them again when they die, and stops them. For one thread.

    ``reclaim`` puts the jobs of an ended worker back into the queue and returns their number. Its
    arguments are the worker's name and whether it died, so that the jobs become suspects.
    """

    def __init__(self, plan: WorkerPlan, reclaim: Reclaim, note: Note) -> None:
        self._plan = plan
        self._reclaim = reclaim
        self._note = note
        self._slots = [_Slot(index) for index in range(1, plan.num_workers + 1)]
        self._num_ended = -1
        self._num_started = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that have not been seen to end."""
        return [slot.process.pid for slot in self._slots if slot.process]

    @property
    def logs(self) -> list[Path]:
        """The log files of the newest worker of each place."""
        return [slot.log for slot in self._slots]

    def supervise(self, num_ended: int) -> None:
        """Start workers that are missing. ``num_ended`` rows of the batch have ended by now.

        Raises RefusedWorkerError if a worker refuses its settings, WorkerError if all keep dying.
        """
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            for slot in self._slots:
                slot.num_idle_deaths = slot.num_busy_deaths = slot.num_device_faults = 0
        for slot in self._slots:
            if slot.process and slot.process.poll() is not None:
                self._handle_exit(slot)
            if not slot.process and not slot.is_given_up and time.monotonic() >= slot.restart_at:
                self._spawn(slot)
        if self._slots and all(slot.is_given_up for slot in self._slots):
            raise WorkerError(self._giving_up())

    def stop(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """End all workers. They finish rows that are nearly done and give back the others.

        When ``is_urgent`` returns True, they give back everything at once. A worker that does not
        end by itself is killed.
        """
        for seconds in (WARM_STOP_SECONDS, COLD_STOP_SECONDS):
            for process in self._running():
                process.terminate()  # a second SIGTERM means: at once
            deadline = time.monotonic() + seconds
            while self._running() and time.monotonic() < deadline:
                if seconds == WARM_STOP_SECONDS and is_urgent():
                    break
                time.sleep(0.02)
        self.kill()

    def abandon(self) -> None:
        """End all workers while the server is away. Their rows go back when the leases lapse."""
        for slot in self._slots:
            if slot.process and slot.process.stdin:
                slot.process.stdin.close()
        deadline = time.monotonic() + ABANDON_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [s.process for s in self._slots if s.process and s.process.poll() is None]

    def kill(self) -> None:
        """Kill the workers that still run. Their jobs are reclaimed if possible. Never raises."""
        for slot in self._slots:
            process, slot.process = slot.process, None
            if not process:
                continue
            was_killed = process.poll() is None
            if was_killed:
                self._remove_record(process.pid)
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
            if was_killed or process.returncode != 0:
                # While the server is away, the leases lapse by themselves within two minutes.
                with suppress(RedisError, BatchkvError):
                    is_death = not was_killed and process.returncode not in ORDERLY_EXITS
                    self._reclaim(slot.name, is_death)

    def _remove_record(self, pid: int) -> None:
        with suppress(BatchkvError, OSError):
            presence.remove_record(home_from_environment(), pid)

    def _spawn(self, slot: _Slot) -> None:
        if slot.name:  # a last command of the worker before may have arrived after its death
            self._reclaim(slot.name, False)
        slot.name = f"{self._plan.name_prefix}-{slot.index}-{secrets.token_hex(4)}"
        slot.log = self._plan.logs / f"{slot.name}.log"
        environment = {**os.environ, **dict(self._plan.variables)}
        environment[connection.URL_VARIABLE] = self._plan.url
        environment.pop(connection.URL_FILE_VARIABLE, None)
        arguments = ["--model", self._plan.model, "--name", slot.name, "--exit-with-parent"]
        self._num_started += 1
        if (trace := self._plan.trace_of(self._num_started)) is not None:
            arguments += ["--trace", str(trace)]
        with slot.log.open("ab") as log:
            slot.process = subprocess.Popen(
                [*self._plan.command, *arguments, *self._plan.arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the run alone, which stops the workers
            )

    def _handle_exit(self, slot: _Slot) -> None:
        """Reclaim the jobs of a worker that has ended, and plan when another one starts."""
        assert slot.process is not None
        process, slot.process = slot.process, None
        if process.stdin:
            process.stdin.close()
        if process.returncode == EXIT_MODEL_CHANGED:
            self._restart_with_new_files(slot)
            return
        if process.returncode == EXIT_DEVICE_FAULT:
            self._restart_after_device_fault(slot)
            return
        num_held = self._reclaim(slot.name, process.returncode not in ORDERLY_EXITS)
        if process.returncode == EXIT_CONFIGURATION:
            lines = server.tail(slot.log, 1)
            raise RefusedWorkerError(
                lines[0].removeprefix("batchkv: ")
                if lines
                else f"a worker refused its settings; its log {slot.log} is empty"
            )
        # A worker whose engine died has given back its jobs, so num_held is 0.
        is_busy = num_held > 0 or (process.returncode in EXIT_REASONS and _was_ready(slot.log))
        if is_busy:
            slot.num_busy_deaths += 1
        else:
            slot.num_idle_deaths += 1
        num_deaths = slot.num_busy_deaths + slot.num_idle_deaths
        longest = MAX_BUSY_RESTART_SECONDS if is_busy else MAX_RESTART_SECONDS
        slot.restart_at = time.monotonic() + min(RESTART_SECONDS * 2 ** (num_deaths - 1), longest)
        self._note(
            f"worker {slot.name} ended ({_reason(process.returncode)}); {rows(num_held)} went back "
            f"to the queue. The last line of its log {slot.log}: {_end_of(slot.log, 1)}"
        )

    def _restart_with_new_files(self, slot: _Slot) -> None:
        """Restart a worker that ended because its model's files have changed. It is no death."""
        self._reclaim(slot.name, False)
        # Wait between two restarts, because the files may go on changing.
        slot.restart_at = max(time.monotonic(), slot.reloaded_at + RESTART_SECONDS)
        slot.reloaded_at = slot.restart_at
        self._note(
            f"worker {slot.name} ended: the files of {self._plan.model} have changed since it "
            "loaded them; it is started again"
        )

    def _restart_after_device_fault(self, slot: _Slot) -> None:
        """Restart a worker whose GPU failed, after a pause. No row can be the reason."""
        self._reclaim(slot.name, False)
        slot.num_device_faults += 1
        pause = DEVICE_PAUSE_SECONDS * 2 ** (slot.num_device_faults - 1)
        slot.restart_at = time.monotonic() + pause
        then = f"started again in {pause:g} s"
        if slot.is_given_up:
            then = f"not started again: that was {slot.num_device_faults} times, and no row ended"
        self._note(
            f"worker {slot.name} ended: the GPU failed twice within a minute, or at start. Its "
            f"rows went back to the queue. It is {then}. {DEVICE_ADVICE}. Its log: {slot.log}"
        )

    def _giving_up(self) -> str:
        """The message of the error that ends the run."""
        slot = self._slots[-1]
        num_deaths = slot.num_idle_deaths + slot.num_busy_deaths + slot.num_device_faults
        return (
            f"the workers died {num_deaths} times in a row, and "
            f"no row ended meanwhile; no row is lost. The end of {slot.log}: {_end_of(slot.log)}"
        )


def _was_ready(log: Path) -> bool:
    """Whether the worker's log says that its engine was ready."""
    try:
        with log.open("rb") as file:
            return any(READY_WORDS in line for line in file)
    except OSError:
        return False


def remove_old_logs(logs: Path) -> None:
    """Delete logs of runs that ended a week ago or earlier."""
    for log in logs.glob("run-*.log"):
        try:
            if time.time() - log.stat().st_mtime > LOG_TTL_SECONDS:
                log.unlink()
        except OSError:  # another run has deleted it
            continue


def _reason(code: int) -> str:
    if code < 0:
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return EXIT_REASONS.get(code, f"exit code {code}")


def _end_of(log: Path, num_lines: int = server.NUM_LOG_LINES_SHOWN) -> str:
    return " | ".join(line.strip() for line in server.tail(log, num_lines)) or "(it is empty)"

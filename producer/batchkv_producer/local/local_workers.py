"""The workers of ``batchkv run``: processes on this machine that end with the run.

A worker's standard input is a pipe whose other end only the run holds. When the run ends, however
it ends, the pipe closes and the worker ends too. The worker gets the Redis URL through its
environment, because everybody can read a command line.

When a worker dies, no row is lost: its jobs go back to the queue at once, and the run starts
another worker. Exit codes of a worker: 0 normal, 2 wrong configuration, 70 the engine died, 71 the
engine hung, 72 the model's files have changed.
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

# -P: a file called redis.py in the folder that the user stands in must not be imported.
WORKER_COMMAND = (sys.executable, "-P", "-m", "batchkv_producer", "worker")
EXIT_CONFIGURATION = 2
READY_WORDS = b"the engine is ready"  # in a worker's log, once it takes rows
EXIT_MODEL_CHANGED = 72  # it is to be started again, and has the new files then
EXIT_REASONS = {70: "its engine died", 71: "its engine hung"}
ORDERLY_EXITS = (0, EXIT_CONFIGURATION, EXIT_MODEL_CHANGED)  # no death of a row

MAX_IDLE_DEATHS = 3  # in a row, holding nothing: it cannot start
# Giving up must come after a row that kills whoever takes it was failed, or such a row would end
# every run. No engine has more rows than that: slots and prefetch end at 4,096 each.
MAX_BUSY_DEATHS = deaths_until_failed(8192) + 1
RESTART_SECONDS = 1.0  # doubled with each death in a row
MAX_RESTART_SECONDS = 16.0
MAX_BUSY_RESTART_SECONDS = 4.0  # the group that killed it is looked into meanwhile
WARM_STOP_SECONDS = 45.0  # a worker finishes what it can in 30 and gives back the rest
COLD_STOP_SECONDS = 4.0
ABANDON_SECONDS = 1.0  # without the server a worker can give nothing back
LOG_TTL_SECONDS = 7 * 86400

Reclaim = Callable[[str, bool], int]
Note = Callable[[str], None]


class WorkerError(BatchkvError):
    """The workers keep dying: there is no point in going on. The batch stays queued."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How many workers to run, and how. ``name_prefix`` begins the name of each.

    ``trace`` is the file that the first worker traces into; others get one beside it.
    """

    model: str
    url: str
    logs: Path
    name_prefix: str
    num_workers: int = 1
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = WORKER_COMMAND
    trace: Path | None = None

    def trace_of(self, number: int) -> Path | None:
        """Where worker process ``number`` traces, the first being 1: FILE, then FILE-2 and on."""
        if self.trace is None or number == 1:
            return self.trace
        return self.trace.with_name(f"{self.trace.stem}-{number}{self.trace.suffix}")


class _Slot:
    """The place of one worker; the processes in it follow one another."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = ""
        self.log = Path()
        self.process: subprocess.Popen[bytes] | None = None
        self.num_idle_deaths = 0  # in a row, without progress of the batch
        self.num_busy_deaths = 0
        self.restart_at = 0.0
        self.renewed_at = -RESTART_SECONDS  # when the model's files had changed under it

    @property
    def is_given_up(self) -> bool:
        return self.num_idle_deaths >= MAX_IDLE_DEATHS or self.num_busy_deaths >= MAX_BUSY_DEATHS


class LocalWorkers:
    """Starts them, notices deaths, starts them again, stops them. One thread calls all of it.

    ``reclaim`` puts the jobs of a worker that is no more back into the queue and says how many
    there were; it is told whether that was a death, or an end that we made.
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
        """Process ids of the workers that were alive when last looked at."""
        return [slot.process.pid for slot in self._slots if slot.process]

    @property
    def logs(self) -> list[Path]:
        return [slot.log for slot in self._slots]

    def supervise(self, num_ended: int) -> None:
        """Start what should run; ``num_ended`` rows of the batch tell whether there is progress.

        Raises UsageError when a worker refuses its configuration, WorkerError when none lives.
        """
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            for slot in self._slots:
                slot.num_idle_deaths = slot.num_busy_deaths = 0
        for slot in self._slots:
            if slot.process and slot.process.poll() is not None:
                self._bury(slot)
            if not slot.process and not slot.is_given_up and time.monotonic() >= slot.restart_at:
                self._spawn(slot)
        if self._slots and all(slot.is_given_up for slot in self._slots):
            raise WorkerError(self._last_words())

    def stop(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """End all: warmly first (rows that are nearly done are finished, the rest given back).

        ``is_urgent`` is asked meanwhile whether the user has lost patience: then everything is
        given back at once, and what does not end by itself is killed.
        """
        for seconds in (WARM_STOP_SECONDS, COLD_STOP_SECONDS):
            for process in self._running():
                process.terminate()  # a worker takes the second one for "now"
            deadline = time.monotonic() + seconds
            while self._running() and time.monotonic() < deadline:
                if seconds == WARM_STOP_SECONDS and is_urgent():
                    break
                time.sleep(0.02)
        self.kill()

    def abandon(self) -> None:
        """End all while the server is away: what they hold goes back when its leases lapse."""
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
        """End what still runs at once, without raising; what it held is reclaimed if possible."""
        for slot in self._slots:
            process, slot.process = slot.process, None
            if not process:
                continue
            was_killed = process.poll() is None
            if was_killed:
                self._withdraw(process.pid)
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
            if was_killed or process.returncode != 0:
                # Without the server the leases lapse by themselves, within a minute or two.
                with suppress(RedisError, BatchkvError):
                    is_death = not was_killed and process.returncode not in ORDERLY_EXITS
                    self._reclaim(slot.name, is_death)

    def _withdraw(self, pid: int) -> None:
        with suppress(BatchkvError, OSError):
            presence.withdraw(home_from_environment(), pid)

    def _spawn(self, slot: _Slot) -> None:
        if slot.name:  # what its predecessor had on the wire may have arrived after its death
            self._reclaim(slot.name, False)
        slot.name = f"{self._plan.name_prefix}-{slot.index}-{secrets.token_hex(4)}"
        slot.log = self._plan.logs / f"{slot.name}.log"
        environment = {**os.environ, connection.URL_VARIABLE: self._plan.url}
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
                start_new_session=True,  # Ctrl-C is for the run alone, which stops them in turn
            )

    def _bury(self, slot: _Slot) -> None:
        assert slot.process is not None
        process, slot.process = slot.process, None
        if process.stdin:
            process.stdin.close()
        if process.returncode == EXIT_MODEL_CHANGED:
            self._renew(slot)
            return
        num_held = self._reclaim(slot.name, process.returncode not in ORDERLY_EXITS)
        if process.returncode == EXIT_CONFIGURATION:
            lines = server.tail(slot.log, 1)
            raise UsageError(lines[0].removeprefix("batchkv: ") if lines else "worker: bad setting")
        # A worker whose engine died has given back what it held.
        is_busy = num_held > 0 or (process.returncode in EXIT_REASONS and _was_ready(slot.log))
        if is_busy:
            slot.num_busy_deaths += 1
        else:
            slot.num_idle_deaths += 1
        num_deaths = slot.num_busy_deaths + slot.num_idle_deaths
        longest = MAX_BUSY_RESTART_SECONDS if is_busy else MAX_RESTART_SECONDS
        slot.restart_at = time.monotonic() + min(RESTART_SECONDS * 2 ** (num_deaths - 1), longest)
        self._note(
            f"worker {slot.name} ended ({_how(process.returncode)}); back to the "
            f"queue: {rows(num_held)}. Its last words ({slot.log}): {_joined(slot.log, 1)}"
        )

    def _renew(self, slot: _Slot) -> None:
        """Its model's files have changed: another takes its place at once. No death."""
        self._reclaim(slot.name, False)
        # Files that go on changing must not make it spin.
        slot.restart_at = max(time.monotonic(), slot.renewed_at + RESTART_SECONDS)
        slot.renewed_at = slot.restart_at
        self._note(
            f"worker {slot.name} ended: the files of {self._plan.model} have changed since it "
            "loaded them; it is started again"
        )

    def _last_words(self) -> str:
        slot = self._slots[-1]
        return (
            f"the workers died {slot.num_idle_deaths + slot.num_busy_deaths} times in a row and "
            f"nothing moved; no row is lost. The end of {slot.log}: {_joined(slot.log)}"
        )


def _was_ready(log: Path) -> bool:
    """Whether a worker's engine came to stand, as it said itself."""
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
        except OSError:  # another run was quicker
            continue


def _how(code: int) -> str:
    if code < 0:
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return EXIT_REASONS.get(code, f"exit code {code}")


def _joined(log: Path, num_lines: int = server.NUM_LOG_LINES_SHOWN) -> str:
    return " | ".join(line.strip() for line in server.tail(log, num_lines)) or "(nothing)"

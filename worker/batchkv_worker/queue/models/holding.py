"""The processes of a host: one for each model that it holds, each a worker like any other.

A process's standard input is a pipe whose other end only the host has. When the host ends, however
it ends, the pipe closes, and the process gives its rows back and ends. Its log lines go where those
of the host go.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from batchkv_producer.server import connection
from batchkv_worker.queue.stop import REPEATED_SIGNAL_SECONDS

KILL_SECONDS = 30.0  # after the drain, before a process that does not end is killed
ORPHAN_SECONDS = 8.0  # the same, when nobody waits for the rows
# A host gives these to each process by itself, or refuses them.
OWN_VARIABLES = ("BATCHKV_MODEL", "BATCHKV_MEMORY", "BATCHKV_TRACE", "BATCHKV_STAY_SECONDS")


@dataclass(frozen=True, slots=True)
class Command:
    """How a process is started: the command, the flags that all have in common, and the URL."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    url: str
    drain_seconds: float


@dataclass(slots=True)
class Process:
    """The process of one model. ``since`` is monotonic seconds."""

    model: str
    name: str
    child: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_busy: bool = True
    was_busy: bool = False  # at the last look
    idle_since: float | None = None
    ends_since: float | None = None  # when it was first asked to end
    asked_at: float = 0.0  # and the last time

    @property
    def is_ending(self) -> bool:
        """Whether it was asked to end."""
        return self.ends_since is not None


class Processes:
    """Starts and ends processes. For one thread."""

    def __init__(self, command: Command, host: str) -> None:
        self._command = command
        self._host = host
        self._found: dict[str, Process] = {}

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._found.values()))

    def __len__(self) -> int:
        return len(self._found)

    def of(self, model: str) -> Process | None:
        """The process of a model."""
        return self._found.get(model)

    def new_name(self, model: str) -> str:
        """A name for the next process of a model. The name of a killed one is taken for a while."""
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-.")
        return f"{self._host}-{slug[:24] or 'model'}-{secrets.token_hex(2)}"

    def start(self, model: str, name: str, flags: Sequence[str]) -> None:
        """Start the process of a model, with flags besides those of all. Raises OSError."""
        kept = {key: text for key, text in os.environ.items() if key not in OWN_VARIABLES}
        kept[connection.URL_VARIABLE] = self._command.url
        kept.pop(connection.URL_FILE_VARIABLE, None)
        child = subprocess.Popen(
            [
                *self._command.words,
                *("--model", model, "--name", name, "--exit-with-parent"),
                *self._command.arguments,
                *flags,
            ],
            stdin=subprocess.PIPE,
            env=kept,
            start_new_session=True,  # Ctrl-C reaches the host alone, which ends the processes
        )
        self._found[model] = Process(model, name, child)

    def ended(self) -> Mapping[str, tuple[Process, int]]:
        """The processes that have ended since the last call, and their exit codes, by model."""
        found = {}
        for process in self:
            code = process.child.poll()
            if code is None:
                continue
            _close(process)
            del self._found[process.model]
            found[process.model] = process, code
        return found

    def end(self, process: Process) -> None:
        """Ask a process to end. It ends its rows."""
        if process.ends_since is None:
            process.child.terminate()
            process.ends_since = process.asked_at = time.monotonic()

    def hasten(self) -> None:
        """Have all processes give their rows back now. Call it until they have ended.

        A process takes a signal that comes soon after another one as the same (``StopRequest``).
        """
        now = time.monotonic()
        for process in self:
            self.end(process)
            if now - process.asked_at > REPEATED_SIGNAL_SECONDS:
                process.child.terminate()
                process.asked_at = now

    def kill_late(self) -> None:
        """Kill the processes that were asked to end and take too long. Their leases lapse."""
        now, limit = time.monotonic(), self._command.drain_seconds + KILL_SECONDS
        for process in self:
            if process.ends_since is not None and now - process.ends_since > limit:
                process.child.kill()

    def abandon(self) -> None:
        """End all without waiting for rows. Returns when none runs."""
        for process in self:
            _close(process)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while any(p.child.poll() is None for p in self) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self:
            process.child.kill()
            process.child.wait()
            del self._found[process.model]


def _close(process: Process) -> None:
    if process.child.stdin is not None:
        process.child.stdin.close()

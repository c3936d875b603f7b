"""The product as a user has it, for its benchmark: commands, an embedded server, real workers.

``told`` reads their traces: shares of time by phase, memory, and what came before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from redis import Redis

from batchkv_producer import Client
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import Home
from batchkv_worker.kept_files import KERNELS
from batchkv_worker.kv.backends.measurements import FOLDER as MEASURED
from batchkv_worker.trace import END, ENGINE, LOAD, MEASURE, REDIS, START

CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
READY = "the engine is ready"
LOOK_SECONDS = 0.02  # how often to ask how a batch stands
WATCH_SECONDS = 0.5  # how often to look at memory
TIER_BYTES = 16 * 2**30

BEFORE = (START, LOAD, MEASURE)
Event = dict[str, Any]
Figures = dict[str, Any]


class TooLong(Exception):
    """The time for all measurements is over."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What commands see, and by when (of the monotonic clock) all must be over."""

    environment: dict[str, str]
    end: float

    @property
    def left(self) -> float:
        """Seconds; raises TooLong when there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TooLong("the time is over")
        return left


def run_command(command: Sequence[str], environment: dict[str, str], lines: Lines) -> str:
    """What a command prints; raises TooLong, and RuntimeError with what it said when it fails."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=lines.left
        )
    except subprocess.TimeoutExpired as fault:
        raise TooLong(" ".join(command[:6])) from fault
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def made_model(lines: Lines, folder: Path, shape: str) -> Path:
    """A model's folder in ``folder``. Another process makes it: this one holds no GPU memory."""
    model = folder / f"bench-{shape}"
    script = Path(__file__).parent / "product_sides.py"
    run_command([sys.executable, str(script), "make", str(model), shape], lines.environment, lines)
    return model


class Watch:
    """Looks at memory while something runs: ``host_mb`` of this process's descendants, ``gpu_mb``.

    A GPU's is what all its processes use together, as nvidia-smi tells, beyond what was there.
    Off, nothing looks.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.found: Figures = {}
        self._is_on = is_on
        self._before = _gpu_mb() if is_on else None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while self._is_on and not self._is_over.wait(WATCH_SECONDS):
            if shutil.which("ps") is not None:
                self._note("host_mb", _host_mb())
            if self._before is not None and (now := _gpu_mb()) is not None:
                self._note("gpu_mb", now - self._before)

    def _note(self, name: str, value: float) -> None:
        self.found[name] = round(max(value, self.found.get(name, 0.0)), 1)


def _gpu_mb() -> float | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ask = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(ask, capture_output=True, text=True).stdout
    with suppress(ValueError):
        return sum(map(float, said.split()))
    return None


def _host_mb() -> float:
    """Resident memory of this process's descendants; the embedded server is none of them."""
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True)
    table = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    family = {os.getpid()}
    while more := {pid for pid, parent, _ in table if parent in family} - family:
        family |= more
    return sum(rss for pid, _, rss in table if pid in family and pid != os.getpid()) / 1e3


class Product:
    """A home with its server, for one measurement.

    What workers measured and compiled is copied from and to ``kept``, so that later homes have it
    as a user's second command does. ``has_tier``: the workers share blocks in one more server.
    """

    def __init__(
        self,
        lines: Lines,
        model: Path,
        devices: Sequence[str],
        kept: Path,
        *,
        is_observed: bool = False,
        has_tier: bool = False,
    ) -> None:
        self._lines = lines
        self._is_observed = is_observed  # traced, and its memory watched: both cost time
        self._model = model
        self._devices = devices
        self._home = Path(tempfile.mkdtemp(prefix="bkv-home-", dir="/tmp"))
        self._environment = {**lines.environment, "BATCHKV_HOME": str(self._home)}
        self._kept = kept
        self._tier = Home(self._home / "tier") if has_tier else None
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _copy_kept(self._kept, self._home)
        self._connection = Redis.from_url(server.ensure_running(Home(self._home)))
        self._client = Client(self._connection)
        if self._tier is not None:
            try:
                url = server.ensure_running(self._tier)
            except BaseException:
                self.__exit__()
                raise
            self._environment["BATCHKV_CACHE"] = f"{url}?max={TIER_BYTES}"
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._connection.close()
        server.stop(Home(self._home))
        if self._tier is not None:
            server.stop(self._tier)
        _copy_kept(self._home, self._kept)
        shutil.rmtree(self._home, ignore_errors=True)

    def run(self, file: Path) -> Figures:
        """``batchkv run``, timed from its first row to its last."""
        out = self._home / "out.jsonl"
        trace = self._home / "trace.json"
        command = ["run", str(file), "-m", str(self._model), "-o", str(out)]
        command += ["--trace", str(trace)] if self._is_observed else []
        begun = time.monotonic()
        found = self._timed(lambda: self._command(*command))
        found["start_seconds"] = found.pop("first") - begun
        found["command_seconds"] = found.pop("end") - begun
        return self._with_shares(found, [trace])

    def serve(
        self, files: Sequence[Path], before: Path | None, num_workers: int
    ) -> Iterator[Figures]:
        """So many workers, all ready; then ``submit`` and ``wait`` for each file, timed in the
        same way.
        """
        begun = time.monotonic()
        logs = self.start(num_workers)
        ready = time.monotonic()
        if before is not None:
            self._submit_and_wait(before)
        for count, file in enumerate(files, 1):
            found = self.compute(file)
            self._check_workers(logs)  # the others would have done the work of one that ended
            found["start_seconds"] = ready - begun
            if count == len(files):
                self.end()
            traces = [self._home / f"trace-{number}.json" for number in range(num_workers)]
            yield self._with_shares(found, traces)

    def start(self, num_workers: int) -> list[Path]:
        """Start so many workers, and wait until all are ready. Returns their logs."""
        logs = [self._start_worker(number) for number in range(num_workers)]
        while not all(READY in log.read_text("utf-8", "replace") for log in logs):
            self._check_workers(logs)
            time.sleep(0.1)
        return logs

    def compute(self, file: Path) -> Figures:
        """``submit`` and ``wait``, timed from the first row to the last.

        ``blocks`` are the keys of its tier afterwards: blocks and leases.
        """
        asked = time.monotonic()
        found = self._timed(lambda: self._submit_and_wait(file))
        found["command_seconds"] = found.pop("end") - asked
        found["to_first_row_seconds"] = found.pop("first") - asked
        if self._tier is not None:
            with Redis.from_url(self._tier.url) as tier:
                found["blocks"] = tier.dbsize()
        return found

    def _with_shares(self, found: Figures, traces: Sequence[Path]) -> Figures:
        window = found.pop("window")
        return found | told(traces, *window) if self._is_observed else found

    def end(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(60)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _submit_and_wait(self, file: Path) -> None:
        batch = self._command("submit", str(file), "-m", str(self._model)).strip()
        self._command("wait", batch)

    def _start_worker(self, number: int) -> Path:
        log = self._home / f"worker-{number}.log"
        environment = dict(self._environment)
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[number % len(self._devices)]
        trace = self._home / f"trace-{number}.json"
        command = [*CLI, "worker", "-m", str(self._model)]
        command += ["--trace", str(trace)] if self._is_observed else []
        with log.open("wb") as stream:
            self._workers.append(
                subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
            )
        return log

    def _check_workers(self, logs: Sequence[Path]) -> None:
        assert self._lines.left
        for worker, log in zip(self._workers, logs, strict=True):
            if worker.poll() is not None:
                raise RuntimeError(f"a worker ended: {log.read_text('utf-8', 'replace')[-3000:]}")

    def _command(self, *words: str) -> str:
        return run_command([*CLI, *words], self._environment, self._lines)

    def _timed(self, work: Callable[[], object]) -> Figures:
        """Do it, and look from outside when the newest batch's first row ran and its last ended."""
        known = {batch.batch_id for batch in self._client.list_batches()}
        is_over = threading.Event()
        moments: dict[str, float] = {}

        def look() -> None:
            while "end" not in moments:
                last_look = is_over.is_set()
                new = [b for b in self._client.list_batches() if b.batch_id not in known]
                if new and new[0].running + new[0].num_ended:
                    moments.setdefault("first", time.monotonic())
                if new and new[0].is_done:
                    moments["end"] = time.monotonic()
                elif last_look:
                    return
                time.sleep(LOOK_SECONDS)

        looker = threading.Thread(target=look)
        looker.start()
        try:
            with Watch(is_on=self._is_observed) as watch:
                work()
        finally:
            is_over.set()
            looker.join()
        status = next(b for b in self._client.list_batches() if b.batch_id not in known)
        if status.ok != status.total:
            raise RuntimeError(f"rows did not end well: {status.reconciliation()}")
        since_1970 = time.time() - time.monotonic()
        return {
            "window": [since_1970 + moments["first"], since_1970 + moments["end"]],
            **{"seconds": moments["end"] - moments["first"], **moments},
            **{"generated": status.completion_tokens, "cached": status.cached_tokens},
            **watch.found,
        }


def _copy_kept(home: Path, other: Path) -> None:
    """Copy the folders of a home that later commands use."""
    for name in (MEASURED, KERNELS):
        if (home / name).exists():
            shutil.copytree(home / name, other / name, dirs_exist_ok=True)


def events_of(file: Path) -> list[Event]:
    """The events of a trace, of one whose writer was killed, too."""
    text = file.read_text("utf-8")
    found: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    return found


def told(files: Sequence[Path], first: float, last: float) -> dict[str, Any]:
    """Of the time from ``first`` to ``last`` (seconds since 1970), on average of the workers.

    ``shares`` are of the engine's thread, and of the main one what it waited for Redis: that goes
    on beside the engine. ``before`` has the seconds of starting, loading and measuring.
    """
    seconds: dict[str, float] = defaultdict(float)
    before: dict[str, float] = defaultdict(float)
    peak = 0.0
    for file in files:
        for event in events_of(file):
            if event["ph"] == "C":
                peak = max(peak, event["args"].get("peak_mb", 0.0))
            if event["ph"] != "X":
                continue
            begin, name = event["ts"] / 1e6, event["name"]
            inside = min(begin + event["dur"] / 1e6, last) - max(begin, first)
            is_engines = event["tid"] == ENGINE.number
            if is_engines and name in BEFORE:
                before[name] += event["dur"] / 1e6 / len(files)
            elif (is_engines and name != END) or name == REDIS:
                seconds[name] += max(0.0, inside)
    whole = (last - first) * len(files)
    return {
        "shares": {name: round(spent / whole, 4) for name, spent in seconds.items()},
        "before": {name: round(spent, 2) for name, spent in before.items()},
        **({"peak_mb": peak} if peak else {}),
    }

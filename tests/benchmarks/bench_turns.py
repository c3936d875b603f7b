"""Two versions of the engine in alternating turns, over whole runs of ``bench_engine``.

    python tests/benchmarks/bench_turns.py trees --old TREE --new TREE
    python tests/benchmarks/bench_turns.py pieces --tree TREE [--piece exp2 ...]

``trees`` compares two source trees; ``pieces`` one tree with itself when one piece of what serves
only an x86 CPU is off. Each side has a process of its own on the same cores, so that the machine
treats both alike; several pairs of processes run beside each other, each on cores of its own.
Sides run in the order a b b a, or b a a b, so that a machine that grows slower or faster meanwhile
favours neither. Such a round gives one ratio, and the median of the ratios counts. ``control``
compares a tree with itself: what it is off 1 is noise. No clock decides what engines use: all
pieces are on, but for the one that is off.

The result is written into ``--json`` after each round, so that nothing is lost when time
runs out; the medians are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = ("worker", "producer", "cache_store", "tests/benchmarks")
SETTLE = 0.1  # seconds before each run: the other side's threads may still spin
STAGGER = 5.0  # seconds within which blocks begin, so that pairs of cores are not in step
CORES_EACH = 2
WARM_UP_JOBS = 32


# -- one side: a process that runs what it is told


# What is named for an x86 CPU's backend, so that no clock decides; and without each of its pieces.
ALL_ON = {"uses_exp2": True, "uses_rope_cache": True}
ALL_OFF = {**dict.fromkeys(ALL_ON, False), "starts_each_layer": False}
PIECES: dict[str, dict[str, bool]] = {
    "control": {},
    "rope_cache": {"uses_rope_cache": False},
    "exp2": {"uses_exp2": False},
    "swiglu": {},
    "causal_tiles": {},
    "eager_layers": {"starts_each_layer": False},
    "softmax": {},
    "all": ALL_OFF,
}


def _module(name: str) -> Any:
    return import_module(f"batchkv_worker.kv.{name}")


def _switch_off(piece: str) -> None:
    """Pieces that a backend cannot be named without, since only measurements want that."""
    backend = _module("backends.cpu.backend").CpuBackend
    generic = _module("backends.generic").GenericBackend
    if piece in ("causal_tiles", "all"):
        backend.attention = generic.attention
    if piece == "softmax":
        backend.softmax = generic.softmax
    if piece == "swiglu":
        _module("backends.cpu.swiglu").is_used = lambda model: False


def _pin(bench: Any, off: str | None) -> None:
    """Let no clock decide but which path decodes: that, the first engine measures for all."""
    found: list[Any] = []
    make = bench.Engine
    known = {field.name for field in fields(bench.EngineConfig)}
    cells = "prefix_cells" if "prefix_cells" in known else "stem_cells"  # an older tree's name
    fixed: dict[str, Any] = {"group_cost": 900, cells: 800}
    try:
        backend = _module("backends.cpu.backend").CpuBackend
    except ModuleNotFoundError:  # a tree from before there were backends
        _module("powers")._are_measured_faster = lambda: True
        _module("angles")._is_faster = lambda: True
    else:
        _switch_off(off or "control")
        asked = {**ALL_ON, **PIECES[off or "control"]}
        own = {field.name for field in fields(backend) if field.name.startswith("uses_")}
        fixed["backend"] = backend(**{**dict.fromkeys(own, True), **asked})

    def engine(loaded: Any, config: Any) -> Any:
        path = found[0] if found else None
        made = make(loaded, replace(config, path=path, **fixed))
        found.extend(made.plan.paths.values())
        return made

    bench.Engine = engine


def serve(tree: Path, off: str | None, args: argparse.Namespace) -> None:
    """Read workloads from standard input, one a line; answer each run with a line of JSON."""
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed must not be taken for an answer
    sys.path[:0] = [str(tree / package) for package in PACKAGES]
    os.cpu_count = lambda: len(os.sched_getaffinity(0))  # what a machine of these cores says
    bench: Any = import_module("bench_engine")
    worker: Any = import_module("batchkv_worker")
    if not Path(worker.__file__).is_relative_to(tree):
        raise SystemExit(f"{worker.__file__} is not in {tree}")
    _pin(bench, off)
    mx: Any = import_module("mlx.core")
    choices = _watched_choices()
    model = bench.build_model(args.model, mx.float32)
    for line in sys.stdin:
        name, jobs = line.split()
        workload = bench.WORKLOADS[name](int(jobs), random.Random(7))
        choices.clear()
        time.sleep(SETTLE)
        seconds, tokens, _ = bench.run_engine(model, workload, args.slots, args.scheme, args.chunk)
        mx.clear_cache()
        mx.synchronize()
        found = {"seconds": seconds, "digest": hash(str(tokens)), "choices": [*choices]}
        answers.write(json.dumps(found | {"blas": bench.BLAS}) + "\n")
        answers.flush()


def _watched_choices() -> list[str]:
    """What engines say about their choices when they start, from now on."""
    import logging

    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log = logging.getLogger("batchkv.engine")
    log.setLevel(logging.INFO)
    log.addHandler(Ear())
    return said


# -- both sides, in turns


@dataclass(frozen=True, slots=True)
class Comparison:
    """``a`` and ``b``: tree and what is off there; each pair of runs gives b's time over a's."""

    name: str
    a: tuple[Path, str | None]
    b: tuple[Path, str | None]
    workloads: tuple[str, ...]


class Side:
    """A process of one side, on some cores."""

    def __init__(
        self, tree: Path, off: str | None, cores: list[int], args: argparse.Namespace
    ) -> None:
        self._jobs = args.jobs
        how = ["--side", str(tree), "--off", off or "", "--model", args.model]
        how += ["--cores", ",".join(map(str, cores)), "--slots", str(args.slots)]
        how += ["--scheme", args.scheme, "--chunk", str(args.chunk)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(args.openblas, len(cores)),
            text=True,
            bufsize=1,
        )

    def run(self, workload: str, jobs: int | None = None) -> dict[str, Any]:
        """One run; the other side waits."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{workload} {jobs or self._jobs}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side has died: see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _environment(openblas: Path | None, cores: int) -> dict[str, str]:
    """Of a side: as many threads as it has cores, and the BLAS that was asked for."""
    found = {**os.environ, "OPENBLAS_NUM_THREADS": str(cores), "PYTHONHASHSEED": "0"}
    if openblas is not None:
        # The worker asks for OpenBLAS by this name.
        folder = Path(tempfile.gettempdir()) / f"bench-turns-blas-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        link = folder / "libopenblas.so.0"
        if not link.exists():
            with suppress(FileExistsError):
                link.symlink_to(openblas.resolve())
        known = [str(folder), str(openblas.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = ":".join(filter(None, known))
    return found


@contextmanager
def sides_of(
    comparison: Comparison, cores: list[int], args: argparse.Namespace
) -> Iterator[tuple[Side, Side]]:
    a = Side(*comparison.a, cores, args)
    b = Side(*comparison.b, cores, args)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


class Book:
    """All runs so far, written to a file after each."""

    def __init__(self, file: Path, header: dict[str, Any]) -> None:
        self._file, self._header = file, header
        self._lock = threading.Lock()
        self._runs: list[dict[str, Any]] = []

    def add(self, run: dict[str, Any]) -> None:
        with self._lock:
            self._runs.append(run)
            found = {**self._header, "medians": self.medians(), "runs": self._runs}
            partial = self._file.with_suffix(".part")
            partial.write_text(json.dumps(found, indent=1) + "\n")
            partial.replace(self._file)

    def medians(self) -> dict[str, dict[str, Any]]:
        """By comparison and workload: ratios of b's seconds to a's."""
        ratios: dict[str, list[float]] = {}
        seconds: dict[str, list[float]] = {}
        same: Counter[str] = Counter()
        for run in self._runs:
            name = f"{run['name']} {run['workload']}"
            a, b = (sum(one["seconds"] for one in run[side]) for side in "ab")
            ratios.setdefault(name, []).append(b / a)
            seconds.setdefault(name, []).append(a / len(run["a"]))
            same[name] += len({one["digest"] for side in "ab" for one in run[side]}) == 1
        return {
            name: {
                "ratio": round(statistics.median(found), 4),
                "quartiles": [round(n, 4) for n in _quartiles(found)],
                "rounds": len(found),
                "same_tokens": same[name],
                "seconds_a": round(statistics.median(seconds[name]), 3),
            }
            for name, found in sorted(ratios.items())
        }


def _quartiles(numbers: list[float]) -> tuple[float, float]:
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, high


def run_block(
    comparison: Comparison,
    number: int,
    cores: list[int],
    end: float,
    args: argparse.Namespace,
    book: Book,
) -> None:
    """Some rounds of all workloads, after one of few jobs that is not counted."""
    if time.monotonic() > end:
        return
    with sides_of(comparison, cores, args) as (a, b):
        for side in (a, b):  # one after the other: the other is not to be disturbed
            for workload in comparison.workloads:
                side.run(workload, WARM_UP_JOBS)
        longest = 0.0
        for turn in range(args.rounds_a_block):
            for workload in comparison.workloads:
                begin = time.monotonic()
                if begin + longest > end:
                    break
                first, second = (a, b) if (turn + number) % 2 == 0 else (b, a)
                runs: dict[Side, list[dict[str, Any]]] = {a: [], b: []}
                for side in (first, second, second, first):
                    runs[side].append(side.run(workload))
                one = {"name": comparison.name, "workload": workload, "cores": cores}
                book.add({**one, "a": runs[a], "b": runs[b]})
                longest = max(longest, time.monotonic() - begin)


def compare(comparisons: list[Comparison], args: argparse.Namespace) -> Book:
    """Blocks of all comparisons, over and over, until there are enough or time is up."""
    end = time.monotonic() + args.seconds
    cores = sorted(os.sched_getaffinity(0))
    groups = [cores[low : low + CORES_EACH] for low in range(0, len(cores), CORES_EACH)]
    groups = [group for group in groups if len(group) == CORES_EACH] or [cores]
    header = {"platform": platform.platform(), "processor": _processor(), "cores": len(cores)}
    book = Book(args.json, header | {"arguments": {k: str(v) for k, v in vars(args).items()}})
    free: list[list[int]] = groups[:]
    lock = threading.Lock()

    def block(comparison: Comparison, number: int) -> None:
        time.sleep(random.uniform(0, STAGGER))
        with lock:
            mine = free.pop()
        try:
            run_block(comparison, number, mine, end, args, book)
        finally:
            with lock:
                free.insert(0, mine)

    with ThreadPoolExecutor(len(groups)) as pool:
        blocks = -(-args.rounds // args.rounds_a_block)
        waits = [
            pool.submit(block, comparison, number)
            for number in range(blocks)
            for comparison in comparisons
        ]
        for wait in waits:
            wait.result()
    return book


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["trees", "pieces"])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--piece", choices=list(PIECES), action="append")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--model", default="bench-3m")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--scheme", default="float")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15, help="of each comparison and workload")
    parser.add_argument("--rounds-a-block", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=440, help="no run begins later")
    parser.add_argument("--openblas", type=Path, help="the library to serve as libopenblas.so.0")
    parser.add_argument("--json", type=Path, default=Path("turns.json"))
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--off", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cores", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.side is not None:
        serve(args.side.resolve(), args.off or None, args)
        return
    if args.what == "trees":
        if args.old is None or args.new is None:
            raise SystemExit("trees: --old and --new are wanted")
        old, new = args.old.resolve(), args.new.resolve()
        workloads = args.workload or ["equal", "mixed", "shared"]
        comparisons = [
            Comparison("new over old", (old, None), (new, None), (name,)) for name in workloads
        ]
    elif args.what == "pieces":
        tree = args.tree.resolve()
        workloads = tuple(args.workload or ["equal", "mixed"])
        comparisons = [
            Comparison(f"without {name}", (tree, None), (tree, name), workloads)
            for name in args.piece or PIECES
        ]
    else:
        raise SystemExit("say trees or pieces")
    book = compare(comparisons, args)
    print(f"{'':32} {'b over a':>8}   quartiles       rounds  same tokens  seconds of a")
    for name, one in book.medians().items():
        low, high = one["quartiles"]
        print(
            f"{name:32} {one['ratio']:8.3f}   {low:.3f} to {high:.3f}   {one['rounds']:5}  "
            f"{one['same_tokens']:11}  {one['seconds_a']:12.2f}"
        )


if __name__ == "__main__":
    main()

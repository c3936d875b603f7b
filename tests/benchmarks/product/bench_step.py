"""A whole decode step by KV scheme: rows of one length in the engine that a worker builds.

    python tests/benchmarks/product/bench_step.py --shape 4b [--columns 4096] [--rows 32]
    python tests/benchmarks/product/bench_step.py --sides float,float:late,affine8:bare --json FILE
    python tests/benchmarks/product/bench_step.py --quick

Each scheme has an engine, all in one process, for a host that waited is slow for a while. Its rows
are prefilled once, and then decode without an end. A turn is a few steps of each side, and the
order changes with each turn. A side ``SCHEME:late`` is the same engine, which starts no layer of a
step before the step before it has ended; where no step starts earlier it is the same. The engine of
``SCHEME:bare`` takes each layer's queries for its attention, and computes all else: no attention
can make a step shorter. Rows grow by a token with each step of their engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import product_parts as parts
from product_arguments import add_folders
from product_sides import works_of

from batchkv_worker.engine.factory import build_engine
from batchkv_worker.settings import WorkerSettings

SIDES = ("float", "affine8", "affine4", "affine8:bare", "float:late", "affine8:late")
KINDS = ("", "late", "bare")
WARM_UP = 40  # steps before the first turn
SETTLE = 4  # before each
SMALL_CHUNK = 256  # tokens that are prefilled at a time: no engine takes fewer


def decoding(model: Path, scheme: str, args: argparse.Namespace, *, is_bare: bool = False) -> Any:
    """An engine whose rows have all been prefilled and decode."""
    given = {"BATCHKV_SLOTS": args.slots, "BATCHKV_KV_SCHEME": scheme}
    engine = build_engine(WorkerSettings.from_env(given, model=str(model)))
    for layer in engine._slots.layers if is_bare else ():
        # The tokens need what a layer keeps, as they do where its attention reads it.
        layer._attention = lambda queries, scale, sinks, layer=layer: mx.depends(
            queries, layer.arrays
        )
    tokens = tokens_of_a_row(args)
    words = parts.Words(1)
    rows = [parts.line(str(row), words.draw(args.columns), tokens) for row in range(args.rows)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        parts.write(file, rows)
        for work in works_of(file):
            engine.add(work)
    while len(engine._rows) < args.rows:
        if done := engine.step():
            raise SystemExit(f"a row ended before all were prefilled: {done[0]}")
    advance(engine, WARM_UP)
    rest(engine)
    return engine


def tokens_of_a_row(args: argparse.Namespace) -> int:
    """So many that no row ends. The first rows decode while the others are prefilled."""
    chunks = args.rows * args.columns // SMALL_CHUNK
    return int(args.steps_of_a_row) + chunks + 8


def advance(engine: Any, steps: int) -> None:
    """So many decode steps. SystemExit if a row ends: the next ones would have fewer."""
    for _ in range(steps):
        if done := engine.step():
            raise SystemExit(f"a row ended: {done[0]}")


def rest(engine: Any) -> None:
    """Nothing of it computes or is launched: MLX computes a stream's work for one thread at a time,
    and the device must be free before another engine begins."""
    engine._launches.join()
    mx.synchronize()


def once(engine: Any, steps: int, *, is_late: bool) -> float:
    """Milliseconds a step."""
    launches = engine._launches
    launches.starts_early = type(launches).starts_early and not is_late
    advance(engine, SETTLE)  # steps of the other kind are over
    begun = time.perf_counter()
    advance(engine, steps)
    spent = (time.perf_counter() - begun) / steps * 1e3
    rest(engine)
    return spent


def engine_of(side: str) -> str:
    """Sides of one engine have the same."""
    return side.removesuffix(":late")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each side, a turn each."""
    os.environ["BATCHKV_HOME"] = str(args.kept or folder / "home")
    model = (args.models or folder) / f"bench-{args.shape}"
    parts.make_model(model, args.shape)
    engines: dict[str, Any] = {}
    for side in args.sides:
        name = engine_of(side)
        if name not in engines:
            scheme, _, kind = name.partition(":")
            engines[name] = decoding(model, scheme, args, is_bare=kind == "bare")
    found: dict[str, list[float]] = {side: [] for side in args.sides}
    for turn in range(args.repeats):
        for side in args.sides[:: -1 if turn % 2 else 1]:
            is_late = side.endswith(":late")
            found[side].append(once(engines[engine_of(side)], args.steps, is_late=is_late))
        print("  " + "".join(f"{found[side][-1]:>9.2f}" for side in found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    """Medians, and each side against the first: the median ratio, and that of each turn."""
    first, lines = next(iter(found)), []
    for side, spent in found.items():
        ratios = sorted(a / b for a, b in zip(spent, found[first], strict=True))
        shown = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        lines.append(
            f"{side:<14}{statistics.median(spent):>8.2f} ms ({min(spent):.2f} to {max(spent):.2f})"
            f"{statistics.median(ratios):>7.2f}x of {first} ({shown})"
        )
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=list(parts.SHAPES), default="tiny")
    add_folders(parser)
    parser.add_argument("--sides", default=",".join(SIDES), help="[%(default)s]")
    parser.add_argument("--slots", default="auto", help="[auto]")
    parser.add_argument("--rows", type=int, default=32, help="that decode [32]")
    parser.add_argument("--columns", type=int, default=4096, help="tokens of a prompt [4096]")
    parser.add_argument("--steps", type=int, default=40, help="of a turn [40]")
    parser.add_argument("--repeats", type=int, default=9, help="turns [9]")
    parser.add_argument("--quick", action="store_true", help="4 short rows and few steps, once")
    parser.add_argument("--json", type=Path, help="milliseconds, after each turn")
    args = parser.parse_args()
    if min(args.rows, args.columns, args.steps, args.repeats) < 1:
        parser.error("--rows, --columns, --steps and --repeats are 1 or more")
    if args.quick:
        args.rows, args.columns = min(args.rows, 4), min(args.columns, 96)
        args.steps, args.repeats = min(args.steps, 4), 1
    args.sides = args.sides.split(",")
    if wrong := [side for side in args.sides if side.partition(":")[2] not in KINDS]:
        parser.error(f"no such side: {', '.join(wrong)}")
    args.steps_of_a_row = WARM_UP + 2 * args.repeats * (SETTLE + args.steps)
    if args.columns + tokens_of_a_row(args) >= parts.CONTEXT:
        parser.error(f"rows would grow over the model's {parts.CONTEXT:,} tokens")
    return args


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="bkv-bench-", dir="/tmp") as folder:
        found = measure(args, Path(folder))
    print("\n".join(["", *table(found)]), flush=True)
    os._exit(0)  # threads of the engines and of MLX need no farewell


if __name__ == "__main__":
    main()

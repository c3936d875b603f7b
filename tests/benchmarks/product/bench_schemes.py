"""Whole workloads by KV scheme, beside mlx-lm and bare forward passes, in one process and in turns.

    python tests/benchmarks/product/bench_schemes.py --shape 4b --slots 64 [--json FILE]
    python tests/benchmarks/product/bench_schemes.py --sides float,affine8,mlx --workload gsm8k
    python tests/benchmarks/product/bench_schemes.py --quick

Each side is an engine as a worker builds it, with its scheme; ``mlx`` is mlx-lm's BatchGenerator
with as many slots, ``floor`` are bare forward passes of the same tokens (see product_sides.py).
All are in one process, for hosts differ, and the host of a GPU limits decoding. On CUDA all launch
as batchkv does, without CUDA graphs. Each turn has other rows, the same for all sides: ``shared``
are 27 groups of 40 rows behind examples of their own, ``gsm8k`` 160 rows of the file with answers
of 128 tokens. The first turn is not counted, and the order of the sides changes with each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import product_parts as parts
from product_arguments import parsed, parser_of
from product_sides import Floor, Once, engine_side, mlx_side, works_of

from batchkv_worker.settings import WorkerSettings

ANSWER_TOKENS = 128  # of gsm8k
# What computes rows without an engine, and so without a scheme.
WITHOUT_ENGINE = {"floor": Floor, "mlx": mlx_side}
Found = dict[str, dict[str, list[float]]]  # workload, side, seconds of each counted turn


def rows_of(workload: str, turn: int, args: argparse.Namespace) -> list[parts.Line]:
    """The rows of a turn; another turn has others."""
    if workload == "shared":
        return parts.shared(turn + 1, args.per_group, args.groups)
    lines = parts.gsm8k(args.data, None, answer_tokens=ANSWER_TOKENS)
    lines = lines[turn * args.rows : (turn + 1) * args.rows]
    if len(lines) < args.rows:
        raise SystemExit("gsm8k has too few rows: give a lower --rows or --repeats")
    return lines


def sides_of(args: argparse.Namespace, folder: Path) -> dict[str, Once]:
    """What computes a file of rows, by name."""
    model = (args.models or folder) / f"bench-{args.shape}"
    parts.make_model(model, args.shape)
    os.environ["BATCHKV_HOME"] = str(args.kept or folder / "home")

    def settings(scheme: str) -> WorkerSettings:
        given = {"BATCHKV_SLOTS": args.slots, "BATCHKV_KV_SCHEME": scheme}
        return WorkerSettings.from_env(given, model=str(model))

    def side_of(name: str) -> Once:
        without = WITHOUT_ENGINE.get(name)
        return without(settings("float")) if without else engine_side(settings(name))

    return {side: side_of(side) for side in args.sides}


def measure(args: argparse.Namespace, folder: Path) -> Found:
    """Every side in turns. SystemExit where one did not generate every token."""
    sides = sides_of(args, folder)
    found: Found = {workload: {side: [] for side in sides} for workload in args.workload}
    for turn in range(args.repeats + 1):
        for workload in args.workload:
            rows = rows_of(workload, turn, args)
            file = folder / "rows.jsonl"
            parts.write(file, rows)
            works = works_of(file)
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                begun = time.perf_counter()
                told: dict[str, Any] = sides[side](works)
                seconds = told.get("seconds", time.perf_counter() - begun)
                if told["generated"] != sum(row["body"]["max_tokens"] for row in rows):
                    raise SystemExit(f"{side} generated {told['generated']} tokens")
                note = "" if turn else " (not counted)"
                print(f"  {workload} {side:<8}{seconds:>8.2f} s{note}", flush=True)
                found[workload][side] += [seconds] if turn else []
                if args.json:
                    args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def table(workload: str, seconds: dict[str, list[float]]) -> list[str]:
    """Medians, and each side against the first: the median ratio, and that of each turn."""
    lines, first = ["", workload], next(iter(seconds))
    for side, runs in seconds.items():
        ratios = sorted(a / b for a, b in zip(runs, seconds[first], strict=True))
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"{side:<10}{statistics.median(runs):>8.2f} s{statistics.median(ratios):>7.2f}x of "
            f"{first} ({shown})"
        )
    return lines


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", action="append", choices=("shared", "gsm8k"), help="[shared]")
    parser.add_argument(
        "--sides", type=lambda text: text.split(","), default=["float", "affine8", "floor"]
    )
    parser.add_argument("--slots", default="auto", help="[auto]")
    parser.add_argument("--rows", type=int, help="of gsm8k, a turn [160]")
    parser.add_argument("--json", type=Path, help="seconds, after each measurement")
    args = parsed(parser, rows=160, quick_rows=10)
    args.workload = args.workload or ["shared"]
    return args


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="bkv-bench-", dir="/tmp") as folder:
        found = measure(args, Path(folder))
    for workload, seconds in found.items():
        print("\n".join(table(workload, seconds)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the engines and of MLX need no farewell


if __name__ == "__main__":
    main()

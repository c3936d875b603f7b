"""Two workers on two GPUs against one, and with a shared Redis tier against without.

    python tests/benchmarks/bench_pair.py --shape 4b --devices 0,1 [--out FILE]
    python tests/benchmarks/bench_pair.py --shape 4b --devices 0,1 --groups 81 --each 3
    python tests/benchmarks/bench_pair.py --shape 4b --devices 0,0 --pool two --pool tier
    python tests/benchmarks/bench_pair.py --quick

Three pools, each with a server of its own, compute the rows of a workload in turns: ``one`` worker,
``two`` workers, and ``tier``, two workers that share blocks in one more server. A pool is started,
computes rows of the same kind untimed, then the batches of --each turns one after the other, and
ends: a GPU has one worker at a time, for MLX takes most of its memory. --repeats starts each pool
again, in the other order. So a machine that slows down is in the ratios of a single start. All
settings are the defaults but for those of ``--set``. Each turn has other rows, the same for all
pools: ``shared`` are 27 groups of 40 rows behind examples of their own, ``gsm8k`` the file's rows
behind its eight examples and a word that only this turn has. Timed is from the moment at which the
first row is running to the one at which the last has ended. With --trace each line has the shares
of that time which the workers spent on each phase; tracing takes time itself. Exit code 1 when rows
are missing, failed or too short.

--pool leaves the other pools out. Two workers on one GPU (``--devices 0,0``) share its memory and
its time. They show what the tier costs, and not what a second GPU brings.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "product"))

import product_parts as parts
from product_arguments import add_workers, environment_of, parsed, parser_of, settings_of
from product_queue import Lines, Product, TooLong, made_model

POOLS = {"one": 1, "two": 2, "tier": 2}
RATIOS = (("one", "two"), ("tier", "two"))
WORKLOADS = ("shared", "gsm8k")
BEFORE = 1000  # the turn whose rows come before the others


def rows_of(workload: str, turn: int, args: argparse.Namespace) -> list[parts.Line]:
    """The rows of a turn; another turn has others."""
    if workload == "shared":
        return parts.shared(turn, args.per_group, args.groups)
    lines = parts.gsm8k(args.data, args.rows)
    for line in lines:
        first = line["body"]["messages"][0]
        first["content"] = f"This is turn {turn}. {first['content']}"
    return lines


def measure(args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> bool:
    """Fill ``found`` with the times of each pool. Returns whether every row came whole."""
    settings = settings_of(args)
    lines = Lines(environment_of(settings), time.monotonic() + args.seconds_limit)
    model = made_model(lines, args.models or folder, args.shape)
    kept = args.kept or folder / "kept"
    devices = args.devices.split(",") if args.devices else []
    found |= {"shape": args.shape, "settings": settings, "workloads": {}}
    is_good = True
    for workload in args.workload:
        pools = found["workloads"].setdefault(workload, {name: [] for name in args.pool})
        before = written(folder, workload, BEFORE, args)[0]
        for repeat in range(args.repeats):
            turns = range(repeat * args.each, (repeat + 1) * args.each)
            files, rows, generated = zip(
                *(written(folder, workload, turn, args) for turn in turns), strict=True
            )
            for name in args.pool[:: -1 if repeat % 2 else 1]:
                options = {"is_observed": args.trace, "has_tier": name == "tier"}
                with Product(lines, model, devices, kept, **options) as pool:
                    batches = pool.serve(files, before, POOLS[name])
                    for once, num_rows, num_tokens in zip(batches, rows, generated, strict=True):
                        is_good &= once["generated"] == num_tokens
                        pools[name].append({**once, "rows": num_rows})
                        print(f"  {workload} {told(name, once)}", flush=True)
                        if args.out:
                            args.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return is_good


def told(name: str, once: dict[str, Any]) -> str:
    """What one batch took, and the workers' phases if they were traced."""
    phases = once.get("shares", {}).items()
    return f"{name:<5}{once['seconds']:>8.2f} s" + "".join(f"  {at} {of:.0%}" for at, of in phases)


def written(
    folder: Path, workload: str, turn: int, args: argparse.Namespace
) -> tuple[Path, int, int]:
    """The file of a turn's rows, how many they are, and how many tokens they generate."""
    rows, file = rows_of(workload, turn, args), folder / f"{workload}-{turn}.jsonl"
    parts.write(file, rows)
    return file, len(rows), sum(row["body"]["max_tokens"] for row in rows)


def table(workload: str, pools: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians of the pools, and of the ratios of the turns."""
    seconds = {name: [once["seconds"] for once in runs] for name, runs in pools.items() if runs}
    if len(seconds) < len(pools):
        return [f"{workload}: not every pool was measured"]
    lines = [f"{workload}: {next(iter(pools.values()))[0]['rows']:,} rows a turn"]
    for name, runs in seconds.items():
        cached = statistics.median(once["cached"] for once in pools[name])
        lines.append(f"{name:<6}{statistics.median(runs):>8.2f} s{cached:>12,.0f} cached tokens")
    if "tier" in pools:
        lines.append(f"the tier has {pools['tier'][-1]['blocks']:,} blocks and leases")
    for above, below in RATIOS:
        if not {above, below} <= pools.keys():
            continue
        ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=False)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        lines.append(f"{above} / {below}: {statistics.median(ratios):.2f} ({shown})")
    return lines


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_workers(parser)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="[shared]")
    parser.add_argument("--pool", action="append", choices=POOLS, help="[all three]")
    parser.add_argument("--rows", type=int, help="of gsm8k [320]")
    parser.add_argument("--each", type=int, default=1, help="batches after each start [1]")
    parser.add_argument("--trace", action="store_true", help="say what the workers did; it costs")
    args = parsed(parser, rows=320, quick_rows=20)
    if args.each < 1:
        parser.error("--each is 1 or more")
    if args.trace and args.each > 1:
        parser.error("--trace is written when a worker ends: leave out --each")
    args.workload = args.workload or ["shared"]
    args.pool = [name for name in POOLS if name in (args.pool or POOLS)]
    return args


def main() -> int:
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="bkv-bench-", dir="/tmp"))
    found: dict[str, Any] = {"workloads": {}}
    try:
        is_good = measure(args, folder, found)
    except (TooLong, RuntimeError) as fault:
        is_good = False
        print(f"ended before all was measured: {fault}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for workload, pools in found["workloads"].items():
        print("\n".join(["", *table(workload, pools)]), flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

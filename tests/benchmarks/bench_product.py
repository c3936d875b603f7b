"""The whole product at its defaults, beside the engine alone and what no engine can do without.

    python tests/benchmarks/bench_product.py --shape 4b [--per-group 40] [--out FILE]
    python tests/benchmarks/bench_product.py --shape 600m --workload gsm8k --rows 200
    python tests/benchmarks/bench_product.py --sides run,engine,floor --repeats 5

A model folder of random weights is made, and the sides run one after the other, in turns:

- ``run``: ``batchkv run``, which starts and ends its worker; ``workers1``, ``workers2``: workers
  that are ready, then ``submit`` and ``wait``; ``tiered2``, if named: two workers that share a
  Redis tier. Each on an embedded server of its own. Timed is from the moment at which the first row
  is running to the one at which the last has ended, as the server tells: starting, loading and
  measuring are told apart.
- ``engine``: the engine that such a worker builds, with all rows at once and no queue.
- ``mlx``: mlx-lm's BatchGenerator with as many slots. ``floor``: bare forward passes of the same
  tokens (see product/product_sides.py).

Every measurement is of new processes, those of all sides alike. With the first turn, which is not
counted, kernels are compiled into the caches on disk that later processes use, and choices are
measured that later processes find; what a process has to prepare for itself counts for each side,
but for the floor, which does it untimed. Only in that turn workers are traced and memory is
watched, for both cost time: the second table has the shares of the engine's thread by phase. On a
GPU what a decode step waits for is told apart there from the chunks of prompts before it.
``--before`` has the workers and the sides without a queue compute other rows first, untimed.

Settings for the product and the engine: ``--set prefill-chunk=2048`` is BATCHKV_PREFILL_CHUNK.
Numbers go to --out after each measurement. Exit code 1 when rows are missing, failed or too short.
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
from product_queue import (
    BEFORE,
    Lines,
    Product,
    TooLong,
    Watch,
    made_model,
    run_command,
    told,
)

from batchkv_worker.trace import DECODE, IDLE, PREFILL, PREPARE, REDIS, START, STORE

ALONE = ("engine", "mlx", "floor")
TIERED = "tiered"
USUAL = ["run", "workers1", "workers2", *ALONE]
SIDES = (*USUAL, f"{TIERED}2")
WORKLOADS = ("shared", "gsm8k", "lognormal")
SEED, SEED_BEFORE = 1, 2

Figures = dict[str, Any]


def alone(
    side: str, model: Path, file: Path, before: Path | None, lines: Lines, *, is_observed: bool
) -> Figures:
    """One measurement of a side without a queue."""
    script = Path(__file__).parent / "product" / "product_sides.py"
    trace = file.with_name("trace.json")
    words = [side, str(model), str(file), str(trace) if is_observed else "-"]
    command = [sys.executable, str(script), *words]
    with Watch(is_on=is_observed) as watch:
        words = [*command, *([str(before)] if before else [])]
        printed = run_command(words, lines.environment, lines)
    found = json.loads(printed.splitlines()[-1])
    window = found.pop("window")
    if side == "engine" and is_observed:  # the others have no phases
        found = told([trace], *window) | found
        others = sum(found["before"].get(phase, 0.0) for phase in BEFORE[1:])
        found["before"][START] = found["start_seconds"] - others  # imports are a part of it
    return found | watch.found


class Bench:
    """The measurements, and the file that holds them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        settings = settings_of(args)
        # Of the sides without a queue; all use what it keeps.
        self._home = args.kept or folder / "home"
        environment = environment_of(settings) | {"BATCHKV_HOME": str(self._home)}
        if args.devices:  # the sides without a queue, too, whose measurements serve all
            environment["CUDA_VISIBLE_DEVICES"] = args.devices.split(",")[0]
        self._lines = Lines(environment, time.monotonic() + args.seconds_limit)
        self.found: Figures = {
            "shape": args.shape,
            "settings": settings,
            "repeats": args.repeats,
            "workloads": {},
        }
        self.is_good = True

    def make_model(self) -> Path:
        """The model's folder."""
        return made_model(self._lines, self._args.models or self._folder, self._args.shape)

    def rows(self, workload: str, seed: int) -> list[parts.Line]:
        """The rows of a workload; another seed gives others of the same kind."""
        args = self._args
        if workload == "shared":
            return parts.shared(seed, args.per_group, args.groups)
        if workload == "gsm8k":
            others, tokens = seed == SEED_BEFORE, args.answer_tokens
            return parts.gsm8k(args.data, args.rows, others=others, answer_tokens=tokens)
        return parts.lognormal(seed, args.rows or 256)

    def compare(self, workload: str, model: Path) -> None:
        """Every side in turns; the figures grow with each."""
        rows = self.rows(workload, SEED)
        file, before = self._folder / f"{workload}.jsonl", None
        parts.write(file, rows)
        if self._args.before:
            before = self._folder / f"{workload}-before.jsonl"
            parts.write(before, self.rows(workload, SEED_BEFORE))
        generated = sum(row["body"]["max_tokens"] for row in rows)
        figures: Figures = {"rows": len(rows), "generated": generated, "sides": {}}
        self.found["workloads"][workload] = figures
        warm_up = 0 if self._args.no_warm_up else 1
        for turn in range(self._args.repeats + warm_up):
            for side in self._args.sides:
                try:
                    is_observed = turn == 0 and (warm_up > 0 or self._args.quick)
                    measured = self._measure(side, model, file, before, is_observed)
                except RuntimeError as fault:  # the other sides are still worth their time
                    self.is_good = False
                    print(f"  {workload} {side}: {fault}", flush=True)
                    continue
                is_right = measured["generated"] == generated
                self.is_good &= is_right
                if not is_right:
                    print(f"{side}: {measured['generated']:,} tokens, not {generated:,}")
                known = figures["sides"].setdefault(side, {"warm_up": [], "runs": []})
                known["runs" if turn >= warm_up else "warm_up"].append(measured)
                note = "" if turn >= warm_up else " (not counted)"
                print(f"  {workload} {side:<9}{measured['seconds']:>9.2f} s{note}", flush=True)
                self.save()

    def _measure(
        self, side: str, model: Path, file: Path, before: Path | None, is_observed: bool
    ) -> Figures:
        if side in ALONE:
            return alone(side, model, file, before, self._lines, is_observed=is_observed)
        devices = self._args.devices.split(",") if self._args.devices else []
        product = Product(
            self._lines,
            model,
            devices,
            self._home,
            is_observed=is_observed,
            has_tier=side.startswith(TIERED),
        )
        with product:
            if side == "run":
                return product.run(file)
            [once] = product.serve([file], before, int(side[-1]))
            return once

    def save(self) -> None:
        """What is known so far, whatever happens next."""
        if self._args.out:
            written = self._args.out.with_suffix(".part")
            written.write_text(json.dumps(self.found, indent=1) + "\n", "utf-8")
            written.replace(self._args.out)


def table(workload: str, found: Figures) -> list[str]:
    """A line for each side: medians, and how they compare with the engine and the floor."""
    sides = {name: side["runs"] for name, side in found["sides"].items() if side["runs"]}
    medians = {
        name: statistics.median(run["seconds"] for run in runs) for name, runs in sides.items()
    }
    lines = [
        f"{workload}: {found['rows']:,} rows, {found['generated']:,} tokens to generate",
        f"{'side':<10}{'seconds':>9}{'gen. tok/s':>12}{'to engine':>11}{'to floor':>10}"
        f"{'start':>9}{'peak MB':>9}{'host MB':>9}{'GPU MB':>9}",
    ]
    for name, runs in sides.items():
        seen = [*found["sides"][name]["warm_up"], *runs]
        ratios = [
            f"{medians[name] / medians[other]:.2f}x" if other in medians else "-"
            for other in ("engine", "floor")
        ]
        peaks = [
            f"{max(known):,.0f}" if (known := [run[key] for run in seen if key in run]) else "-"
            for key in ("peak_mb", "host_mb", "gpu_mb")
        ]
        start = statistics.median(run["start_seconds"] for run in runs)
        lines.append(
            f"{name:<10}{medians[name]:>9.2f}{found['generated'] / medians[name]:>12,.0f}"
            f"{ratios[0]:>11}{ratios[1]:>10}{start:>7.1f} s"
            f"{peaks[0]:>9}{peaks[1]:>9}{peaks[2]:>9}"
        )
    return lines


def phases(found: Figures) -> list[str]:
    """Where the time of the engine's thread went; what the main one waited for Redis beside it."""
    columns = (PREPARE, PREFILL, DECODE, STORE, IDLE, REDIS)
    shorter = {STORE: "store", REDIS: "(Redis)"}
    heads = [shorter.get(name, name) for name in columns] + [f"{name} s" for name in BEFORE]
    lines = [f"{'phases':<10}" + "".join(f"{head:>10}" for head in heads)]
    for name, side in found["sides"].items():
        runs = [run for run in [*side["warm_up"], *side["runs"]] if "shares" in run]
        if runs:

            def mean(kind: str, phase: str, runs: list[Figures] = runs) -> float:
                return statistics.mean(run[kind].get(phase, 0.0) for run in runs)

            shown = [f"{mean('shares', phase):>10.1%}" for phase in columns]
            shown += [f"{mean('before', phase):>10.2f}" for phase in BEFORE]
            lines.append(f"{name:<10}" + "".join(shown))
    return lines


def arguments() -> argparse.Namespace:
    def sides(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(SIDES):
            raise argparse.ArgumentTypeError(f"no such side: {', '.join(sorted(unknown))}")
        return found

    parser = parser_of(__doc__)
    add_workers(parser)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="[shared]")
    parser.add_argument("--sides", type=sides, default=USUAL, help=",".join(SIDES))
    parser.add_argument("--rows", type=int, help="of gsm8k [all], of lognormal [256]")
    parser.add_argument("--answer-tokens", type=int, help="of a row of gsm8k [the file's]")
    parser.add_argument("--no-warm-up", action="store_true", help="the first turn counts too")
    parser.add_argument("--before", action="store_true", help="other rows first, untimed")
    args = parsed(parser, rows=None, quick_rows=20)
    args.no_warm_up |= args.quick
    if args.answer_tokens is not None:
        if args.answer_tokens < 1:
            parser.error("--answer-tokens is 1 or more")
        if "gsm8k" not in (args.workload or []):
            parser.error("--answer-tokens is for --workload gsm8k")
    if args.before and args.rows is None and "gsm8k" in (args.workload or []):
        parser.error("--before with gsm8k needs --rows: at most half of the file's")
    return args


def main() -> int:
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="bkv-bench-", dir="/tmp"))
    bench = Bench(args, folder)
    names = args.workload or ["shared"]
    if "gsm8k" in names and not (args.data / "gsm8k_8shot.jsonl").exists():
        print(f"{args.data}/gsm8k_8shot.jsonl is not there (--data or BATCHKV_DATA says where)")
        return 2
    try:
        model = bench.make_model()
        for name in names:
            bench.compare(name, model)
    except TooLong as fault:
        print(f"ended before all was measured: {fault}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in bench.found["workloads"].items():
        print("\n".join(["", *table(name, found), "", *phases(found)]), flush=True)
    bench.save()
    return 0 if bench.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

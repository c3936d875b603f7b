"""1,319 real 8-shot prompts: the engine against mlx-lm's BatchGenerator, and the whole product.

    python tests/benchmarks/bench_gsm8k.py [--rows 200] [--part engine] [--json FILE]

The prompts are `gsm8k_8shot.jsonl` in --data (default BATCHKV_DATA, else ../shared/data beside the
checkout); without it nothing is run. ``engine``: the same process, model, token ids and lengths for
both sides, alternating, medians; in the scheme `float` rows must have equal greedy tokens, and
`affine8` is told beside it. ``product``: `batchkv run -m demo`; every row once, in order, and the
worker's memory, sampled each second. Exit code 1 when a row is missing, or when a row differs in
`float` on a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

BLAS = blas.load()

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from batchkv_producer.intake.formats import Row, read_rows  # noqa: E402
from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.engine.tokens.requests import prepare  # noqa: E402
from batchkv_worker.events import Completed, Work  # noqa: E402
from batchkv_worker.model.loader import LoadedModel, load  # noqa: E402
from batchkv_worker.sequence import Generation, Sequence  # noqa: E402

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BATCHKV_DATA", ROOT.parent / "shared" / "data"))
CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
SCHEMES = ("float", "affine8")
MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of each row, and how many it may generate."""

    tokens: list[list[int]]
    max_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One side, once: ``num_computed`` prompt tokens were not taken from a cache."""

    seconds: float
    answers: list[list[int]]
    num_computed: int
    peak_bytes: int


def tokenized(file: Path, loaded: LoadedModel, max_tokens: int | None) -> Prompts:
    """The file's rows as a worker prepares them."""
    with file.open("rb") as stream:
        rows = [row for row in read_rows(stream, is_text=False) if isinstance(row, Row)]
    prepared = [prepare(Work(str(row.line), row.request), loaded) for row in rows]
    return Prompts(
        [row.prompt for row in prepared],
        [max_tokens or row.generation.max_tokens for row in prepared],
    )


def run_engine(loaded: LoadedModel, prompts: Prompts, slots: int, scheme: str) -> Outcome:
    """Ours, all rows submitted at once."""
    config = EngineConfig(scheme=scheme, slots=slots, memory_bytes=MEMORY_BYTES)
    engine = Engine(loaded, config)
    mx.reset_peak_memory()
    begin = time.perf_counter()
    for index, (prompt, count) in enumerate(zip(prompts.tokens, prompts.max_tokens, strict=True)):
        engine.submit_row(Sequence(str(index), prompt, Generation(count, temperature=0.0)))
    answers: list[list[int]] = [[] for _ in prompts.tokens]
    num_cached = 0
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Completed)
            answers[int(event.job_id)] = list(event.token_ids)
            num_cached += event.usage.cached
    seconds, peak = time.perf_counter() - begin, mx.get_peak_memory()
    engine.close()
    return Outcome(seconds, answers, sum(map(len, prompts.tokens)) - num_cached, peak)


def run_baseline(loaded: LoadedModel, prompts: Prompts, slots: int) -> Outcome:
    """mlx-lm's, in the order of the file, with its defaults but for the slots."""
    stops = [[token] for token in loaded.tokenizer.eos_token_ids]
    generator = BatchGenerator(loaded.model, completion_batch_size=slots, stop_tokens=stops)
    mx.reset_peak_memory()
    begin = time.perf_counter()
    ids = generator.insert(prompts.tokens, prompts.max_tokens)
    place = {uid: index for index, uid in enumerate(ids)}
    answers: list[list[int]] = [[] for _ in ids]
    left = len(ids)
    while left:
        for response in generator.next_generated():
            answers[place[response.uid]].append(response.token)
            left -= response.finish_reason is not None
    seconds, peak = time.perf_counter() - begin, mx.get_peak_memory()
    generator.close()
    return Outcome(seconds, answers, sum(map(len, prompts.tokens)), peak)


def without_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """An answer without the token that ended it, which only one side tells."""
    return tokens[:-1] if tokens and tokens[-1] in stops else tokens


def compare(source: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every side ``repeats`` times, alternating."""
    loaded = load("demo")
    prompts = tokenized(source, loaded, args.max_tokens)
    sides: dict[str, Callable[[], Outcome]] = {
        scheme: lambda scheme=scheme: run_engine(loaded, prompts, args.slots, scheme)  # type: ignore[misc]
        for scheme in SCHEMES
    }
    sides["baseline"] = lambda: run_baseline(loaded, prompts, args.slots)
    runs: dict[str, list[Outcome]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, run in sides.items():
            runs[name].append(run())
            mx.clear_cache()
    stops = set(loaded.tokenizer.eos_token_ids)
    num_prompt = sum(map(len, prompts.tokens))
    theirs = [without_stop(answer, stops) for answer in runs["baseline"][-1].answers]
    medians = {name: statistics.median(r.seconds for r in found) for name, found in runs.items()}
    found: dict[str, Any] = {
        "mlx_lm": mlx_lm.__version__,
        "device": str(mx.default_device()),
        "dtype": str(loaded.dtype),
        "blas": BLAS,
        "rows": len(prompts.tokens),
        "prompt_tokens": num_prompt,
        "slots": args.slots,
        "repeats": args.repeats,
    }
    for name, outcomes in runs.items():
        last = outcomes[-1]
        ours = [without_stop(answer, stops) for answer in last.answers]
        found[name] = {
            "seconds": round(medians[name], 2),
            "all_seconds": [round(outcome.seconds, 2) for outcome in outcomes],
            "ratio": round(medians["baseline"] / medians[name], 2),
            "computed": round(last.num_computed / num_prompt, 4),
            "generated_tokens": sum(map(len, last.answers)),
            "peak_mb": round(last.peak_bytes / 1e6),
            "rows_equal": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        }
    return found


def tell(found: dict[str, Any]) -> None:
    """The table."""
    print(f"{found['rows']:,} rows, {found['prompt_tokens']:,} prompt tokens, {found['device']}")
    for name in (*SCHEMES, "baseline"):
        side = found[name]
        print(
            f"{name:<10}{side['seconds']:>9.2f} s {side['ratio']:>6.2f}x  "
            f"computes {side['computed']:>6.1%} of prompts  peak {side['peak_mb']:>5,} MB  "
            f"equal rows {side['rows_equal']:,}/{found['rows']:,}",
            flush=True,
        )


def resident_mb(pid: int) -> float:
    """Resident memory of the children of a process, in MB."""
    listed = subprocess.run(
        ["ps", "-o", "rss=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.split()
    return sum(map(int, listed)) / 1e3


def measure(source: Path, home: Path) -> dict[str, Any]:
    """Run the file to its end and check what came out."""
    environment = {**os.environ, "BATCHKV_HOME": str(home / "home")}
    out = home / "out.jsonl"
    begin = time.monotonic()
    run = subprocess.Popen(
        [*CLI, "run", str(source), "-m", "demo", "-o", str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    memory: list[float] = []
    while run.poll() is None:
        memory.append(resident_mb(run.pid))
        time.sleep(1)
    seconds = time.monotonic() - begin
    last_line = (run.communicate()[0] or "").strip()
    errors = out.with_name(out.name + ".errors.jsonl")
    files = [path.read_text().splitlines() if path.exists() else [] for path in (out, errors)]
    results = [json.loads(line) for lines in files for line in lines]
    batch = results[0]["id"].split("-")[0]
    ordered = subprocess.run(
        [*CLI, "results", batch, "--ordered"], env=environment, capture_output=True, text=True
    ).stdout.splitlines()
    subprocess.run([*CLI, "server", "stop"], env=environment, capture_output=True)
    wanted = [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]
    settled = [sample for sample in memory[len(memory) // 4 :] if sample]
    half = len(settled) // 2
    return {
        "rows": len(wanted),
        "exit_code": run.returncode,
        "last_line": last_line,
        "seconds": round(seconds, 1),
        "each_id_once": sorted(r["custom_id"] for r in results) == sorted(wanted),
        "all_ok": not files[1],
        "order_kept": [json.loads(line)["custom_id"] for line in ordered] == wanted,
        "worker_mb_second_quarter_on": round(max(settled[:half], default=0.0)),
        "worker_mb_last_half": round(max(settled[half:], default=0.0)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["engine", "product", "all"], default="all")
    parser.add_argument("--data", type=Path, default=DATA, help="where gsm8k_8shot.jsonl lies")
    parser.add_argument("--rows", type=int, help="only the first so many")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, help="instead of what the rows say")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 rows, once")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.repeats = 100, 1
    data = args.data / "gsm8k_8shot.jsonl"
    if not data.exists():
        print(f"{data} is not there: nothing to run (--data or BATCHKV_DATA says where)")
        return 0
    home = Path(tempfile.mkdtemp(prefix="bkv-bench-", dir="/tmp"))
    found: dict[str, Any] = {}
    is_good = True
    try:
        source = home / "in.jsonl"
        source.write_text("".join(data.read_text().splitlines(keepends=True)[: args.rows]))
        if args.part != "product":
            found["engine"] = compare(source, args)
            tell(found["engine"])
            is_exact = found["engine"]["device"] == str(mx.Device(mx.cpu))
            is_good &= not is_exact or found["engine"]["float"]["rows_equal"] == len(
                source.read_text().splitlines()
            )
        if args.part != "engine":
            found["product"] = measured = measure(source, home)
            print(json.dumps(measured, indent=1))
            is_good &= measured["each_id_once"] and measured["all_ok"] and measured["order_kept"]
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

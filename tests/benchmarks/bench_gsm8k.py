"""1,319 real 8-shot prompts through `batchkv run -m demo`: every row once, in order, memory flat.

    python tests/benchmarks/bench_gsm8k.py [--quick] [--json FILE]

The prompts are `gsm8k_8shot.jsonl` in BATCHKV_DATA (default ../shared/data beside the checkout);
without it nothing is run. The memory is that of the worker process, sampled each second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BATCHKV_DATA", ROOT.parent / "shared" / "data"))
CLI = [sys.executable, "-P", "-m", "batchkv_producer"]


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
    results = [json.loads(line) for line in out.read_text().splitlines()]
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
        "all_ok": all(r["error"] is None for r in results),
        "order_kept": [json.loads(line)["custom_id"] for line in ordered] == wanted,
        "worker_mb_second_quarter_on": round(max(settled[:half], default=0.0)),
        "worker_mb_last_half": round(max(settled[half:], default=0.0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first 100 prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = DATA / "gsm8k_8shot.jsonl"
    if not data.exists():
        print(f"{data} is not there: nothing to run (set BATCHKV_DATA)")
        return
    home = Path(tempfile.mkdtemp(prefix="bkv-bench-", dir="/tmp"))
    try:
        source = home / "in.jsonl"
        lines = data.read_text().splitlines(keepends=True)
        source.write_text("".join(lines[:100] if args.quick else lines))
        measured = measure(source, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(measured, indent=1))
    if args.json:
        args.json.write_text(json.dumps(measured) + "\n")
    if not (measured["each_id_once"] and measured["all_ok"] and measured["order_kept"]):
        sys.exit(1)


if __name__ == "__main__":
    main()

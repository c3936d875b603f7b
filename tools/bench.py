# ruff: noqa: T201  (a helper that talks to a terminal)
"""Run every benchmark of tests/benchmarks, one after the other, into bench-results/.

usage: python tools/bench.py [--only NAME] [options that every benchmark gets, such as --quick]

A benchmark is a file with its own main entry. Its output goes to the terminal and to
``bench-results/NAME.log``. If it has the flag ``--json``, its numbers go to
``bench-results/NAME.json``. Benchmarks run one at a time, so that they do not slow each other down.
Exit code 1 if one of them failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench-results"
MAIN_ENTRY = 'if __name__ == "__main__":'


def benchmarks(only: str | None) -> list[Path]:
    """The benchmark files, by name. ``only`` keeps files with this text in their names."""
    files = sorted((ROOT / "tests" / "benchmarks").glob("*.py"))
    return [
        file
        for file in files
        if MAIN_ENTRY in file.read_text(encoding="utf-8") and (only is None or only in file.stem)
    ]


def run(file: Path, options: list[str]) -> int:
    """Run one benchmark. Its output goes to the terminal and to its log. Returns its exit code."""
    source = file.read_text(encoding="utf-8")
    if '"--quick"' not in source and "--quick" in options:
        print(f"{file.stem} has no --quick: it runs in full", flush=True)
        options = [option for option in options if option != "--quick"]
    arguments = [sys.executable, str(file), *options]
    if '"--json"' in source:
        arguments += ["--json", str(RESULTS / f"{file.stem}.json")]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with (RESULTS / f"{file.stem}.log").open("w", encoding="utf-8") as log:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    return process.wait()


def main(arguments: list[str]) -> int:
    """Run all benchmarks, or those of ``--only``. Returns the exit code."""
    only = None
    if arguments[:1] == ["--only"]:
        if len(arguments) < 2:
            print("--only needs a name", file=sys.stderr)
            return 2
        only, arguments = arguments[1], arguments[2:]
    files = benchmarks(only)
    if not files:
        print(f"No benchmark in tests/benchmarks has {only!r} in its name.", file=sys.stderr)
        return 1
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for file in files:
        started = time.monotonic()
        print(f"== {file.stem}", flush=True)
        code = run(file, arguments)
        print(f"== {file.stem}: exit {code} after {time.monotonic() - started:.0f} s\n", flush=True)
        if code:
            failed.append(file.stem)
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

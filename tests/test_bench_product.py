"""Benchmarks of the product in their smallest form; the suite runs one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
BENCH = BENCHMARKS / "bench_product.py"
is_long = pytest.mark.skipif(
    os.environ.get("BATCHKV_BENCH") != "all", reason="`make bench` runs it"
)


def test_the_benchmark_of_the_product_measures_every_kind_of_side(tmp_path: Path) -> None:
    """`batchkv run` at defaults, the engine and the floor generate every token, and are timed."""
    out = tmp_path / "out.json"
    sides = "run,engine,floor"
    command = [sys.executable, str(BENCH), "--quick", "--sides", sides, "--out", str(out)]
    done = subprocess.run(
        [*command, "--groups", "2", "--per-group", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())["workloads"]["shared"]
    assert told["rows"] == 4 and told["generated"] == 64
    for side in sides.split(","):
        (run,) = told["sides"][side]["runs"]
        assert run["generated"] == 64
        assert run["seconds"] > 0 and run["start_seconds"] > 0
    assert "1.00x" in done.stdout


@is_long
def test_the_benchmark_of_two_workers_compares_three_pools(tmp_path: Path) -> None:
    """Every row of the counted turn comes from one worker, from two, and from two with a tier."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "bench_pair.py"), "--quick", "--json", str(out)]
    command += ["--groups", "2", "--per-group", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pools = json.loads(out.read_text())["workloads"]["shared"]
    assert set(pools) == {"one", "two", "tier"}
    for runs in pools.values():
        (run,) = runs  # the first turn is not counted
        assert run["rows"] == 4 and run["generated"] == 64 and run["seconds"] > 0
    assert pools["tier"][0]["blocks"] > 0
    assert "one / two" in done.stdout and "tier / two" in done.stdout


@is_long
def test_the_benchmark_of_schemes_times_each_side_in_one_process(tmp_path: Path) -> None:
    """Engines, mlx-lm and bare passes, of the same rows; the first turn is not counted."""
    out = tmp_path / "out.json"
    script = BENCHMARKS / "product" / "bench_schemes.py"
    command = [sys.executable, str(script), "--quick", "--per-group", "2", "--json", str(out)]
    command += ["--sides", "float,affine8,mlx,floor"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sides = json.loads(out.read_text())["shared"]
    assert list(sides) == ["float", "affine8", "mlx", "floor"]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in sides.values())
    assert "x of float" in done.stdout


@is_long
def test_the_benchmark_of_a_step_times_each_side_in_turns(tmp_path: Path) -> None:
    """Rows that have been prefilled decode, and none ends. One side computes no attention."""
    out = tmp_path / "out.json"
    script = BENCHMARKS / "product" / "bench_step.py"
    command = [sys.executable, str(script), "--quick", "--json", str(out)]
    command += ["--sides", "float,float:late,affine8,float:bare"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sides = json.loads(out.read_text())
    assert list(sides) == ["float", "float:late", "affine8", "float:bare"]
    assert all(len(spent) == 1 and spent[0] > 0 for spent in sides.values())
    assert "x of float" in done.stdout


@is_long
def test_the_benchmark_of_starts_finds_the_same_choices_in_each(tmp_path: Path) -> None:
    """The second start measures nothing; what one kept serves the next benchmark."""
    out = tmp_path / "out.json"
    script = BENCHMARKS / "product" / "bench_starts.py"
    command = [sys.executable, str(script), "--quick", "--json", str(out)]
    command += ["--kept", str(tmp_path / "kept"), "--models", str(tmp_path / "models")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = json.loads(out.read_text())
        assert first["results"] == second["results"] != {}
        assert 0 < second["loaded"] < second["ready"]
    assert "2 starts" in done.stdout and " 0 of them different" in done.stdout


def test_starts_with_other_choices_are_told() -> None:
    """A result that another start has not, or has otherwise, is named by its place."""
    sys.path.insert(0, str(BENCHMARKS / "product"))
    try:
        from bench_starts import different
    finally:
        sys.path.pop(0)
    one = {"results": {"file": {"path": "kernel", "tries": {"a": 0}}}}
    same = {"results": {"file": {"path": "kernel", "tries": {"a": 0}}}}
    other = {"results": {"file": {"path": "fused", "tries": {"a": 0}}}}
    fewer = {"results": {"file": {"path": "kernel", "tries": {}}}}
    assert different([one, same]) == []
    assert different([one, other, same]) == ["/file/path"]
    assert different([one, fewer]) == ["/file/tries/a"]

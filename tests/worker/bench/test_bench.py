"""``batchkv bench`` on this machine: every part runs, and every figure has its bound."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchkv_producer.server.home import Home
from batchkv_worker.bench import batches, product, rates, run
from batchkv_worker.bench.extent import PARTS, QUICK, parts_of
from batchkv_worker.bench.results import (
    BenchReport,
    DecodeStep,
    ForwardPass,
    Machine,
    Model,
    PrefillSpeed,
)
from batchkv_worker.bench.run import Bench
from batchkv_worker.bench.show import as_markdown
from batchkv_worker.bench.workloads import Workload, make
from batchkv_worker.cli import bench_command
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.start.backend import choose_backend
from support.homes import new_home, shared_folder


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    """Small arrays, short workloads, and a worker that uses what other tests have measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "READ_SIDE", {True: 64, False: 64})
        patch.setattr(rates, "SIDE", {True: 64, False: 64})
        for module in (run, batches):
            patch.setattr(module, "make", short)
        patch.setattr(product, "PREFIX_WORDS", 20)
        patch.setattr(product, "Home", lambda folder: Home(new_home(folder)))
        yield


def short(name: str, rows: int, vocabulary: int) -> Workload:
    """A workload with the first and the last tokens of its prompts."""
    found = make(name, rows, vocabulary)
    prompts = [prompt[:24] + prompt[-8:] for prompt in found.prompts]
    return Workload(name, prompts, [min(count, 6) for count in found.max_tokens])


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """A quick bench of the demo model, whole; a machine of any speed does."""
    notes: list[str] = []
    extent = replace(QUICK, rows=4, least_rows=4)
    bench = Bench("demo", ("float", "affine8"), 4, "auto", extent, notes.append)
    file = shared_folder() / "bench.json"  # its engines choose alike, and the first one measures
    bench._config = replace(bench._config, backend=choose_backend(Measurements(file)))
    found = bench.report
    for figure in bench.figures():
        found = found.with_figure(figure)
    assert len(notes) == 9
    return found


def test_every_part_is_measured_beside_its_bound(report: BenchReport) -> None:
    """Times, speeds and bounds are positive; both sides of batches gave the same tokens."""
    assert [one.rows for one in report.passes] == list(QUICK.pass_rows)
    assert all(one.ms > 0 and one.bound_ms > 0 for one in (*report.passes, *report.decode))
    assert [one.tokens for one in report.prefill] == list(QUICK.prefill_tokens)
    assert all(min(p.tokens_per_second, p.bound_tokens_per_second) > 0 for p in report.prefill)
    assert [(d.scheme, d.context) for d in report.decode] == [("float", 64), ("affine8", 64)]
    assert [one.workload for one in report.batches] == ["equal", "mixed", "shared"]
    for batch in report.batches:
        assert min(batch.engine_seconds, batch.mlx_lm_seconds, batch.bound_seconds) > 0
        assert batch.rows == 4 and batch.same_rows >= 3  # a near tie may go either way
    (product,) = report.product
    assert product.rows == 4 and product.generated > 0
    assert min(product.seconds, product.engine_seconds, product.start_seconds) > 0


def decoded(bench: Bench) -> list[DecodeStep]:
    return [figure for figure in bench.figures() if isinstance(figure, DecodeStep)]


def test_rows_that_do_not_fit_are_not_decoded() -> None:
    """Longer rows than memory has room for would make a machine swap."""
    notes: list[str] = []
    extent = replace(QUICK, parts=("decode",), contexts=(64, 128))
    bench = Bench("demo", ("float",), 4, "auto", extent, notes.append)
    bench._config = replace(bench._config, memory_bytes=4 * 100 * 4096)
    assert [step.context for step in decoded(bench)] == [64]
    assert notes[-1] == "float: 4 rows of 128 tokens do not fit into memory"


def test_rows_that_take_too_long_are_not_decoded() -> None:
    """The time of the row before decides, so that a slow machine ends soon."""
    notes: list[str] = []
    extent = replace(QUICK, parts=("decode",), contexts=(64, 128), row_seconds=0.0)
    bench = Bench("demo", ("float",), 4, "auto", extent, notes.append)
    assert [step.context for step in decoded(bench)] == [64]
    assert notes[-1] == "float: a row of 128 tokens takes too long to compute"


def test_prompts_that_take_too_long_are_left_out() -> None:
    """The time of the size before decides."""
    notes: list[str] = []
    extent = replace(QUICK, parts=("prefill",), prefill_tokens=(64, 128), row_seconds=0.0)
    bench = Bench("demo", ("float",), 4, "auto", extent, notes.append)
    found = [figure.tokens for figure in bench.figures() if isinstance(figure, PrefillSpeed)]
    assert found == [64]
    assert notes[-1] == "a prompt of 128 tokens takes too long to compute"


def test_a_slow_machine_runs_fewer_rows() -> None:
    """Batches are halved until they end in time by their bound; never below the least."""
    extent = replace(QUICK, parts=("batches",), rows=64, least_rows=8, limit_seconds=20.0)
    bench = Bench("demo", ("float",), 4, "auto", extent, lambda _: None)
    assert bench._rows(lambda rows: rows / 20) == 16
    assert bench._rows(lambda rows: rows / 100) == 64
    assert bench._rows(lambda rows: rows * 100) == 8


def test_tables_and_json_name_no_person_and_no_path(report: BenchReport) -> None:
    """What is pasted into an issue has chip, versions and figures only."""
    text = as_markdown(report) + json.dumps(report.as_json())
    for private in (str(Path.home()), sys.prefix, "/tmp"):
        assert private not in text
    assert report.machine.chip and report.machine.mlx
    for title in ("Forward passes", "Prefill", "Decode steps", "Batches", "batchkv run"):
        assert f"\n{title}" in text


def test_a_table_is_markdown() -> None:
    """Heads, alignment, a line for each figure; parts without any are left out."""
    machine = Machine("Chip", 16, "OS 1", "cpu", "1", "2", "3", 100.0, 2.0)
    model = Model("m", "2 layers", "float32", 1.5)
    passes = (ForwardPass(32, 16.0, 12.0),)
    text = as_markdown(BenchReport(machine, model, "affine8", 32, passes))
    assert text.splitlines()[-3:] == [
        "| rows | ms | tokens/s | bound ms | of bound |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 32 | 16.00 | 2,000 | 12.00 | 75 % |",
    ]
    assert "Prefill" not in text


def test_parts_are_named_or_refused() -> None:
    """A part that is not there is named with those that are."""
    assert parts_of("decode, passes") == ("decode", "passes")
    for text in ("decode,speed", " , "):
        with pytest.raises(SettingsError, match=", ".join(PARTS)):
            parts_of(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-m", "demo", "--parts", "speed"], "no part 'speed'"),
        (["-m", "demo", "--schemes", "affine9"], "--schemes affine9"),
        (["-m", "/nowhere/model"], "'/nowhere/model'"),
    ],
)
def test_wrong_use_ends_with_one_sentence(flags: list[str], said: str) -> None:
    """With exit code 2, before anything is measured."""
    found: Any = CliRunner().invoke(bench_command, ["--quick", *flags])
    assert found.exit_code == 2
    assert said in found.stderr and "Traceback" not in found.stderr

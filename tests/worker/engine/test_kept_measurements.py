"""A later start of the same command uses the measurements of an earlier one."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine import chunk_size, factory, kept_measurements
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.kept_measurements import open_measurements
from batchkv_worker.kv.backends import measurements, timing
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.start import pathcheck, plan, prefix_cost, probe
from batchkv_worker.model.loader import LoadedModel, load
from batchkv_worker.settings import WorkerSettings
from support import tiny_models

MEASURERS = (
    (probe, "check_paths"),
    (probe, "least_times"),
    (pathcheck, "check_prefix"),
    (pathcheck, "check_prefill"),
    (prefix_cost, "least_times"),
    (timing, "least_times"),
    (plan, "find_traits"),
    (plan, "can_share"),
    (chunk_size, "measure"),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path))
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))
    # Short measurements; and one of chunks, which a CPU does without.
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(chunk_size, "SIZES", (256,))
    monkeypatch.setattr(
        kept_measurements, "choose_backend", lambda kept: GenericBackend(measurements=kept)
    )
    return tmp_path


def start(**changes: Any) -> Engine:
    how = {"measures_anew": changes.pop("measures_anew", False)}
    settings = WorkerSettings(model="demo", slots=2, memory_bytes=2**27)
    return factory.build_engine(replace(settings, **changes), **how)


def choices(engine: Engine) -> Any:
    plan = engine.plan
    chunk = engine._scheduler.budget.chunk_tokens
    shapes = replace(plan.shapes, padded_rows=None)  # a method of the engine's own backend
    return plan.paths, shapes, plan.prefix_cells, plan.traits, plan.shares, chunk


def kept_files(home: Path) -> list[Path]:
    return sorted((home / measurements.FOLDER).glob("*.json"))


def test_a_second_start_measures_and_checks_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses what the first has chosen, from one file."""
    first = choices(start())
    with monkeypatch.context() as patch:
        for module, name in MEASURERS:
            patch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(name))
        for _ in range(2):
            assert choices(start()) == first
    (file,) = kept_files(home)
    content = json.loads(file.read_text())
    assert content["facts"]["scheme"] == "affine8" and content["facts"]["slots"] == 2
    assert {"self-check", "prefix self-check", "sizes of chunks"} <= content["results"].keys()
    assert str(home) not in file.read_text()


def test_to_measure_anew_is_to_replace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts use the last measurement."""
    start()
    monkeypatch.setattr(prefix_cost, "measure", lambda *_, **__: 4321)
    assert start().plan.prefix_cells != 4321
    assert start(measures_anew=True).plan.prefix_cells == 4321
    monkeypatch.setattr(prefix_cost, "measure", lambda *_, **__: 1234)
    assert start().plan.prefix_cells == 4321
    assert len(kept_files(home)) == 1


def test_a_result_that_no_longer_fits_is_measured_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path, traits or sizes that this version does not know."""
    start()
    (file,) = kept_files(home)
    content = json.loads(file.read_text())
    before = copy.deepcopy(content["results"])
    for name, value in content["results"].items():
        if name.startswith("attention paths"):
            value["path"] = "imagined"
    content["results"]["self-check"]["mask_rank"] = 6
    content["results"]["sizes of chunks"] = {"tokens_per_second": {"7": 1.0}, "is_whole": True}
    file.write_text(json.dumps(content))
    start()
    after = json.loads(file.read_text())["results"]
    assert after.keys() >= before.keys()  # more if another path won this time
    assert after["self-check"] == before["self-check"]
    assert "imagined" not in file.read_text() and '"7"' not in file.read_text()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("demo")


def file_of(loaded: LoadedModel, scheme: str = "affine8", slots: int = 4) -> Path:
    file = open_measurements(loaded, scheme, slots, "a BLAS").file
    assert file is not None
    return file


def test_each_kind_of_engine_has_results_of_its_own(
    home: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scheme, slots, dtype, weights, shapes, library, and MLX's version and variables."""
    names = [file_of(loaded), file_of(loaded, scheme="float"), file_of(loaded, slots=5)]
    for changes in (
        {"dtype": mx.float16},
        {"fingerprint": "0" * 32},
        {"vocabulary": 7},
        {"config": {"quantization": {"bits": 4}}},
        {"weight_bytes": 1},
    ):
        names.append(file_of(replace(loaded, **changes)))
    names += [open_measurements(loaded, "affine8", 4, "another").file or Path()]
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    names.append(file_of(loaded))
    monkeypatch.setattr(mx, "__version__", "9.9")
    names.append(file_of(loaded))
    assert len(set(names)) == len(names)
    assert file_of(loaded) == names[-1]


def test_a_model_without_a_fingerprint_keeps_nothing(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else identifies its weights."""
    unnamed = tiny_models.loaded(tiny_models.build("llama"))
    with caplog.at_level("INFO"):
        assert open_measurements(unnamed, "float", 2, "").file is None
    assert "has no fingerprint" in caplog.text


@pytest.mark.parametrize(("load_average", "is_said"), [(0.1, False), (1e6, True)])
def test_a_busy_machine_is_in_the_log(
    load_average: float,
    is_said: bool,
    home: Path,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, if something was measured, and names the command that helps."""
    monkeypatch.setattr(kept_measurements.os, "getloadavg", lambda: (load_average, 0, 0))
    for has_measured in (True, False):
        caplog.clear()
        kept = open_measurements(loaded, "affine8", 4, "")
        kept.of("cells", lambda: 1, measurements.WHOLE)
        assert kept.has_measured is has_measured
        kept_measurements.warn_if_busy(kept, "demo")
        assert ("batchkv tune -m demo" in caplog.text) is (is_said and has_measured)

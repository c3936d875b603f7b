"""``batchkv tune``: what it measures, shows and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from batchkv_producer.errors import UsageError
from batchkv_worker.cli import bench_command, kv_report_command
from batchkv_worker.kv.attention.paths import LayerAttention, attend
from batchkv_worker.kv.backends import timing
from batchkv_worker.kv.backends.measurements import FOLDER
from batchkv_worker.kv.start import pathcheck, prefix_cost, probe
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.tune.command import tune_command
from batchkv_worker.tune.show import as_text
from batchkv_worker.tune.tuning import LayerTuning, PathLine, Tuning


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path))
    monkeypatch.setattr(pathcheck, "LENGTHS", (64, 100))
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.05)
    return tmp_path


def tune(*arguments: str) -> Result:
    found = CliRunner().invoke(tune_command, ["-m", "demo", "--slots", "2", *arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_it_measures_anew_and_keeps_what_workers_use(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run of the command measures all again; a worker then has its results."""
    cells = [700, 800]
    monkeypatch.setattr(prefix_cost, "measure", lambda *_, **__: cells.pop(0))
    for wanted in (700, 800):
        found = json.loads(tune("--json").stdout)
        assert [layer["prefix_cells"] for layer in found["layers"]] == [wanted]
    assert Path(found["kept_in"]).parent == home / FOLDER
    from batchkv_worker.engine.factory import build_engine

    monkeypatch.setattr(probe, "choose", lambda *_, **__: pytest.fail("measured"))
    engine = build_engine(WorkerSettings(model="demo", slots=2))
    assert engine.plan.prefix_cells == 800
    chosen = [path["name"] for path in found["layers"][0]["paths"] if path["is_chosen"]]
    assert chosen == [*engine.plan.paths.values(), "prefill", "shared prefix"]
    engine.close()


def test_a_path_that_is_wrong_is_shown_with_the_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an error and no times, and another is chosen."""

    def without_tail(layer: LayerAttention, queries: Any, *rest: Any) -> Any:
        keys, values, scale, mask = rest
        if layer.path == "packed":
            keys, values = (tuple(part[..., :64, :] for part in parts) for parts in (keys, values))
            mask = None if mask is None else mask[..., :64]
        return attend(layer, queries, keys, values, scale, mask)

    monkeypatch.setattr(pathcheck, "attend", without_tail)
    shown = tune().stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("packed"))
    assert line.split()[1:3] == ["-", "-"] and "yes" not in line
    assert "not used: packed differs by" in shown and "at 100 columns" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-scheme", "affine9"], "unknown KV scheme"),
        (["--slots", "0"], "--slots 0"),
        (["--dtype", "int8"], "--dtype"),
        (["--weights", "dense"], "--weights"),
        (["--weights", "unpacked"], "--weights unpacked: only NVIDIA GPUs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: list[str], said: str, home: Path) -> None:
    found = tune(*flags)
    assert found.exit_code == 2
    assert said in found.stderr
    assert not (home / FOLDER).exists()


def test_a_cache_and_a_chunk_of_the_environment_change_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store is opened, and chunks are as where nothing was set."""
    monkeypatch.setenv("BATCHKV_CACHE", f"disk:{home / 'blocks'}")
    monkeypatch.setenv("BATCHKV_KV_ADOPT_FLOAT", "1")
    monkeypatch.setenv("BATCHKV_PREFILL_CHUNK", "256")
    assert json.loads(tune("--json").stdout)["chunk_tokens"] == 512
    assert not (home / "blocks").exists()


def test_the_table_of_a_gpu() -> None:
    """Chunks with their speeds, groups of layers, and a refused kernel."""
    refused = "packed is refused at 64 columns: no kernel"
    paths = (
        PathLine("fused", 0.1, 1.25, 0.004, 0.05, True),
        PathLine("packed", None, None, None, 0.05, False, refused),
    )
    layer = LayerTuning("affine8/g64, 8 heads of 128 and 128, for 32 query heads", paths, 2048)
    tuning = Tuning(
        *("Qwen3-4B", "affine8", 32, "bfloat16", "metal", "Apple M4 Max", "0.32.4", (layer,)),
        *(1024, {256: 900.0, 1024: 1500.4}, 72, 36, True, 35, 34, False, None),
    )
    assert as_text(tuning) == (
        "Qwen3-4B, affine8, 32 slots, bfloat16 on Apple M4 Max, MLX 0.32.4\n\n"
        "attention of affine8/g64, 8 heads of 128 and 128, for 32 query heads\n"
        "path    ms at 64  ms at 576    error  at most  chosen\n"
        "fused      0.100      1.250  4.0e-03     0.05     yes\n"
        "packed         -          -        -     0.05\n"
        "not used: packed is refused at 64 columns: no kernel\n"
        "a further group of rows takes as long as 2,048 tokens of one row\n\n"
        "chunks of prompts have 1024 tokens (tokens a second: 256: 900, 1024: 1,500)\n"
        "72 groups of linear layers are multiplied at once\n"
        "36 layers have norms and positions by one kernel, in chunks of prompts too\n"
        "35 layers have keys and values of chunks packed by one kernel\n"
        "34 layers have residual sums and norms by one kernel\n"
        "rows do not share prefixes in attention\n"
        "nothing of this is kept\n"
    )


@pytest.mark.parametrize("command", [tune_command, kv_report_command, bench_command])
def test_two_models_are_not_measured_as_one(command: click.Command) -> None:
    """A command that measures one model refuses a second one, rather than forget the first."""
    with pytest.raises(UsageError, match="-m demo -m other: this command measures one model"):
        command.main(["-m", "demo", "-m", "other"], standalone_mode=False)

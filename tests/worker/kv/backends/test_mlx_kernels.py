"""What MLX compiles at its first use: computed before there are rows, and kept for this user."""

from __future__ import annotations

import io
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kept_files import KERNELS
from batchkv_worker.kv.backends import device, mlx_kernels
from batchkv_worker.kv.start.machine import machine_facts

NAME = f"{mx.__version__}-sm_90"


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is restored afterwards. Empty, it names no folder."""
    monkeypatch.setenv(mlx_kernels.VARIABLE, "")


def primitives(array: mx.array) -> list[str]:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return re.findall(r'\[label ="(\w+)', graph.getvalue())


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rows_are_read_and_written_where_an_array_says(dtype: mx.Dtype) -> None:
    """One operation that MLX compiles for each dtype, and no other."""
    found = [
        (name, result.dtype)
        for result in mlx_kernels.first_uses(dtype)
        for name in primitives(result)
        if name in ("Gather", "Scatter")
    ]
    reads = [("Gather", mx.int32), ("Gather", mx.uint32)]
    assert found == [*reads, ("Scatter", mx.uint32), ("Scatter", dtype)]


def test_all_are_computed_and_one_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No device here fails to compile one: the fault is put there."""
    real, computed = mx.eval, list[mx.Dtype]()

    def evaluated(result: mx.array) -> None:
        computed.append(result.dtype)
        if len(computed) == 2:
            raise RuntimeError("Failed to compile kernel: gather_uint32_int32_1")
        real(result)

    monkeypatch.setattr(mx, "eval", evaluated)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        mlx_kernels.compile_now(mx.bfloat16)
    assert computed == [mx.int32, mx.uint32, mx.uint32, mx.bfloat16]
    assert "reads or writes rows: Failed to compile kernel: gather_uint32_int32_1" in caplog.text


@pytest.mark.parametrize(("kind", "count"), [("cuda", 1), ("metal", 0), ("cpu", 0)])
def test_only_cuda_compiles_at_the_first_use(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[mx.Dtype] = []
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(mlx_kernels, "compile_now", given.append)
    device.compile_kernels(mx.bfloat16)
    assert given == [mx.bfloat16] * count


@pytest.fixture
def open_handed() -> Iterator[None]:
    """New folders may be written by the user's group, as some systems have it."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_handed")
def test_code_is_kept_in_folders_of_this_user(tmp_path: Path) -> None:
    """MLX's files are named by neither its version nor the device, so the folder is.

    batchkv's own kernels are kept in the upper one, and are read only if it is this user's.
    """
    mlx_kernels.keep_in(tmp_path / "home" / KERNELS, "sm_90")
    folder = tmp_path / "home" / KERNELS / "mlx" / NAME
    assert os.environ[mlx_kernels.VARIABLE] == str(folder)
    for one in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700


def test_a_folder_that_the_environment_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mlx_kernels.VARIABLE, "/elsewhere")
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert os.environ[mlx_kernels.VARIABLE] == "/elsewhere" and not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "mlx", f"mlx/{NAME}"])
def test_code_is_not_kept_where_others_may_write(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs on the device, with all that this user computes there."""
    (tmp_path / "mlx" / NAME).mkdir(parents=True)
    (tmp_path / place).chmod(0o777)
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert not os.environ[mlx_kernels.VARIABLE]
    assert "others may write" in caplog.text


def test_code_is_not_kept_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "mlx").write_text("a file")
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert not os.environ[mlx_kernels.VARIABLE]


@pytest.mark.parametrize(("kind", "is_kept"), [("cuda", True), ("metal", False), ("cpu", False)])
def test_a_start_on_cuda_keeps_it_in_the_home_folder(
    kind: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path))
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(device, "share_stream", lambda: None)
    told: dict[str, Any] = {"architecture": "sm_90"}
    monkeypatch.setattr(mx, "device_info", lambda *_: told)
    device.prepare_device(wired_limit=False)
    named = os.environ[mlx_kernels.VARIABLE]
    assert named == (str(tmp_path / KERNELS / "mlx" / NAME) if is_kept else "")


def test_where_code_is_kept_changes_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an upgrade would measure every machine again."""
    before = machine_facts("none")
    monkeypatch.setenv(mlx_kernels.VARIABLE, "/elsewhere")
    assert machine_facts("none") == before
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert machine_facts("none") != before

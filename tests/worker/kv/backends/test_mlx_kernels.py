"""What MLX compiles at its first use: computed before there are rows, and kept for this user."""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import time
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


class Failing:
    """``mx.eval``, of which the calls with these numbers fail: no device here compiles kernels."""

    def __init__(self, *numbers: int) -> None:
        self.computed: list[mx.Dtype] = []
        self._numbers, self._real = numbers, mx.eval

    def __call__(self, result: mx.array) -> None:
        self.computed.append(result.dtype)
        if len(self.computed) in self._numbers:
            raise RuntimeError("There is no kernel named gather")
        self._real(result)


def test_one_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mx, "eval", failing := Failing(2, 3))
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        mlx_kernels.compile_now(mx.bfloat16)
    assert failing.computed == [mx.int32, mx.uint32, mx.uint32, mx.uint32, mx.bfloat16]
    assert "reads or writes rows: There is no kernel named gather" in caplog.text


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_spoilt_file_is_compiled_anew(
    is_chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """MLX writes in place and reads what is there. A folder that a user named is left as it is."""
    if is_chosen:
        mlx_kernels.keep_in(tmp_path, "sm_90")
        folder = Path(os.environ[mlx_kernels.VARIABLE])
    else:
        monkeypatch.setenv(mlx_kernels.VARIABLE, str(folder := tmp_path))
    for ending in (".ptx", ".txt"):
        (folder / f"gather{ending}").write_text("half")
    monkeypatch.setattr(mx, "eval", failing := Failing(1))
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        mlx_kernels.compile_now(mx.bfloat16)
    assert len(failing.computed) == 5 and not caplog.text
    assert [*folder.iterdir()] == [] if is_chosen else len([*folder.iterdir()]) == 2


def test_code_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """MLX writes a module's code, and then its names. Another worker may just be doing so."""
    folder = tmp_path / KERNELS / "mlx" / NAME
    folder.mkdir(parents=True, mode=0o700)
    (folder / "whole.ptx").write_text("code")
    (folder / "whole.txt").write_text("names")
    (folder / "half.ptx").write_text("co")
    (folder / "now.ptx").write_text("code")
    an_hour_ago = time.time() - 3600
    for name in ("whole.ptx", "whole.txt", "half.ptx"):
        os.utime(folder / name, (an_hour_ago, an_hour_ago))
    for one in (tmp_path, tmp_path / KERNELS, folder.parent):
        one.chmod(0o700)
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert sorted(file.name for file in folder.iterdir()) == ["now.ptx", "whole.ptx", "whole.txt"]


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
    home = tmp_path / "home"
    mlx_kernels.keep_in(home, "sm_90")
    folder = home / KERNELS / "mlx" / NAME
    assert os.environ[mlx_kernels.VARIABLE] == str(folder)
    for one in (folder, folder.parent, home / KERNELS, home):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700


def test_the_home_folder_may_be_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To a larger disk, for instance. What is there is checked, and links in it are refused."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    disk.mkdir(mode=0o700)
    home.symlink_to(disk)
    mlx_kernels.keep_in(home, "sm_90")
    assert os.environ[mlx_kernels.VARIABLE] == str(disk / KERNELS / "mlx" / NAME)
    os.environ[mlx_kernels.VARIABLE] = ""
    (disk / KERNELS).rename(tmp_path / "elsewhere")
    (disk / KERNELS).symlink_to(tmp_path / "elsewhere")
    mlx_kernels.keep_in(home, "sm_90")
    assert not os.environ[mlx_kernels.VARIABLE]
    assert caplog.text.endswith(f"others may write {disk / KERNELS}\n")


def test_a_folder_that_the_environment_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mlx_kernels.VARIABLE, "/elsewhere")
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert os.environ[mlx_kernels.VARIABLE] == "/elsewhere" and not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", KERNELS, f"{KERNELS}/mlx", f"{KERNELS}/mlx/{NAME}"])
def test_code_is_not_kept_where_others_may_write(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs on the device, with all that this user computes there."""
    mlx_kernels.keep_in(tmp_path, "sm_90")
    os.environ[mlx_kernels.VARIABLE] = ""
    (tmp_path / place).chmod(0o777)
    try:
        mlx_kernels.keep_in(tmp_path, "sm_90")
    finally:
        (tmp_path / place).chmod(0o700)
    assert not os.environ[mlx_kernels.VARIABLE]
    assert caplog.text.endswith(f"others may write {tmp_path / place}\n")


def test_code_is_not_kept_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / KERNELS).write_text("a file")
    mlx_kernels.keep_in(tmp_path, "sm_90")
    assert not os.environ[mlx_kernels.VARIABLE]


@pytest.mark.parametrize(("kind", "is_kept"), [("cuda", True), ("metal", False), ("cpu", False)])
def test_a_start_on_cuda_keeps_it_in_the_home_folder(
    kind: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path))
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(device, "share_stream", lambda: None)
    monkeypatch.setattr(device, "_leave_memory", lambda: None)
    told: dict[str, Any] = {"architecture": "sm_90"}
    monkeypatch.setattr(mx, "device_info", lambda *_: told)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)  # restored afterwards
    device.prepare_device(wired_limit=False)
    named = os.environ[mlx_kernels.VARIABLE]
    assert named == (str(tmp_path / KERNELS / "mlx" / NAME) if is_kept else "")


def test_where_code_is_kept_changes_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an upgrade would measure every machine again."""
    before = machine_facts("none")
    monkeypatch.setenv(mlx_kernels.VARIABLE, "/elsewhere")
    assert machine_facts("none") == before
    monkeypatch.setenv("MLX_OF_THIS_TEST", "0")
    assert machine_facts("none") != before

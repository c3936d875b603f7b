"""Code that MLX finds by a kernel's name."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kept_files import PART
from batchkv_worker.kv.backends import mlx_kernels
from batchkv_worker.kv.kernels import compiled_launch, named_code
from batchkv_worker.kv.kernels.compiled_launch import CompiledLaunch, CompiledRun, launch_for
from batchkv_worker.kv.kernels.draw import DrawKernel
from batchkv_worker.kv.kernels.named_code import CODE, NAMES, NamedCode
from batchkv_worker.kv.kernels.nvrtc import CompilerError
from worker.kv.kernels.cpp_compiler import HASH_OF_NOTHING, Calls, CppCompiler
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

needs_compiler = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A machine with CUDA whose MLX looks for code in a folder first."""
    calls = Calls(mlx_folder=tmp_path / "mlx")
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", calls, raising=False)
    monkeypatch.setattr(compiled_launch, "find_compiler", lambda: CppCompiler(tmp_path))
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    return calls


def launch(home: Path, folder: Path | None) -> CompiledLaunch:
    launch_for.cache_clear()
    found = launch_for(home, folder)
    launch_for.cache_clear()
    assert isinstance(found, CompiledLaunch)
    return found


@needs_compiler
def test_the_hash_is_that_of_the_library_that_mlx_uses(tmp_path: Path) -> None:
    program = tmp_path / "hash.cpp"
    program.write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\n"
        "#ifndef __GLIBCXX__\n#error another library\n#endif\n"
        'int main() { printf("%zx", std::hash<std::string>{}("")); }\n'
    )
    found = subprocess.run(["c++", str(program), "-o", str(tmp_path / "hash")], check=False)
    if found.returncode:
        pytest.skip("the compiler here has another library than GNU's")
    said = subprocess.run([str(tmp_path / "hash")], check=True, capture_output=True, text=True)
    assert said.stdout == HASH_OF_NOTHING
    assert (f"_{HASH_OF_NOTHING}.ptx", f"_{HASH_OF_NOTHING}.txt") == (CODE, NAMES)


@needs_compiler
def test_launches_give_no_code_where_mlx_finds_it(made: Calls, tmp_path: Path) -> None:
    """Their results are the same, and code that is kept is compiled for neither."""
    logits, given = mx.random.normal((2, 100)), mx.zeros((2, 5))
    wanted = DrawKernel(CppLaunch(tmp_path))(logits, given)
    found = launch(tmp_path, made.mlx_folder)
    assert found.named == NamedCode(tmp_path / "mlx")
    assert mx.array_equal(DrawKernel(found)(logits, given), wanted)
    for run in found.runs.values():
        assert isinstance(run, CompiledRun)
        (kernel,) = run._made.values()
        assert kernel is not None and kernel.code == b""
    assert len(found.runs) == 1
    again = launch(tmp_path, made.mlx_folder)
    assert mx.array_equal(DrawKernel(again)(logits, given), wanted)
    assert isinstance(again.compiler, CppCompiler) and not again.compiler.compiled


@needs_compiler
@pytest.mark.parametrize(
    "reason", ["MLX looks elsewhere", "another kernel", "no file", "no kernel", "no folder"]
)
def test_launches_give_the_code_where_mlx_does_not_find_it(
    reason: str, made: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, given = mx.random.normal((2, 100)), mx.zeros((2, 5))
    folder = None if reason == "no folder" else tmp_path / "mlx"
    if reason == "MLX looks elsewhere":
        made.mlx_folder = tmp_path / "another"
    if reason == "another kernel":
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", _gives_zeros_where_it_has_no_code)
    if reason == "no file":
        monkeypatch.setattr(NamedCode, "keep", lambda *_: False)
    if reason == "no kernel":  # MLX compiles what the compiler refuses
        monkeypatch.setattr(compiled_launch, "cuda_launch", CppLaunch(tmp_path))
        monkeypatch.setattr(CppCompiler, "compile", _refuses)
    found = launch(tmp_path, folder)
    assert found.named is None
    wanted = DrawKernel(CppLaunch(tmp_path))(logits, given)
    assert mx.array_equal(DrawKernel(found)(logits, given), wanted)


def _gives_zeros_where_it_has_no_code(**given: Any) -> list[mx.array]:
    if given["compiled_source"]:
        found: list[mx.array] = Calls()(**given)
        return found
    outputs = zip(given["output_shapes"], given["output_dtypes"], strict=True)
    return [mx.zeros(*one) for one in outputs]


def _refuses(self: CppCompiler, program: str, name: str, architecture: str) -> bytes:
    raise CompilerError(f"{name}: no such architecture")


@needs_compiler
def test_launches_give_the_code_where_no_file_can_be_written(made: Calls, tmp_path: Path) -> None:
    """The disk fills up after the trial, say."""
    found = launch(tmp_path, made.mlx_folder)
    for file in (tmp_path / "mlx").iterdir():
        file.unlink()
    (tmp_path / "mlx").rmdir()
    (tmp_path / "mlx").write_text("no folder")
    logits, given = mx.random.normal((2, 100)), mx.zeros((2, 5))
    wanted = DrawKernel(CppLaunch(tmp_path))(logits, given)
    assert mx.array_equal(DrawKernel(found)(logits, given), wanted)


def test_a_file_with_other_content_is_written_again(tmp_path: Path) -> None:
    named = NamedCode(tmp_path)
    assert named.keep("kernel", b"code")
    for ending in (CODE, NAMES):
        (tmp_path / f"kernel{ending}").write_bytes(b"co")
        assert named.keep("kernel", b"code")
    assert (tmp_path / f"kernel{CODE}").read_bytes() == b"code"
    assert (tmp_path / f"kernel{NAMES}").read_text() == "kernel\tkernel\n"
    written = (tmp_path / f"kernel{CODE}").stat().st_ino
    assert named.keep("kernel", b"code")
    assert (tmp_path / f"kernel{CODE}").stat().st_ino == written


def test_the_oldest_files_are_removed_where_nobody_can_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for within a day stays, and so do MLX's own files."""
    monkeypatch.setattr(named_code, "MAX_FILES", 1)
    named, old = NamedCode(tmp_path), 2 * named_code.SURE_SECONDS
    (tmp_path / "gather.ptx").write_bytes(b"a kernel of MLX's own")
    for part in (f".old{PART}", f".new{PART}"):
        (tmp_path / part).write_bytes(b"co")
    for name in ("older", "old", "used"):
        assert named.keep(name, b"code")
    for age, name in ((old + 2, "older"), (old + 1, "old"), (old, "used"), (old, "gather")):
        for file in tmp_path.glob(f"{name}*"):
            os.utime(file, (time.time() - age,) * 2)
    os.utime(tmp_path / f".old{PART}", (time.time() - old,) * 2)
    assert named.keep("used", b"code")
    assert len([*tmp_path.iterdir()]) == 9  # a name that is known sweeps nothing
    assert named.keep("new", b"code")
    left = sorted(file.name for file in tmp_path.iterdir())
    wanted = [f"{name}{ending}" for name in ("new", "used") for ending in (CODE, NAMES)]
    assert left == sorted([f".new{PART}", "gather.ptx", *wanted])


def test_code_of_ours_stays_where_mlx_has_to_compile_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of MLX's was spoilt. Another worker may be about to use one of ours."""
    monkeypatch.setenv(mlx_kernels.VARIABLE, "")
    assert mlx_kernels.folder() is None
    mlx_kernels.keep_in(tmp_path, "sm_90")
    folder = mlx_kernels.folder()
    assert folder is not None and folder.is_relative_to(tmp_path)
    assert NamedCode(folder).keep("kernel", b"code")
    (folder / "gather.ptx").write_bytes(b"half")
    mlx_kernels._forget()
    assert sorted(file.name for file in folder.iterdir()) == [f"kernel{CODE}", f"kernel{NAMES}"]
    monkeypatch.setenv(mlx_kernels.VARIABLE, str(tmp_path))
    assert mlx_kernels.folder() is None  # one that a user named

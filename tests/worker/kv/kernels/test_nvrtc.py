"""NVIDIA's compiler through its C interface: a library in C that keeps to that interface."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkv_worker.kv.kernels import nvrtc
from batchkv_worker.kv.kernels.nvrtc import HEADERS, CompilerError, find_compiler
from worker.kv.kernels.cpp_launch import is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C compiler")

# "wrong" in a program does not compile; "none" cannot be made. The code is options and text.
LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct Program { char *text, *code; size_t size; };
int num_open = 0;
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 7; return 0; }
int nvrtcCreateProgram(struct Program** to, const char* text, const char* name, int count,
                       const char** headers, const char** names) {
  if (strstr(text, "none") || !strstr(name, ".cu") || count || headers || names) return 2;
  *to = calloc(1, sizeof(struct Program));
  (*to)->text = strdup(text);
  num_open++;
  return 0;
}
int nvrtcCompileProgram(struct Program* of, int count, const char** options) {
  of->code = calloc(1, 10000);
  for (int i = 0; i < count; i++) { strcat(of->code, options[i]); strcat(of->code, "\n"); }
  strcat(of->code, of->text);
  of->size = strlen(of->code) + 3;
  memcpy(of->code + of->size - 3, "\0\1\2", 3);
  return strstr(of->text, "wrong") ? 6 : 0;
}
int nvrtcGetProgramLogSize(struct Program* of, size_t* size) { *size = 15; return 0; }
int nvrtcGetProgramLog(struct Program* of, char* to) { strcpy(to, "line 1: wrong?"); return 0; }
int nvrtcGetCUBINSize(struct Program* of, size_t* size) { *size = of->size; return 0; }
int nvrtcGetCUBIN(struct Program* of, char* to) { memcpy(to, of->code, of->size); return 0; }
int nvrtcDestroyProgram(struct Program** of) { num_open--; free(*of); *of = 0; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder as CUDA has it: ``lib`` beside ``include``."""
    home = tmp_path_factory.mktemp("cuda")
    (home / "lib").mkdir()
    (home / "code.c").write_text(LIBRARY)
    found = home / "lib" / "libnvrtc.so.13"
    subprocess.run(
        ["c++", "-x", "c", "-shared", "-fPIC", "-w", str(home / "code.c"), "-o", str(found)],
        check=True,
    )
    (home / "include").mkdir()
    for name in HEADERS:
        (home / "include" / name).touch()
    return found


@pytest.fixture
def loaded(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is in this process, and no other CUDA is on the machine."""
    monkeypatch.setattr(nvrtc, "LIBRARIES", (str(library),))
    monkeypatch.setattr(nvrtc, "_USUAL_HOME", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    find_compiler.cache_clear()
    yield library
    find_compiler.cache_clear()


def test_a_program_becomes_code_for_the_architecture(loaded: Path) -> None:
    """With the headers beside the library; zeros are part of the code; nothing stays open."""
    compiler = find_compiler()
    assert compiler is not None and compiler.headers == loaded.parent.parent / "include"
    code = compiler.compile("kernel()", "name", "sm_90")
    options = f"--gpu-architecture=sm_90\n--include-path={compiler.headers}\n"
    assert code == options.encode() + b"kernel()\0\1\2"
    assert compiler.version.startswith("13.7 ")
    assert ctypes.c_int.in_dll(compiler.library, "num_open").value == 0


@pytest.mark.parametrize(("program", "said"), [
    ("wrong", "name: line 1: wrong?"),
    ("none", "nvrtcCreateProgram failed with code 2"),
])  # fmt: skip
def test_what_does_not_compile_says_why(program: str, said: str, loaded: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    with pytest.raises(CompilerError) as caught:
        compiler.compile(program, "name", "sm_90")
    assert str(caught.value) == said
    assert ctypes.c_int.in_dll(compiler.library, "num_open").value == 0


def test_the_library_that_is_loaded_already_comes_first(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is MLX's, and of the version that the driver takes."""
    other = tmp_path / "libnvrtc.so.14"
    other.write_bytes(loaded.read_bytes())
    (tmp_path / "include").mkdir()
    for name in HEADERS:
        (tmp_path / "include" / name).touch()
    monkeypatch.setattr(nvrtc, "LIBRARIES", (str(other), str(loaded)))
    held = ctypes.CDLL(str(loaded))
    compiler = find_compiler()
    assert compiler is not None and compiler.library._handle == held._handle


def test_the_environments_cuda_comes_first(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has the headers."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "b"))
    (tmp_path / "b" / "include").mkdir(parents=True)
    for name in HEADERS:
        (tmp_path / "b" / "include" / name).touch()
    compiler = find_compiler()
    assert compiler is not None and compiler.headers == tmp_path / "b" / "include"


@pytest.mark.parametrize("missing", ["library", "a header"])
def test_without_library_or_headers_there_is_none(
    missing: str, loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "library":
        monkeypatch.setattr(nvrtc, "LIBRARIES", ("libnvrtc.so.of-nobody",))
    else:
        monkeypatch.setattr(nvrtc, "HEADERS", (*HEADERS, "of-nobody.h"))
    assert find_compiler() is None

"""CUDA's compiler and MLX's call of compiled kernels, as C++ on a CPU.

A program for CUDA is compiled with the words of ``threads.h`` in place of CUDA's. Its code is the
name of a library, which ``call`` runs as MLX runs machine code: with arrays that lie in one piece,
and with whole numbers behind them.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.kernels.body import source_text
from batchkv_worker.kv.kernels.cuda_program import HEADER
from worker.kv.kernels.cpp_launch import CPP_FLAGS, THREADS, CppArray

HASH_OF_NOTHING = "553e93901e462a6e"  # std::hash<std::string>{}("")
_TYPES = {"__nv_bfloat16": "bfloat", "__half": "half"}
_SIGNATURE = re.compile(r'extern "C" __global__ void (\w+)\((.*?)\) \{\n', re.S)


@dataclass(frozen=True)
class CppCompiler:
    """Stands in for ``nvrtc.Compiler``. ``compiled`` has the names of kernels, and for what."""

    folder: Path
    version: str = "a C++ compiler"
    compiled: list[tuple[str, str]] = field(default_factory=list)

    def compile(self, program: str, name: str, architecture: str) -> bytes:
        self.compiled.append((name, architecture))
        text = _in_cpp(program)
        source = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.cpp"
        library = source.with_suffix(".so")
        if not library.exists():
            source.write_text(text, encoding="utf-8")
            subprocess.run(["c++", *CPP_FLAGS, str(source), "-o", str(library)], check=True)
        return str(library).encode()


def _in_cpp(program: str) -> str:
    assert program.startswith(HEADER)
    words = source_text("cuda")
    assert words in program
    text = program.removeprefix(HEADER).replace(words, "")
    text = text.replace(source_text("cuda_start"), "const int THREAD_X = thread;\n")
    signature = _SIGNATURE.search(text)
    assert signature is not None
    parameters = [one.rpartition(" ") for one in signature[2].split(", ")]
    arrays = [type_ for type_, _, _ in parameters if type_.endswith("*")]
    assert [type_ for type_, _, _ in parameters[len(arrays) :]] == ["int"] * (
        len(parameters) - len(arrays)
    )
    given = [f"({type_})arrays[{number}]" for number, type_ in enumerate(arrays)]
    given += [f"numbers[{number}]" for number in range(len(parameters) - len(arrays))]
    text = _SIGNATURE.sub(f"static void kernel_itself({signature[2]}) {{\n", text)
    for word, other in _TYPES.items():
        text = text.replace(word, other)
        given = [one.replace(word, other) for one in given]
    return (
        f'#define AS_ON_GPU 1\n#include "{THREADS}"\n{text}'
        "static void** arrays;\nstatic int* numbers;\n"
        f"static void kernel() {{ kernel_itself({', '.join(given)}); }}\n"
        'extern "C" int run(int* groups, int threads, void** all, int* sizes) {\n'
        "arrays = all;\nnumbers = sizes;\nreturn run_groups(groups, threads);\n}\n"
    )


@dataclass
class Calls:
    """Stands in for ``mx.fast.precompiled_cuda_kernel``. ``copied``: inputs not in one piece.

    ``mlx_folder``: where it looks for a kernel's code first, as MLX does.
    """

    scalars: list[list[int]] = field(default_factory=list)
    copied: int = 0
    mlx_folder: Path | None = None

    def __call__(
        self,
        *,
        name: str,
        compiled_source: bytes,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[int],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        ensure_row_contiguous: bool,
    ) -> list[mx.array]:
        assert ensure_row_contiguous and threadgroup[1:] == (1, 1)
        self.scalars.append(list(scalars))
        library = ctypes.CDLL(self._code(name, compiled_source).decode())
        held = [CppArray.of(one) for one in inputs]
        self.copied += sum(not one.is_whole for one in held)
        held = [CppArray.of(mx.contiguous(one)) for one in inputs]
        found = [CppArray.empty(*one) for one in zip(output_shapes, output_dtypes, strict=True)]
        groups = (ctypes.c_int * 3)(grid[0] // threadgroup[0], grid[1], grid[2])
        pointers: Any = [one.address for one in (*held, *found)]
        failed = library.run(
            groups,
            threadgroup[0],
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int * (len(scalars) or 1))(*scalars),
        )
        assert not failed, (name, failed)
        return [one.result(name) for one in found]

    def _code(self, name: str, given: bytes) -> bytes:
        """MLX's hash is known for no code alone; RuntimeError where there is none."""
        if self.mlx_folder is not None and not given:
            file = self.mlx_folder / f"{name}_{HASH_OF_NOTHING}.ptx"
            if file.exists():
                assert file.with_suffix(".txt").read_text("utf-8") == f"{name}\t{name}\n"
                return file.read_bytes()
        if not given:
            raise RuntimeError(f"Failed to load compiled {name} kernel: no code.")
        return given

"""Runs the kernels' bodies as C++ on a CPU; no GPU is needed.

``threads.h`` has the words of the bodies, and threads that take turns. Arrays keep the strides that
MLX gives them, and lie in memory with a margin. Floats read out of bounds are no numbers. Bytes
written out of bounds are an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Constant, Input, Output, Run, Size, View, defined
from parity.few import RUNS_ALL

# Most kernels run once, so the suite compiles fast. `make parity` runs some of them for long.
_LEVEL = "-O1" if RUNS_ALL else "-O0"
CPP_FLAGS: tuple[str, ...] = ("-std=c++17", _LEVEL, "-shared", "-fPIC", "-w")
CPP_FLAGS += ("-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
THREADS = Path(__file__).parent / "threads.h"
_MARGIN = 4096  # bytes before and after each array
_FILL = 0xFF  # a float of such bytes is no number
_TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
}
_FAULTS = {
    1: "threads of a simdgroup come to different shuffles",
    2: "a thread ends before a barrier that others wait at",
    3: "threads wait for ever",
}


@cache
def is_there_a_compiler() -> bool:
    """Whether there is a C++ compiler."""
    return shutil.which("c++") is not None


@dataclass(frozen=True)
class CppLaunch:
    """Implements ``Launch``; compiles in ``folder``.

    ``faults`` are texts of the sources and what replaces them, in which ``FAULT(n)`` is whether
    fault ``n`` is planted: that is ``fault``, None for none. ``counts`` has the runs of each body.
    ``as_on_gpu``: numbers are packed by MLX's rules on GPUs. ``is_backward``: threadgroups run from
    the last one to the first. A kernel that leaves an input changed is an error.
    """

    folder: Path
    faults: tuple[tuple[str, str], ...] = ()
    fault: int | None = None
    as_on_gpu: bool = False
    is_backward: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def __call__(self, body: Body, constants: tuple[Constant, ...]) -> Run:
        def run(
            inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
        ) -> list[mx.array]:
            arrays = [_array_of(one) for one in inputs]
            return self._run(body, constants, arrays, grid, group, outputs)

        return run

    def _run(
        self,
        body: Body,
        constants: tuple[Constant, ...],
        inputs: list[mx.array],
        grid: Size,
        group: Size,
        outputs: Sequence[Output],
    ) -> list[mx.array]:
        assert len(inputs) == len(body.inputs), body.name
        assert group[1:] == (1, 1) and grid[0] % group[0] == 0, (grid, group)
        mx.eval(inputs)
        types = [
            _TYPES[dtype]
            for dtype in (*(one.dtype for one in inputs), *(dtype for _, dtype in outputs))
        ]
        library = _compiled(self._text(body, types, constants), self.folder)
        ctypes.c_int.in_dll(library, "planted").value = -1 if self.fault is None else self.fault
        ctypes.c_int.in_dll(library, "is_backward").value = int(self.is_backward)
        arrays = [CppArray.of(one) for one in inputs]
        before = [one.memory.copy() for one in arrays]
        arrays += [CppArray.empty(*output) for output in outputs]
        groups = (ctypes.c_int * 3)(grid[0] // group[0], grid[1], grid[2])
        failed = library.run(
            groups,
            group[0],
            (ctypes.c_void_p * len(arrays))(*(one.address for one in arrays)),
            (ctypes.c_void_p * len(arrays))(*(one.layout.ctypes.data for one in arrays)),
        )
        if failed:
            raise RuntimeError(f"{body.name}: {_FAULTS[failed]}")
        for name, one, was in zip(body.inputs, arrays, before, strict=False):
            assert np.array_equal(one.memory, was), f"{body.name} changes {name}"
        self.counts[body.name] = self.counts.get(body.name, 0) + 1
        return [one.result(body.name) for one in arrays[len(inputs) :]]

    def _text(self, body: Body, types: list[str], constants: Sequence[Constant]) -> str:
        """A whole program: the body's inner part is a function, its arrays are global."""
        both = [*zip((*body.inputs, *body.outputs), types, strict=True)]
        declared = "".join(
            f"static {type_}* {name};\nstatic int64_t *{name}_shape, *{name}_strides;\n"
            for name, type_ in both
        )
        given = "".join(
            f"{name} = ({type_}*)arrays[{i}];\n{name}_shape = layouts[{i}] + 1;\n"
            f"{name}_strides = {name}_shape + layouts[{i}][0];\n"
            for i, (name, type_) in enumerate(both)
        )
        functions, source = body.functions, body.source()
        for text, other in self.faults:
            functions, source = (part.replace(text, other) for part in (functions, source))
        return (
            f'#define AS_ON_GPU {int(self.as_on_gpu)}\n#include "{THREADS}"\n'
            f"{functions}{declared}static void kernel() {{\n"
            f"const int THREAD_X = thread;\n{defined(constants, _TYPES)}{source}}}\n"
            'extern "C" int run(int* groups, int threads, void** arrays, int64_t** layouts) {\n'
            f"{given}return run_groups(groups, threads);\n}}\n"
        )


def _array_of(one: Input) -> mx.array:
    """A view, by its own word on where its numbers are."""
    if not isinstance(one, View):
        return one
    return mx.as_strided(one.whole, one.shape, one.strides, one.start)


@cache
def _compiled(text: str, folder: Path) -> ctypes.CDLL:
    source = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.cpp"
    library = source.with_suffix(".so")
    if not library.exists():
        source.write_text(text, encoding="utf-8")
        subprocess.run(["c++", *CPP_FLAGS, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class CppArray:
    """An array in memory of its own. ``layout`` is its rank, then its shape, then its strides."""

    memory: np.ndarray
    layout: np.ndarray
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> CppArray:
        """A copy with the strides that MLX has."""
        seen = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        mx.eval(seen)
        view = np.array(memoryview(seen), copy=False)
        strides = [step // view.itemsize for step in view.strides]
        span = 1 + sum((n - 1) * step for n, step in zip(view.shape, strides, strict=True))
        assert all(step >= 0 for step in strides) and view.size, strides
        flat = np.lib.stride_tricks.as_strided(view, (span,), (view.itemsize,))
        found = cls._filled(flat.nbytes, view.shape, strides, array.dtype)
        found.memory[_MARGIN : _MARGIN + flat.nbytes] = flat.view(np.uint8)
        return found

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: mx.Dtype) -> CppArray:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        return cls._filled(int(np.prod(shape)) * dtype.size, shape, strides, dtype)

    @classmethod
    def _filled(
        cls, num_bytes: int, shape: Sequence[int], strides: Sequence[int], dtype: mx.Dtype
    ) -> CppArray:
        memory = np.full(num_bytes + 2 * _MARGIN, _FILL, np.uint8)
        layout = np.array([len(shape), *shape, *strides], np.int64)
        return cls(memory, layout, dtype)

    @property
    def is_whole(self) -> bool:
        """Whether the numbers lie in one piece, in the order of the axes."""
        rank = int(self.layout[0])
        shape, strides = self.layout[1 : 1 + rank], self.layout[1 + rank :]
        wanted = [int(np.prod(shape[axis + 1 :])) for axis in range(rank)]
        three = zip(shape, strides, wanted, strict=True)
        return all(size == 1 or step == want for size, step, want in three)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data) + _MARGIN

    def result(self, name: str) -> mx.array:
        """What was written; AssertionError if any of it is out of bounds."""
        margins = self.memory[:_MARGIN], self.memory[len(self.memory) - _MARGIN :]
        assert all((margin == _FILL).all() for margin in margins), f"{name} writes out of bounds"
        rank = int(self.layout[0])
        shape = tuple(map(int, self.layout[1 : 1 + rank]))
        inner = self.memory[_MARGIN : len(self.memory) - _MARGIN].copy()
        return mx.array(inner).view(self.dtype).reshape(shape)

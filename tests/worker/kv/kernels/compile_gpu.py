# ruff: noqa: T201  (a helper that talks to a terminal)
"""Compiles the kernels for GPUs, on a machine without any. ``make kernels`` runs it.

usage: python tests/worker/kv/kernels/compile_gpu.py [cuda] [metal] [nvrtc]

``cuda`` needs nvcc. It prints what a thread of each kernel takes, for an H100 or H200: registers,
bytes of spilled ones, and memory of a threadgroup. ``metal`` needs clang, which reads Metal's words
as C++ with address spaces: a pointer into the wrong one is an error. A kernel has the signature
that MLX gives it. ``nvrtc`` needs NVIDIA's runtime compiler, and compiles the programs whose code
is kept. The exit code is 1 if one does not compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body, source_text
from batchkv_worker.kv.kernels.chunk import ChunkKernel
from batchkv_worker.kv.kernels.cuda_program import Given, program_of
from batchkv_worker.kv.kernels.draw import DrawKernel
from batchkv_worker.kv.kernels.launch import Constant, Input, Output, Run, Size, arrays_of, defined
from batchkv_worker.kv.kernels.nvrtc import CompilerError, find_compiler
from batchkv_worker.kv.kernels.residual import ResidualKernel
from batchkv_worker.kv.kernels.rotary import RotaryKernel, Turn
from worker.kv.kernels.cases import SCALE, Case, Sample, has_matrices

FOLDER = Path(__file__).parent
CASES = [
    Case(name, name, mx.bfloat16, size, size, lines, 0, False, 1, 1)
    for name, size, lines in (
        *[(name, 128, 4) for name in ("float", "affine8", "affine4", "turbo4", "turbo3")],
        *[(name, 128, 4) for name in ("affine6", "mxfp8", "mxfp4", "nvfp4")],
        *[("affine8", 64, 8), ("affine8", 256, 4), ("affine8", 128, 16), ("float", 80, 1)],
    )
]
CASES.append(Case("affine8", "affine4", mx.float32, 192, 128, 8, 2, True, 1, 1))
CASES.append(Case("affine4", "turbo3", mx.float16, 96, 96, 5, 1, False, 1, 1))
_CUDA_TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float"}
_METAL_TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.float32: "float"}
_INTEGERS = {mx.uint32: "uint32_t", mx.int32: "int32_t", mx.uint8: "uint8_t"}


Made = tuple[Body, list[mx.array], tuple[Constant, ...], Sequence[Output]]


class Recorded:
    """A ``Launch`` whose kernels write down what they are given, and return zeros."""

    def __init__(self) -> None:
        self.runs: list[Made] = []

    def __call__(self, body: Body, constants: tuple[Constant, ...]) -> Run:
        def run(
            inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
        ) -> list[mx.array]:
            self.runs.append((body, arrays_of(inputs), constants, outputs))
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return run


def runs_of(case: Case, *, is_metal: bool) -> list[Made]:
    """Each kernel of a layer with its arguments."""
    matrices = not is_metal and has_matrices(case)
    launch, sample = Recorded(), Sample.of(case, (300,))
    for form in (False, True) if matrices else (False,):
        kernels = case.kernels(launch, matrices=form)
        for longest in (256, 2000):  # one split, and several
            given = sample.queries, sample.records, sample.bounds, longest, SCALE
            kernels.attend(*given, sample.sinks, sample.partials)
        counting = case.kernels(launch, matrices=form, counts=not is_metal)
        counting.attend(*given, sample.sinks, sample.partials)
    kernels.attend_alone(sample.queries, sample.records, sample.bounds, 300, SCALE)
    token = mx.zeros((1, 2, 1, case.key_size), case.dtype)
    kernels.pack(token, mx.zeros((1, 2, 1, case.value_size), case.dtype))
    places = mx.zeros((2, 4), mx.int32)
    kernels.place_rows(places, *case.layout.split(sample.records), 1, 16)
    _run_chunks(launch, case)
    DrawKernel(launch)(mx.zeros((2, 1000)), mx.zeros((2, 5)))
    heads = mx.zeros((2, 1, 4, case.key_size), case.dtype)
    weights = heads[0, 0, 0], heads[0, 0, 1]
    turn = Turn(case.key_size, case.key_size // 4, False, (1e-6, 1e-5))
    what = weights, mx.zeros((case.key_size // 4,)), mx.zeros((2,), mx.int32)
    RotaryKernel(launch)(turn, heads, heads[:, :, :2], *what)
    of_chunk = mx.zeros((2, 3, 32, case.key_size), case.dtype)
    RotaryKernel(launch)(turn, of_chunk, of_chunk[:, :, :8], *what)
    x = mx.zeros((2, 1, 2560), case.dtype)
    ResidualKernel(launch)(x, x, x[0, 0], 1e-6)
    return list({(run[0].name, run[2]): run for run in launch.runs}.values())


def _run_chunks(launch: Recorded, case: Case) -> None:
    """The kernels that pack a chunk's tokens, if there are any for the scheme."""
    try:
        kernel = ChunkKernel.of(case.layout, launch)
    except ValueError:
        return
    keys, values = (
        mx.zeros((2, 2, 16, size), case.dtype) for size in (case.key_size, case.value_size)
    )
    prefix = case.scheme.keys.pack(keys[:1]), case.scheme.values.pack(values[:1])
    kernel.pack(keys, values)
    for before in (None, prefix):
        kernel.pack_and_give(keys, values, before, 2, 16)


def arguments(
    body: Body, types: dict[mx.Dtype, str], inputs: list[mx.array], outputs: Sequence[Output]
) -> Iterator[tuple[str, str, bool, mx.array | None]]:
    """(type, name, whether it is written, the input) of each array."""
    all_types = types | _INTEGERS
    for name, array in zip(body.inputs, inputs, strict=True):
        yield all_types[array.dtype], name, False, array
    for name, (_, dtype) in zip(body.outputs, outputs, strict=True):
        yield all_types[dtype], name, True, None


def cuda_text(
    body: Body, inputs: list[mx.array], constants: Sequence[Constant], outputs: Sequence[Output]
) -> str:
    """The program that MLX gives to NVRTC."""
    source = body.source("cuda_start")
    parameters = []
    for type_, name, is_output, _ in arguments(body, _CUDA_TYPES, inputs, outputs):
        parameters.append(f"{'' if is_output else 'const '}{type_}* {name}")
        if not is_output and f"{name}_shape" in source:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
        if not is_output and f"{name}_strides" in source:
            parameters.append(f"const __grid_constant__ Strides {name}_strides")
    return (
        f'#include "{FOLDER / "cuda_words.h"}"\n{source_text("cuda")}'
        f"{body.functions}namespace mlx::core::cu {{\n"
        f"__global__ void {body.name}({', '.join(parameters)}) {{\n"
        f"{defined(constants, _CUDA_TYPES)}{source}}}\n}}\n"
    )


def metal_text(
    body: Body, inputs: list[mx.array], constants: Sequence[Constant], outputs: Sequence[Output]
) -> str:
    """The program that MLX gives to Metal's compiler."""
    source = body.source("metal_start")
    parameters = []
    for type_, name, is_output, array in arguments(body, _METAL_TYPES, inputs, outputs):
        is_small = array is not None and array.size < 8
        space = "device" if is_output or not is_small else "constant"
        parameters.append(f"{'' if is_output else 'const '}{space} {type_}* {name}")
        for what, of in (("shape", "int"), ("strides", "int64_t")):
            if not is_output and f"{name}_{what}" in source:
                parameters.append(f"const constant {of}* {name}_{what}")
    assert len(parameters) <= 31, "Metal binds no more buffers"
    for name in ("threadgroup_position_in_grid", "threadgroups_per_grid"):
        parameters.append(f"uint3 {name}")
    parameters.append("uint3 thread_position_in_threadgroup")
    # A variable in C++'s function is static, which a pointer's type may not say.
    words = source_text("metal").replace(
        "#define LOCAL threadgroup", "#define LOCAL __attribute__((address_space(3)))"
    )
    return (
        f'#include "{FOLDER / "metal_words.h"}"\n{words}{body.functions}'
        f"kernel void {body.name}({', '.join(parameters)}) {{\n"
        f"{defined(constants, _METAL_TYPES)}{source}}}\n"
    )


def compile_cuda(text: str, folder: Path) -> str:
    """What the assembler says of a kernel; CalledProcessError if it does not compile."""
    source = folder / "kernel.cu"
    source.write_text(text, encoding="utf-8")
    flags = ["-cubin", "-arch=sm_90", "-std=c++20", "-Xptxas", "-v", "-w"]
    run = subprocess.run(
        ["nvcc", *flags, str(source), "-o", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise ValueError(run.stdout + run.stderr)
    found = re.findall(r"(\d+) (bytes spill stores|registers|bytes smem)", run.stderr)
    return ", ".join(f"{number} {what}" for number, what in found)


def compile_metal(text: str, folder: Path) -> str:
    """Reads a kernel; ValueError with the compiler's words if it is wrong."""
    source = folder / "kernel.cpp"
    source.write_text(text, encoding="utf-8")
    flags = ["-std=c++17", "-fsyntax-only", "-Xclang", "-fallow-half-arguments-and-returns"]
    run = subprocess.run(
        ["clang++", *flags, str(source)], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise ValueError(run.stdout + run.stderr)
    return "read"


def compile_nvrtc(
    body: Body, inputs: list[mx.array], constants: Sequence[Constant], outputs: Sequence[Output]
) -> str:
    """Compiles the program of a kernel whose code is kept; ValueError with what was said."""
    compiler = find_compiler()
    assert compiler is not None
    views: tuple[str, ...] = ()
    if body.name == "batchkv_rotary":
        views = "queries", "keys", "records"
    elif body.name.startswith("batchkv_chunk"):
        views = ("values",)
    given = [
        Given(one.dtype, one.ndim, name in views)
        for name, one in zip(body.inputs, inputs, strict=True)
    ]
    program = program_of(body.name, body, constants, given, [dtype for _, dtype in outputs])
    try:
        return f"{len(compiler.compile(program, body.name, 'sm_90')):,} bytes"
    except CompilerError as fault:
        raise ValueError(str(fault)) from fault


def main(dialects: Sequence[str]) -> int:
    tools = {"cuda": "nvcc", "metal": "clang++", "nvrtc": "NVRTC"}
    unknown = [dialect for dialect in dialects if dialect not in tools]
    if unknown:
        print(f"unknown dialect {unknown[0]!r}; known: {', '.join(tools)}")
        return 2
    num_wrong = 0
    for dialect in dialects or tools:
        is_there = shutil.which(tools[dialect]) or (dialect == "nvrtc" and find_compiler())
        if not is_there:
            print(f"{dialect}: {tools[dialect]} is not installed")
            continue
        for number, case in enumerate(CASES):
            runs = runs_of(case, is_metal=dialect == "metal")
            if 1 < number < len(CASES) - 2:  # others depend on the scheme alone
                runs = [run for run in runs if "splits" in run[0].name]
            for body, *rest in runs:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        if dialect == "nvrtc":
                            said = compile_nvrtc(body, *rest)
                        elif dialect == "cuda":
                            said = compile_cuda(cuda_text(body, *rest), Path(folder))
                        else:
                            said = compile_metal(metal_text(body, *rest), Path(folder))
                    except ValueError as fault:
                        num_wrong += 1
                        said = f"WRONG\n{fault}"
                where = f"{case.keys}+{case.values} {case.dtype} {case.key_size}x{case.lines}"
                print(f"{dialect}: {where} {body.name}: {said}", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

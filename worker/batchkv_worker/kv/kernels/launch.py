"""Makes kernels for a device, each once for its constants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body, included, source_text

LEAST_NUMBERS = 8  # of an array: Metal binds those of fewer in another address space

Constant = tuple[str, int | mx.Dtype]
Size = tuple[int, int, int]
Output = tuple[tuple[int, ...], mx.Dtype]

_METAL_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
CUDA_TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True, slots=True)
class View:
    """An array that is a view of ``whole``, which lies in one piece.

    Its number ``[i, j, ...]`` is number ``start + i * strides[0] + j * strides[1] + ...`` of whole.
    """

    array: mx.array
    whole: mx.array
    start: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return int(self.array.ndim)


Input: TypeAlias = mx.array | View


def arrays_of(inputs: Sequence[Input]) -> list[mx.array]:
    """The inputs, views as the arrays that they are."""
    return [one.array if isinstance(one, View) else one for one in inputs]


class Run(Protocol):
    """Runs a kernel, once for each thread of ``grid``, in threadgroups of ``group`` threads.

    Returns an array for each of ``outputs``. Inputs are read with the strides that they have. An
    input that may not lie in one piece should be a ``View``: some kernels copy other such arrays.
    """

    def __call__(
        self, inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]: ...


class Launch(Protocol):
    """Makes a kernel of a body and its constants, the same one if asked again.

    A source that does not compile raises RuntimeError, at the latest when a result is computed.
    """

    def __call__(self, body: Body, constants: tuple[Constant, ...]) -> Run: ...


@cache
def metal_launch(body: Body, constants: tuple[Constant, ...]) -> Run:
    """For Metal, whose compiler may not read files."""
    text = defined(constants, _METAL_TYPES) + body.source("metal_start")
    header = source_text("metal") + body.functions
    return _made(mx.fast.metal_kernel, body, text, header, digest_of(header + text))


@cache
def cuda_launch(body: Body, constants: tuple[Constant, ...]) -> Run:
    """For CUDA, whose compiler reads the sources' files: MLX copies a source at each call."""
    defines = defined(constants, CUDA_TYPES)
    digest = digest_of(source_text("cuda") + body.functions + defines + body.source("cuda_start"))
    header = included("cuda") + body.included_functions
    text = defines + body.included_source("cuda_start")
    return _made(mx.fast.cuda_kernel, body, text, header, digest)


def defined(constants: Sequence[Constant], types: Mapping[mx.Dtype, str]) -> str:
    """Constants as text. As arguments of a template, MLX would format them at each call."""
    return "".join(
        f"constexpr int {name} = {value};\n"
        if isinstance(value, int)
        else f"using {name} = {types[value]};\n"
        for name, value in constants
    )


def digest_of(text: str) -> str:
    """What tells sources apart: MLX keeps compiled kernels by name, on CUDA also in files."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _made(make: Any, body: Body, source: str, header: str, digest: str) -> Run:
    kernel = make(
        *(f"{body.name}_{digest}", body.inputs, body.outputs, source),
        header=header,
        ensure_row_contiguous=False,  # else each slice of the slots would be copied
    )

    def run(
        inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        found: list[mx.array] = kernel(
            inputs=arrays_of(inputs),
            grid=grid,
            threadgroup=group,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return found

    return run

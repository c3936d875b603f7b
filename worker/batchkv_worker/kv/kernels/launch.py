"""Starts the kernels on a device, each compiled once for its constants."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body, source_text

Constant = tuple[str, int | mx.Dtype]
Size = tuple[int, int, int]
Output = tuple[tuple[int, ...], mx.Dtype]


class Launch(Protocol):
    """Runs a body, once for each thread of ``grid``, in threadgroups of ``group`` threads.

    Returns an array for each of ``outputs``. Inputs are read with the strides that they have. A
    source that does not compile raises RuntimeError, at the latest when a result is computed.
    """

    def __call__(
        self,
        body: Body,
        inputs: list[mx.array],
        constants: Sequence[Constant],
        grid: Size,
        group: Size,
        outputs: Sequence[Output],
    ) -> list[mx.array]: ...


def metal_launch(
    body: Body,
    inputs: list[mx.array],
    constants: Sequence[Constant],
    grid: Size,
    group: Size,
    outputs: Sequence[Output],
) -> list[mx.array]:
    """On Metal."""
    return _run(_metal(body), inputs, constants, grid, group, outputs)


def cuda_launch(
    body: Body,
    inputs: list[mx.array],
    constants: Sequence[Constant],
    grid: Size,
    group: Size,
    outputs: Sequence[Output],
) -> list[mx.array]:
    """On CUDA."""
    return _run(_cuda(body), inputs, constants, grid, group, outputs)


@cache
def _metal(body: Body) -> Any:
    return _made(mx.fast.metal_kernel, body, "metal")


@cache
def _cuda(body: Body) -> Any:
    return _made(mx.fast.cuda_kernel, body, "cuda")


def _made(make: Any, body: Body, dialect: str) -> Any:
    source, header = body.source(f"{dialect}_start"), source_text(dialect) + body.functions
    # MLX keeps compiled kernels by their names alone, on CUDA also in files.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:8]
    return make(
        *(f"{body.name}_{digest}", body.inputs, body.outputs, source),
        header=header,
        ensure_row_contiguous=False,  # else each slice of the slots would be copied
    )


def _run(
    kernel: Any,
    inputs: list[mx.array],
    constants: Sequence[Constant],
    grid: Size,
    group: Size,
    outputs: Sequence[Output],
) -> list[mx.array]:
    found: list[mx.array] = kernel(
        inputs=inputs,
        template=constants,
        grid=grid,
        threadgroup=group,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return found

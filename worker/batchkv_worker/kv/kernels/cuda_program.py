"""The program of a kernel in CUDA's language, with sizes as numbers that are given to it.

MLX gives a kernel that it compiles the shapes and strides of its arrays. One that is compiled
already gets none. So each array lies in one piece, and the program computes its strides from its
shape; or it is a ``View``, whose strides are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body, source_text
from batchkv_worker.kv.kernels.launch import CUDA_TYPES, Constant, defined

HEADER = """\
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
"""
_INTEGERS = {
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.int64: "int64_t",
}


@dataclass(frozen=True, slots=True)
class Given:
    """What a program depends on of an input."""

    dtype: mx.Dtype
    num_axes: int
    is_view: bool


def program_of(
    name: str,
    body: Body,
    constants: Sequence[Constant],
    given: Sequence[Given],
    outputs: Sequence[mx.Dtype],
) -> str:
    """The text of a kernel. ValueError for arrays of a dtype that it has no word for."""
    source = body.source("cuda_start")
    parameters, sizes, start = [], [], ""
    for array, one in zip(body.inputs, given, strict=True):
        word = _word(one.dtype)
        parameters.append(f"const {word}* {array}{'_whole' if one.is_view else ''}")
        names = sizes_of(body, array, one)
        sizes += [f"int {size}" for size in names]
        if one.is_view:
            start += f"const {word}* {array} = {array}_whole + {array}_start;\n"
        if names:
            start += _numbers(array, names, is_view=one.is_view)
    for array, dtype in zip(body.outputs, outputs, strict=True):
        parameters.append(f"{_word(dtype)}* {array}")
    head = f'extern "C" __global__ void {name}({", ".join([*parameters, *sizes])}) {{\n'
    inside = start + defined(constants, CUDA_TYPES) + source
    return f"{HEADER}{source_text('cuda')}{body.functions}{head}{inside}}}\n"


def sizes_of(body: Body, array: str, given: Given) -> list[str]:
    """Names of the numbers that a program is given for an input."""
    source = body.source("cuda_start")
    if given.is_view:
        strides = [f"{array}_step{axis}" for axis in range(given.num_axes)]
        return [f"{array}_start", *strides]
    if f"{array}_shape" in source or f"{array}_strides" in source:
        return [f"{array}_size{axis}" for axis in range(given.num_axes)]
    return []


def _numbers(array: str, names: Sequence[str], *, is_view: bool) -> str:
    """Strides, and but for a view the shape, from the numbers of those names."""
    if is_view:
        return f"const int64_t {array}_strides[] = {{{', '.join(names[1:])}}};\n"
    strides = [" * ".join(["int64_t(1)", *names[axis:]]) for axis in range(1, len(names) + 1)]
    return (
        f"const int {array}_shape[] = {{{', '.join(names)}}};\n"
        f"const int64_t {array}_strides[] = {{{', '.join(strides)}}};\n"
    )


def _word(dtype: mx.Dtype) -> str:
    known = CUDA_TYPES | _INTEGERS
    if dtype not in known:
        raise ValueError(f"no kernel of ours reads {dtype}")
    return known[dtype]

"""Makes kernels for CUDA from kept machine code, which no later process has to compile.

MLX's own way (``launch.cuda_launch``) compiles each kernel for two seconds in every process. It
serves where NVIDIA's compiler or its headers are not found.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from batchkv_worker.kept_files import KERNELS
from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.cuda_program import Given, program_of, sizes_of
from batchkv_worker.kv.kernels.kept_code import KeptCode
from batchkv_worker.kv.kernels.launch import (
    Constant,
    Input,
    Launch,
    Output,
    Run,
    Size,
    View,
    cuda_launch,
)
from batchkv_worker.kv.kernels.named_code import NO_CODE, NamedCode
from batchkv_worker.kv.kernels.nvrtc import Compiler, CompilerError, find_compiler

log = logging.getLogger("batchkv.engine")

_NAME = "NAME"  # in a text whose digest is a part of the name
_TRIAL = Body("batchkv_trial", ("trial",), ("given",), ("found",))
_THREADS = 32  # of the trial


@cache
def launch_for(home: Path | None, mlx_folder: Path | None = None) -> Launch:
    """What makes kernels on this machine. Code is kept in a folder of ``home``; None: nowhere.

    ``mlx_folder`` is where MLX keeps what it compiles, if it may have files of ours. The first call
    computes.
    """
    compiler, architecture = find_compiler(), str(mx.device_info().get("architecture", ""))
    has_call = hasattr(mx.fast, "precompiled_cuda_kernel")
    if compiler is None or not has_call or not re.fullmatch(r"sm_\d+a?", architecture):
        log.debug("MLX compiles the kernels, for %s", architecture or "a device without a name")
        return cuda_launch
    launch = CompiledLaunch(compiler, architecture, KeptCode(home and home / KERNELS))
    if mlx_folder is None:
        return launch
    by_name = replace(launch, named=NamedCode(mlx_folder), runs={})
    return by_name if _is_right(by_name) else launch


def _is_right(launch: CompiledLaunch) -> bool:
    """Whether a kernel of ``launch`` gives what it should, without being given any code."""
    given, size = mx.arange(_THREADS, dtype=mx.int32), (_THREADS, 1, 1)
    run = CompiledRun(launch, _TRIAL, ())
    try:
        (found,) = run([given], size, size, [(given.shape, given.dtype)])
        is_right = run.gives_no_code and bool(mx.array_equal(found, given + 1))
    except (RuntimeError, ValueError, TypeError) as fault:
        log.debug("a kernel whose code MLX has to find fails: %s", fault)
        return False
    log.debug("MLX %s code by a kernel's name", "finds" if is_right else "does not find")
    return is_right


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """Implements ``Launch``. A program depends on its arrays' dtypes: the first call makes it.

    ``named``: calls give MLX no code, where it is kept there.
    """

    compiler: Compiler
    architecture: str
    kept: KeptCode
    named: NamedCode | None = None
    runs: dict[tuple[Body, tuple[Constant, ...]], Run] = field(default_factory=dict, repr=False)

    def __call__(self, body: Body, constants: tuple[Constant, ...]) -> Run:
        key = body, constants
        if key not in self.runs:
            self.runs[key] = CompiledRun(self, body, constants)
        return self.runs[key]

    def made(
        self, body: Body, constants: tuple[Constant, ...], given: Sequence[Given],
        outputs: Sequence[mx.Dtype],
    ) -> Made:  # fmt: skip
        """The kernel for such arrays. Raises CompilerError."""
        text = program_of(_NAME, body, constants, given, outputs)
        facts = "\0".join([text, self.architecture, self.compiler.version])
        digest = hashlib.sha256(facts.encode()).hexdigest()[:32]
        name = f"{body.name}_{digest}"  # MLX knows kernels by their names alone
        program = program_of(name, body, constants, given, outputs)
        code = self.kept.of(digest, lambda: self.compiler.compile(program, name, self.architecture))
        if self.named is not None and self.named.keep(name, code):
            code = NO_CODE
        are_sized = zip(body.inputs, given, strict=True)
        return Made(name, code, tuple(bool(sizes_of(body, *one)) for one in are_sized))


@dataclass(frozen=True, slots=True)
class Made:
    """A kernel, with what is given of its ``code``.

    ``are_sized``: whether it is given numbers for each of its inputs.
    """

    name: str
    code: bytes
    are_sized: tuple[bool, ...]

    def numbers(self, inputs: Sequence[Input]) -> list[int]:
        """The numbers, in the order of ``cuda_program.sizes_of``."""
        found: list[int] = []
        for one, is_sized in zip(inputs, self.are_sized, strict=True):
            if type(one) is View:
                found += (one.start, *one.strides)
            elif is_sized:
                found += one.shape
        return found


class CompiledRun:
    """Implements ``Run``. An input that is no ``View`` is copied unless it lies in one piece.

    Where the compiler refuses the program, MLX compiles its own, as without kept code.
    """

    def __init__(self, launch: CompiledLaunch, body: Body, constants: tuple[Constant, ...]) -> None:
        self._launch, self._body, self._constants = launch, body, constants
        self._made: dict[Any, Made | None] = {}

    @property
    def gives_no_code(self) -> bool:
        """Whether MLX has to find the code of all kernels that were made."""
        return all(made is not None and made.code == NO_CODE for made in self._made.values())

    def __call__(
        self, inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        # Called in each layer of a step that is not replayed, so it does little.
        key = tuple([(one.dtype, one.ndim, type(one)) for one in inputs])
        if key not in self._made:
            self._made[key] = self._make(inputs, outputs)
        made = self._made[key]
        if made is None:
            return cuda_launch(self._body, self._constants)(inputs, grid, group, outputs)
        found: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=made.name,
            compiled_source=made.code,
            inputs=[one.whole if type(one) is View else one for one in inputs],
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            scalars=made.numbers(inputs),
            grid=grid,
            threadgroup=group,
            ensure_row_contiguous=True,
        )
        return found

    def _make(self, inputs: Sequence[Input], outputs: Sequence[Output]) -> Made | None:
        given = [Given(one.dtype, one.ndim, isinstance(one, View)) for one in inputs]
        dtypes = [dtype for _, dtype in outputs]
        try:
            return self._launch.made(self._body, self._constants, given, dtypes)
        except CompilerError as fault:
            log.warning("MLX compiles %s in each process: %s", self._body.name, fault)
            return None

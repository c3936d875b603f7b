"""Residual sums and the norms that follow them, by one kernel for a decode step or a chunk.

Most models have blocks of two parts, attention and an MLP. Each part reads the norm of its input
and adds its result to that input. So a block has two sums, and a norm comes after each: its own
second one, then the first of the next block. Here a block computes each sum together with the norm.

Blocks are found by the names that mlx-lm's models have in common, and by running. With the same
operations in our blocks, the model must give the same numbers as before: one that does more between
a sum and a norm does not. With the kernel it must give the same answers, for steps and for chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.compare import CLOSE, are_close, difference
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.measurements import (
    RESIDUAL_AGREES,
    RESIDUAL_CHUNKS,
    RESIDUAL_STEPS,
    YES_OR_NO,
    Measurements,
)
from batchkv_worker.kv.backends.rebind import kept_if_right, swap_class, undo_all
from batchkv_worker.kv.backends.timing import gain
from batchkv_worker.kv.kernels.launch import Launch
from batchkv_worker.kv.kernels.residual import MOST_SIZE, ResidualKernel
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS

log = logging.getLogger("batchkv.engine")

CHUNK_TOKENS = 256  # of each row of the chunks that are timed
CHUNKS = ((4, 4), (16, 1))  # their rows, and how many sums are timed together
_STEPS = 16  # sums of steps that are timed together
_MARGIN = 1.02  # by which the kernel has to be faster
_LEAST = 0.98  # how many times as fast it must be in the larger chunk
_SAME = 1e-5  # share of the largest number by which the same operations may differ
_TOKENS = ((1, 3, 2, 1), (2, 0, 1, 3))  # of two rows
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")

# A model may do with its blocks what they do not expect, and fail in any of these ways.
_FAULTS = (
    *(ValueError, RuntimeError, TypeError, AttributeError, LookupError, AssertionError),
    *(MemoryError, NameError, ArithmeticError),
)


class Sums:
    """Adds and normalizes for all blocks of a model, and keeps the last block's norm for the next.

    ``takes_steps`` and ``takes_chunks``: whether one kernel does so for one token a row, and for
    several.
    """

    def __init__(self, kernel: ResidualKernel, *, takes_steps: bool, takes_chunks: bool) -> None:
        self._kernel = kernel
        self.takes_steps, self.takes_chunks = takes_steps, takes_chunks
        self._kept: tuple[mx.array, Any, mx.array] | None = None  # a sum, a norm, its result
        self.num_sums = 0

    def add(self, x: mx.array, added: mx.array, norm: Any) -> tuple[mx.array, mx.array | None]:
        """``x + added``, and what ``norm`` gives for it, unless it must be computed apart."""
        if type(norm) not in _NORMS or x.ndim != 3:
            return x + added, None
        weight = norm.weight
        is_alike = x.dtype == added.dtype == weight.dtype and x.shape == added.shape
        if not is_alike or weight.shape != x.shape[-1:]:
            return x + added, None
        if not (self.takes_steps if x.shape[1] == 1 else self.takes_chunks):
            return x + added, None
        self.num_sums += 1
        return self._kernel(x, added, weight, norm.eps)

    def keep(self, total: mx.array, norm: Any, normed: mx.array | None) -> None:
        """Keep what ``norm`` gives for a sum until it is asked for.

        The sum must stay as it is: an array that ``+=`` changes is the same object to Python.
        """
        self._kept = None if normed is None else (total, norm, normed)

    def take(self, x: mx.array, norm: Any) -> mx.array | None:
        """What was kept, if it is this norm's result for this array. It is kept no longer."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not x or kept[1] is not norm:
            return None
        return kept[2]


@dataclass(frozen=True, slots=True)
class _Place:
    """What a block needs: all sums of its model, and the norm that comes after its own."""

    sums: Sums
    next_norm: Any


class _Block:
    """A block at a ``_place``; comes before the model's own class."""

    _place: _Place

    def __call__(self: Any, x: mx.array, *args: Any, **named: Any) -> mx.array:
        sums, after = self._place.sums, self._place.next_norm
        first, second = self.input_layernorm, self.post_attention_layernorm
        normed = sums.take(x, first)
        more = self.self_attn(first(x) if normed is None else normed, *args, **named)
        x, normed = sums.add(x, more, second)
        more = self.mlp(second(x) if normed is None else normed)
        if after is None:
            return x + more
        x, normed = sums.add(x, more, after)
        sums.keep(x, after, normed)
        return x


class LastNorm(nn.RMSNorm):  # type: ignore[misc]  # MLX has no types
    """The norm after the last block, of ``_sums``."""

    _sums: Sums

    def __call__(self, x: mx.array) -> mx.array:
        normed = self._sums.take(x, self)
        return super().__call__(x) if normed is None else normed


_NORMS = (nn.RMSNorm, LastNorm)


@dataclass(frozen=True)
class FuseResiduals:
    """Blocks whose sums and norms one kernel computes, in steps, in chunks, or in both.

    If the device refuses this, or then gives other answers, the model computes as before. Answers
    are compared once; ``measurements`` keep the outcome.
    """

    launch: Launch
    takes_steps: bool
    takes_chunks: bool
    measurements: Measurements = field(default_factory=Measurements, repr=False)

    def install(self, model: Any) -> Undo:
        done: list[Undo] = []
        form = f"{int(self.takes_steps)}{int(self.takes_chunks)}"

        def agrees() -> bool:
            before = _logits(model)
            sums = self._fuse(model, done)
            sums.takes_steps = sums.takes_chunks = False
            apart = difference(before, _logits(model))
            if apart > _SAME:
                log.debug("blocks do more than sums and norms: %.2g apart", apart)
                return False
            sums.takes_steps, sums.takes_chunks = self.takes_steps, self.takes_chunks
            apart = difference(before, _logits(model))
            log.debug("sums and norms by one kernel: %.2g apart", apart)
            return apart <= CLOSE and sums.num_sums > 0

        def attempt() -> bool:
            is_right = self.measurements.of(f"{RESIDUAL_AGREES}, {form}", agrees, YES_OR_NO)
            if is_right and not done:  # by a stored result
                self._fuse(model, done)
            return is_right

        said = "sums and norms are not computed by one kernel: %s"
        try:
            undo = kept_if_right(attempt, done, _FAULTS, partial(log.info, said))
        finally:
            VALUE_PARTS.clear()
        if undo is None:
            return undo_all([])
        log.info("%d blocks have sums and norms by one kernel", num_blocks(model))
        return undo

    def _fuse(self, model: Any, done: list[Undo]) -> Sums:
        sums = Sums(
            ResidualKernel(self.launch),
            takes_steps=self.takes_steps,
            takes_chunks=self.takes_chunks,
        )
        for blocks, last in _stacks(model):
            firsts = [*(block.input_layernorm for block in blocks[1:]), last]
            for block, after in zip(blocks, firsts, strict=True):
                done.append(swap_class(block, _fused(type(block)), _place=_Place(sums, after)))
            if last is not None:
                done.append(swap_class(last, LastNorm, _sums=sums))
        return sums


_FUSED: dict[Any, type[Any]] = {}


def _fused(kind: Any) -> type[Any]:
    """The class of such blocks with their sums and norms by one kernel."""
    if kind not in _FUSED:
        _FUSED[kind] = type(kind.__name__, (_Block, kind), {"__module__": kind.__module__})
    return _FUSED[kind]


def choose(
    model: Any, rows: int, launch: Launch, measurements: Measurements
) -> FuseResiduals | None:
    """Where sums and norms are faster by one kernel, for steps of ``rows`` rows and for chunks."""
    norms = [block.post_attention_layernorm for blocks, _ in _stacks(model) for block in blocks]
    if not norms:
        return None

    def may_try(what: str) -> bool:
        # The kernel is new, and a fault of it could end each start.
        if measurements.begin_try(f"unfinished tries of the residual kernel in {what}"):
            return True
        log.warning(
            "the kernel for residual sums is not used: earlier starts ended while it was tried; "
            "`batchkv tune` tries it again"
        )
        return False

    def in_steps() -> bool:
        return may_try("steps") and _gain(norms[0], launch, rows, 1, _STEPS) > _MARGIN

    def in_chunks() -> bool:
        if not may_try("chunks"):
            return False
        small, large = (
            _gain(norms[0], launch, rows, CHUNK_TOKENS, times) for rows, times in CHUNKS
        )
        return small > _MARGIN and large > _LEAST

    try:
        takes_steps = measurements.of(RESIDUAL_STEPS, in_steps, YES_OR_NO)
        takes_chunks = measurements.of(RESIDUAL_CHUNKS, in_chunks, YES_OR_NO)
    except _FAULTS as fault:
        if is_device_fault(fault):
            raise
        log.warning("sums and norms are not computed by one kernel: %s", fault)
        return None
    finally:
        mx.clear_cache()  # no memory limit counts what was timed
    if not takes_steps and not takes_chunks:
        return None
    return FuseResiduals(launch, takes_steps, takes_chunks, measurements)


def num_blocks(model: Any) -> int:
    """How many blocks of a model have their sums and norms by one kernel."""
    return sum(isinstance(module, _Block) for module in model.modules())


def _stacks(model: Any) -> Iterator[tuple[list[Any], Any]]:
    """Blocks that follow each other, and the norm after the last of them, or None."""
    for module in model.modules():
        blocks = module.get("layers")
        if isinstance(blocks, list) and blocks and all(map(_is_block, blocks)):
            last = module.get("norm")
            yield blocks, last if type(last) is nn.RMSNorm else None


def _is_block(module: Any) -> bool:
    """Whether it has the parts of a block, and norms for which there is a kernel."""
    if not isinstance(module, nn.Module) or not all(name in module for name in _PARTS):
        return False
    norms = module.input_layernorm, module.post_attention_layernorm
    sizes = {int(norm.weight.size) for norm in norms if type(norm) is nn.RMSNorm}
    return all(type(norm) is nn.RMSNorm for norm in norms) and max(sizes) <= MOST_SIZE


def _gain(norm: Any, launch: Launch, rows: int, tokens: int, times: int) -> float:
    """How many times as long MLX takes for such rows and tokens; 0 for other results.

    Each sum needs the one before, as in a model: a device would compute others at the same time.
    Graphs of steps are replayed, and those of chunks are built anew.
    """
    weight, kernel = norm.weight, ResidualKernel(launch)
    shape = rows, tokens, int(weight.size)
    x, added = (mx.random.normal(shape).astype(weight.dtype) for _ in range(2))
    mx.eval(x, added)

    def apart(x: mx.array, added: mx.array) -> tuple[mx.array, mx.array]:
        total = x + added
        return total, mx.fast.rms_norm(total, weight, norm.eps)

    def at_once(x: mx.array, added: mx.array) -> tuple[mx.array, mx.array]:
        return kernel(x, added, weight, norm.eps)

    def chain(way: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]) -> list[mx.array]:
        found = [*way(x, added)]
        for _ in range(times - 1):
            found += way(*found[-2:])
        return found

    won = gain(partial(chain, apart), partial(chain, at_once), is_built=tokens == 1)
    log.debug("%d tokens: sums and norms are %.2f times as fast by one kernel", rows * tokens, won)
    return won if won and all(map(are_close, apart(x, added), at_once(x, added))) else 0.0


def _logits(model: Any) -> mx.array:
    """The model's outputs for a chunk of a few tokens of two rows, and for one more of each."""
    cache = make_prompt_cache(model)
    tokens = mx.array(_TOKENS)
    logits = [model(tokens, cache=cache), model(tokens[:, :1], cache=cache)]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)

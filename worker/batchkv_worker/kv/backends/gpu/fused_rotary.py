"""Norms and rotary positions of queries and keys, by one kernel for a decode step or a chunk.

Models like Qwen3 normalize each head's queries and keys, and turn them by their position: four
kernels in each layer, which a GPU's host takes longer to launch than the device takes. Here the
norms give their input on as it is, and the first call for positions computes all four results.
Chunks of prompts are computed so, too, where that is faster (``rotary_chunks``).

Layers that do so are found by running one token through the model, not by their names. A norm's
numbers must reach the positions unchanged, in any layout. That is compared once, with the model as
it was. Where a call turns out not to be a decode step's, the norm is computed with the positions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.gpu.fused_linear import Groups, folder_of, group_in
from batchkv_worker.kv.backends.gpu.rotary_chunks import are_faster
from batchkv_worker.kv.backends.gpu.rotary_heads import FusedRope, Heads, HeldNorm
from batchkv_worker.kv.backends.gpu.rotary_layers import (
    OF_ATTENTION,
    Names,
    faster_layers,
)
from batchkv_worker.kv.backends.measurements import (
    ROTARY_AGREES,
    ROTARY_CHUNKS,
    ROTARY_CHUNKS_AGREE,
    ROTARY_LAYERS,
    ROTARY_VALUES,
    YES_OR_NO,
    Codec,
    Measurements,
)
from batchkv_worker.kv.backends.rebind import kept_if_right, swap_class, undo_all
from batchkv_worker.kv.kernels.launch import Launch, View
from batchkv_worker.kv.kernels.rotary import RotaryKernel
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS

log = logging.getLogger("batchkv.engine")

_TOKENS = ((1, 3, 2, 1), (2, 0, 1, 3))  # of two rows, one after the other

# A model may take its cache for another than the comparison's, and fail in any of these ways.
_FAULTS = (ValueError, RuntimeError, TypeError, AttributeError, LookupError, AssertionError)


@dataclass(frozen=True)
class FuseRotary:
    """Layers, by their names, whose queries and keys one kernel computes in decode steps.

    If the device refuses this, or then gives other answers, the model computes as before. Answers
    are compared once, for ``rows`` rows; ``measurements`` keep the outcome. So it is for chunks,
    with ``takes_chunks``.
    """

    layers: tuple[Names, ...]
    launch: Launch
    measurements: Measurements = field(default_factory=Measurements, repr=False)
    rows: int = len(_TOKENS)
    takes_chunks: bool = False

    def install(self, model: Any) -> Undo:
        done: list[Undo] = [VALUE_PARTS.clear]

        def agrees() -> bool:
            before = _logits(model, self.rows)
            heads = self._fuse(model, done)
            after = _logits(model, self.rows)
            return are_close(before, after) and all(one.num_fused for one in heads)

        def attempt() -> bool:
            is_right = self.measurements.of(
                f"{ROTARY_AGREES}, {self._joint_of(model)}", agrees, YES_OR_NO
            )
            if not is_right:
                log.warning("one kernel for norms and positions does not agree: not used")
                return False
            if len(done) == 1:  # by a stored result
                self._fuse(model, done)
            self._give_values(model)
            self._take_chunks(model)
            return True

        said = "norms and positions are not computed by one kernel: %s"
        undo = kept_if_right(attempt, done, _FAULTS, partial(log.warning, said))
        if undo is None:
            return undo_all([])
        log.info("%d layers have norms and positions by one kernel", len(self.layers))
        return undo

    def _joint_of(self, model: Any) -> str:
        """In how many layers fused layers give queries and keys: answers are kept for that."""
        modules = dict(model.named_modules())
        num_joint = sum(group_in(modules, folder_of(one[0])) is not None for one in self.layers)
        return f"{num_joint} of {len(self.layers)}"

    def _give_values(self, model: Any) -> None:
        """If values come to caches as the fused layers gave them, tell where these are.

        This saves copies alone. A model in which it cannot be found out does without.
        """
        heads = [one._heads for one in model.modules() if isinstance(one, FusedRope)]
        found = [one for one in heads if one.may_give_values]

        def are_parts() -> bool:
            seen: list[bool] = []
            _logits(model, self.rows, seen)
            return len(seen) == len(found) * len(_TOKENS[0]) and all(seen)

        for one in found:
            one.gives_values = True
        is_so = False
        try:
            is_so = bool(found) and self.measurements.of(ROTARY_VALUES, are_parts, YES_OR_NO)
        except _FAULTS as fault:
            if is_device_fault(fault):
                raise
            log.debug("where values come from is not known: %s", fault)
        finally:
            VALUE_PARTS.clear()
            for one in found:
                one.gives_values = is_so

    def _take_chunks(self, model: Any) -> None:
        """Compute chunks by the kernel, too, if that is faster and gives the same answers."""
        heads = [one._heads for one in model.modules() if isinstance(one, FusedRope)]

        def agree() -> bool:
            before = _chunk_logits(model, self.rows)
            for one in heads:
                one.take_chunks(True)
            seen: list[bool] = []
            after = _chunk_logits(model, self.rows, seen)
            is_close = are_close(before, after) and all(seen)  # values are as in steps, too
            return is_close and all(one.num_chunks for one in heads)

        is_right = False
        try:
            # That they are faster was timed with a product for queries, keys and values.
            may_be = self.takes_chunks and all(one.may_give_values for one in heads)
            name = f"{ROTARY_CHUNKS_AGREE}, {self._joint_of(model)}"
            is_right = may_be and self.measurements.of(name, agree, YES_OR_NO)
            if is_right != may_be:
                log.warning("one kernel for norms and positions of chunks does not agree: not used")
        except _FAULTS as fault:
            if is_device_fault(fault):
                raise
            log.warning("norms and positions of chunks are not computed by one kernel: %s", fault)
        finally:
            VALUE_PARTS.clear()
            for one in heads:
                one.take_chunks(is_right)

    def _fuse(self, model: Any, done: list[Undo]) -> list[Heads]:
        modules = dict(model.named_modules())
        kernel, found = RotaryKernel(self.launch), []
        for query, key, rope in self.layers:
            norms = modules[query], modules[key]
            group, count = group_in(modules, folder_of(query)) or (None, 0)
            heads = Heads(norms, modules[rope], kernel, group)
            heads.may_give_values = count == OF_ATTENTION
            if group is not None:
                group.keeps_whole = True
                done.append(partial(setattr, group, "keeps_whole", False))
                done.append(partial(setattr, group, "takes_chunks", False))
            for place, norm in enumerate(norms):
                done.append(swap_class(norm, HeldNorm, _heads=heads, _place=place))
            done.append(swap_class(modules[rope], FusedRope, _heads=heads))
            found.append(heads)
        return found


def choose(
    model: Any,
    rows: int,
    launch: Launch,
    measurements: Measurements,
    groups: Groups = (),
) -> FuseRotary | None:
    """The layers whose norms and positions are faster at once, for steps of ``rows`` rows.

    ``groups`` are the linear layers that will be multiplied at once.
    """
    layers: tuple[Names, ...] = ()
    try:
        layers = measurements.of(
            ROTARY_LAYERS, lambda: faster_layers(model, rows, launch, groups), _layers_codec(model)
        )
    except _FAULTS as fault:
        if is_device_fault(fault):
            raise
        log.warning("norms and positions are not computed by one kernel: %s", fault)
    if not layers:
        return None
    takes_chunks = False
    try:
        takes_chunks = measurements.of(
            ROTARY_CHUNKS, lambda: are_faster(model, layers, groups, launch), YES_OR_NO
        )
    except _FAULTS as fault:
        if is_device_fault(fault):
            raise
        log.warning("norms and positions of chunks are not computed by one kernel: %s", fault)
    return FuseRotary(layers, launch, measurements, min(rows, len(_TOKENS)), takes_chunks)


def _layers_codec(model: Any) -> Codec[tuple[Names, ...]]:
    """Layers as lists of names, each of a module that the model has."""

    def read(value: Any) -> tuple[Names, ...]:
        modules = dict(model.named_modules())
        found = []
        for query, key, rope in value:
            kinds = type(modules[query]), type(modules[key]), type(modules[rope])
            if kinds != (nn.RMSNorm, nn.RMSNorm, nn.RoPE):
                raise ValueError("it names modules of other kinds")
            found.append((str(query), str(key), str(rope)))
        return tuple(found)

    return Codec(lambda layers: [list(names) for names in layers], read)


# -- whether they are right


class _Seeing:
    """A model's cache; ``seen`` gets whether values that ``VALUE_PARTS`` knows are there."""

    def __init__(self, cache: Any, seen: list[bool] | None = None) -> None:
        self._cache, self._seen = cache, seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        one = VALUE_PARTS.of(keys, values)
        if self._seen is not None and isinstance(one, View):
            there = mx.as_strided(one.whole, one.shape, one.strides, one.start)
            self._seen.append(bool(mx.array_equal(there, values).item()))
        return self._cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _ByRow(_Seeing):
    """A cache whose rows have a position each, as decode slots have."""

    def __init__(self, cache: Any, rows: int, seen: list[bool] | None = None) -> None:
        super().__init__(cache, seen)
        self._rows = rows

    @property
    def offset(self) -> mx.array:
        return mx.full((self._rows,), self._cache.offset, mx.int32)


def _chunk_logits(model: Any, rows: int, seen: list[bool] | None = None) -> mx.array:
    """The model's outputs for two chunks of these tokens of some rows."""
    cache = [
        _Seeing(one, seen) if isinstance(one, KVCache | RotatingKVCache) else one
        for one in make_prompt_cache(model)
    ]
    tokens = mx.array(_TOKENS[:rows])
    logits = [model(tokens, cache=cache) for _ in range(2)]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


def _logits(model: Any, rows: int, seen: list[bool] | None = None) -> mx.array:
    """The model's outputs for a few tokens of some rows, one by one, as in decode steps."""
    cache = [
        _ByRow(one, rows, seen) if isinstance(one, KVCache | RotatingKVCache) else one
        for one in make_prompt_cache(model)
    ]
    logits = [
        model(mx.array(tokens)[:, None], cache=cache)
        for tokens in zip(*_TOKENS[:rows], strict=True)
    ]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)

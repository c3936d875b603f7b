"""Measures the time of a decode step under a scheme and under float, alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.growth import STEP
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.kv.types import Pieces
from batchkv_worker.report.results import Timing

ROUNDS = 5  # of both sides; their median counts
_SAMPLE_SECONDS = 0.05  # at least so long one side runs before the other
_MOST_STEPS = 16
DENSE = "dense"  # the path of a model that reads dense keys and values

# A call of ``attend`` of a layer's cache in a step: queries, their scale, sinks.
_AttendCall = tuple[mx.array, float, mx.array | None]


@dataclass(frozen=True, slots=True)
class _LayerStep:
    """One layer's part of a step: the keys and values to write, and the calls of ``attend``.

    Without calls the model reads dense keys and values and computes attention itself.
    """

    layer: AttentionSlots
    path: str
    keys: mx.array
    values: mx.array
    calls: list[_AttendCall]

    def outputs(self) -> list[mx.array]:
        """Write the keys and values, and compute attention."""
        dense = self.layer.update_and_fetch(self.keys, self.values)
        if not self.calls:
            return list(dense)
        return [
            self.layer._attend(queries, scale, None, sinks) for queries, scale, sinks in self.calls
        ]


class Decoding:
    """Equal rows that decode under one plan: every slot holds a copy of one row's pieces."""

    def __init__(
        self, model: Any, plan: KvPlan, rows: int, pieces: Sequence[Pieces], length: int
    ) -> None:
        self._model = model
        self._slots = plan.slots(rows)
        for _ in range(rows):
            self._slots.admit(Demand(length, STEP), pieces)
        self._layers = self._record_step(plan)

    @property
    def has_attention(self) -> bool:
        """Whether a layer keeps keys and values."""
        return bool(self._layers)

    @property
    def paths(self) -> tuple[str, ...]:
        """The ways in which the layers compute attention, each once."""
        taken = (step.path if step.calls else DENSE for step in self._layers)
        return tuple(dict.fromkeys(taken))

    def step(self) -> None:
        """Compute one token a row with the whole model."""
        view = self._slots.begin_step()
        tokens = mx.ones((view.num_rows, 1), mx.int32)
        logits = self._slots.forward(self._model, tokens)[:, -1]
        self._slots.end_step()
        mx.eval(logits, self._slots.arrays)

    def attention(self) -> None:
        """Compute the caches' part of a step only: pack one token a row, and attend."""
        self._slots.begin_step()
        outputs = [output for step in self._layers for output in step.outputs()]
        self._slots.end_step()
        mx.eval(outputs, self._slots.arrays)

    def _record_step(self, plan: KvPlan) -> list[_LayerStep]:
        """Run a step and record the calls of each layer."""
        rows = self._slots.layouts.num_active
        steps = [
            _LayerStep(layer, kind.path or DENSE, *_random_token(kind, rows), [])
            for kind, layer in zip(plan.kinds, self._slots.layers, strict=True)
            if isinstance(kind, AttentionKind) and isinstance(layer, AttentionSlots)
        ]
        original = AttentionSlots._attend
        AttentionSlots._attend = _recording(steps, original)  # type: ignore[method-assign]
        try:
            self.step()
        finally:
            AttentionSlots._attend = original  # type: ignore[method-assign]
        mx.eval([queries for step in steps for queries, _, _ in step.calls])
        return steps


def _recording(steps: list[_LayerStep], original: Callable[..., mx.array]) -> Callable[..., Any]:
    """``AttentionSlots._attend`` that also records its arguments in ``steps``."""
    calls = {id(step.layer): step.calls for step in steps}

    def attend(
        layer: AttentionSlots, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        calls[id(layer)].append((queries, scale, sinks))
        return original(layer, queries, scale, mask, sinks)

    return attend


def _random_token(kind: AttentionKind, rows: int) -> tuple[mx.array, mx.array]:
    """Random keys and values of one token a row."""
    shape = kind.scheme.shape
    keys, values = (
        mx.random.normal((rows, shape.num_heads, 1, size)).astype(kind.dtype)
        for size in (shape.key_size, shape.value_size)
    )
    mx.eval(keys, values)
    return keys, values


def in_turns(run: Callable[[], None], baseline: Callable[[], None]) -> Timing:
    """Time both sides alternately, ``ROUNDS`` times, so that other load affects both."""
    sides = [(side, _steps(side)) for side in (run, baseline)]
    spent: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for times, (side, steps) in zip(spent, sides, strict=True):
            times.append(_seconds(side, steps) / steps)
    own, other = (1e3 * statistics.median(times) for times in spent)
    return Timing(own, other)


def _steps(side: Callable[[], None]) -> int:
    """The number of steps in a sample; the first step compiles kernels and does not count."""
    side()
    return max(1, min(_MOST_STEPS, round(_SAMPLE_SECONDS / max(_seconds(side, 1), 1e-6))))


def _seconds(side: Callable[[], None], steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        side()
    return time.perf_counter() - begin

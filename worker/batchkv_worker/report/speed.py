"""What a decode step costs under a scheme, against float: both sides in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.growth import STEP
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.kv.types import Pieces
from batchkv_worker.report.results import Timing

ROUNDS = 5  # of both sides, of which the median is taken
_SAMPLE_SECONDS = 0.05  # that one side works at least, before it is the other's turn
_MOST_STEPS = 16
DENSE = "dense"  # the path of a model that reads dense keys and values

# What a model asks of a layer's cache in a step: queries, their scale, sinks.
_Question = tuple[mx.array, float, mx.array | None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One layer's part of a step: what is written, and the questions of ``attend``.

    Without questions the model reads dense keys and values and computes attention itself.
    """

    layer: AttentionSlots
    path: str
    keys: mx.array
    values: mx.array
    questions: list[_Question]

    def answers(self) -> list[mx.array]:
        dense = self.layer.update_and_fetch(self.keys, self.values)
        if not self.questions:
            return list(dense)
        return [
            self.layer._attend(queries, scale, None, sinks)
            for queries, scale, sinks in self.questions
        ]


class Decoding:
    """Rows that decode under one plan, all alike: one row's pieces admitted to every slot."""

    def __init__(
        self, model: Any, plan: KvPlan, rows: int, pieces: Sequence[Pieces], length: int
    ) -> None:
        self._model = model
        self._slots = DecodeSlots(plan.backend, plan.kinds, plan.tree, rows, plan.shapes)
        for _ in range(rows):
            self._slots.admit(Demand(length, STEP), pieces)
        self._asked = self._ask(plan)

    @property
    def has_attention(self) -> bool:
        """Whether a layer keeps keys and values."""
        return bool(self._asked)

    @property
    def paths(self) -> tuple[str, ...]:
        """How attention is computed, layer by layer, each way once."""
        taken = (asked.path if asked.questions else DENSE for asked in self._asked)
        return tuple(dict.fromkeys(taken))

    def step(self) -> None:
        """One token a row through the whole model."""
        frame = self._slots.begin_step()
        tokens = mx.ones((frame.num_rows, 1), mx.int32)
        logits = self._model(tokens, cache=self._slots.model_cache)[:, -1]
        self._slots.end_step()
        mx.eval(logits, self._slots.arrays)

    def attention(self) -> None:
        """The caches' part of a step alone: packing one token a row, and answering ``attend``."""
        self._slots.begin_step()
        answers = [answer for asked in self._asked for answer in asked.answers()]
        self._slots.end_step()
        mx.eval(answers, self._slots.arrays)

    def _ask(self, plan: KvPlan) -> list[_Asked]:
        """Run a step and note what the model asks of each layer."""
        rows = self._slots.layouts.num_active
        asked = [
            _Asked(layer, kind.path or DENSE, *_random_token(kind, rows), [])
            for kind, layer in zip(plan.kinds, self._slots.layers, strict=True)
            if isinstance(kind, AttentionKind) and isinstance(layer, AttentionSlots)
        ]
        original = AttentionSlots._attend
        AttentionSlots._attend = _noting(asked, original)  # type: ignore[method-assign]
        try:
            self.step()
        finally:
            AttentionSlots._attend = original  # type: ignore[method-assign]
        mx.eval([queries for one in asked for queries, _, _ in one.questions])
        return asked


def _noting(asked: list[_Asked], original: Callable[..., mx.array]) -> Callable[..., Any]:
    questions = {id(one.layer): one.questions for one in asked}

    def attend(
        layer: AttentionSlots, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        questions[id(layer)].append((queries, scale, sinks))
        return original(layer, queries, scale, mask, sinks)

    return attend


def _random_token(kind: AttentionKind, rows: int) -> tuple[mx.array, mx.array]:
    """Keys and values of one token a row."""
    shape = kind.scheme.shape
    keys, values = (
        mx.random.normal((rows, shape.num_heads, 1, size)).astype(kind.dtype)
        for size in (shape.key_size, shape.value_size)
    )
    mx.eval(keys, values)
    return keys, values


def in_turns(run: Callable[[], None], baseline: Callable[[], None]) -> Timing:
    """Both sides ``ROUNDS`` times, alternating, so that a busy moment of the machine meets both."""
    sides = [(side, _steps(side)) for side in (run, baseline)]
    spent: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for times, (side, steps) in zip(spent, sides, strict=True):
            times.append(_seconds(side, steps) / steps)
    own, other = (1e3 * statistics.median(times) for times in spent)
    return Timing(own, other)


def _steps(side: Callable[[], None]) -> int:
    """How many steps make a sample; the first one compiles kernels and does not count."""
    side()
    return max(1, min(_MOST_STEPS, round(_SAMPLE_SECONDS / max(_seconds(side, 1), 1e-6))))


def _seconds(side: Callable[[], None], steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        side()
    return time.perf_counter() - begin

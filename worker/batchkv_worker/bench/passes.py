"""Bare forward passes of a model on mlx-lm's own caches, and decode steps on packed ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.bench.bounds import Cost, Rates
from batchkv_worker.bench.rates import seconds_of
from batchkv_worker.bench.results import DecodeStep, ForwardPass, PrefillSpeed
from batchkv_worker.engine.config import EngineConfig
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.start.plan import KvPlan, make_plan
from batchkv_worker.kv.types import Pieces
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.report.speed import Decoding

BEFORE_TOKENS = 32  # of each row, before passes are timed
STEPS = 8  # passes in a row, so that the wait for the last counts little
CHUNK = 512  # tokens of a prompt at once, where only its keys and values are wanted


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of one model. Each is repeated for about ``sample_seconds``, at least three times.

    Each method gives its figures as they are measured. ``note`` is told of what is left out.
    """

    loaded: LoadedModel
    cost: Cost
    rates: Rates
    sample_seconds: float
    note: Callable[[str], None]

    def forward(self, rows: Sequence[int]) -> Iterator[ForwardPass]:
        """One token for each of so many rows, on dense caches."""
        for count in rows:
            cache = make_prompt_cache(self.loaded.model)
            self.loaded.model(mx.ones((count, BEFORE_TOKENS), mx.int32), cache=cache)
            mx.eval([layer.state for layer in cache])
            steps = partial(_steps, self.loaded.model, cache, count)
            spent = seconds_of(steps, self.sample_seconds) / STEPS
            bound = self.cost.seconds(count, self.rates)
            del cache, steps
            mx.clear_cache()
            yield ForwardPass(count, 1e3 * spent, 1e3 * bound)

    def prefill(self, sizes: Sequence[int], row_seconds: float) -> Iterator[PrefillSpeed]:
        """One row's prompt of so many tokens in one pass; no logits are computed.

        Sizes are left out that would take longer than ``row_seconds``.
        """
        spent, before = 0.0, 1
        for size in (one for one in sizes if one < self.loaded.context):
            if size / before * spent > row_seconds:
                self.note(f"a prompt of {size:,} tokens takes too long to compute")
                break
            before = size
            spent = seconds_of(partial(_prefill, self.loaded.model, size), self.sample_seconds)
            bound = self.cost.seconds(size, self.rates)
            mx.clear_cache()
            yield PrefillSpeed(size, size / spent, size / bound)

    def decode(
        self,
        backend: Backend,
        schemes: Sequence[str],
        contexts: Sequence[int],
        config: EngineConfig,
        row_seconds: float,
    ) -> Iterator[DecodeStep]:
        """Steps of all slots with rows of one length, through the engine's own decode slots.

        One row is computed, and copied into every slot. Contexts are left out that the model cannot
        have, whose rows do not fit into the memory of ``config``, or whose row would take longer
        than ``row_seconds`` to compute.
        """
        loaded, rows = self.loaded, config.slots
        for scheme in schemes:
            plan = make_plan(
                *(loaded.name, loaded.model, loaded.caches, scheme, loaded.dtype, backend),
                slots=rows,
            )
            token_seconds = 0.0
            for context in (one for one in contexts if one < loaded.context):
                if context * token_seconds > row_seconds:
                    self.note(f"{scheme}: a row of {context:,} tokens takes too long to compute")
                    break
                begin = time.perf_counter()
                row = _row(loaded, plan, context)
                token_seconds = (time.perf_counter() - begin) / context
                row_bytes = sum(array.nbytes for pieces in row for array in pieces)
                if rows * row_bytes > config.memory_bytes:
                    self.note(f"{scheme}: {rows} rows of {context:,} tokens do not fit into memory")
                    break
                decoding = Decoding(loaded.model, plan, rows, row, context)
                spent = seconds_of(decoding.step, self.sample_seconds)
                bound = self.cost.seconds(rows, self.rates, rows * row_bytes)
                path = ", ".join(decoding.paths)
                del decoding, row
                mx.clear_cache()
                yield DecodeStep(scheme, context, rows, path, 1e3 * spent, 1e3 * bound)
            plan.undo()


def _steps(model: Any, cache: list[Any], rows: int) -> list[mx.array]:
    """Greedy steps, each started as soon as the one before it is built."""
    tokens = mx.ones((rows,), mx.int32)
    for _ in range(STEPS):
        tokens = mx.argmax(model(tokens[:, None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(tokens)
    return [tokens]


def _prefill(model: Any, size: int) -> list[Any]:
    cache = make_prompt_cache(model)
    model(mx.ones((1, size), mx.int32), cache=cache)
    return [layer.state for layer in cache]


def _row(loaded: LoadedModel, plan: KvPlan, length: int) -> list[Pieces]:
    """A row's pieces after ``length`` tokens."""
    rows = PrefillRows(plan.backend, plan.kinds, length, CHUNK)
    for low in range(0, length, CHUNK):
        size = min(CHUNK, length - low)
        rows.begin(Chunk(low, size))
        tokens = mx.arange(low, low + size)[None] % min(loaded.vocabulary, 1000)
        loaded.model(tokens, cache=plan.tree.nested(rows.layers))
        rows.end()
        mx.eval(rows.arrays)
    pieces = rows.row(0, length)
    mx.eval(pieces)
    return pieces

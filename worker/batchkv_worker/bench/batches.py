"""Whole batches: the engine beside mlx-lm's BatchGenerator, in turns, on the same model."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from batchkv_worker.bench.bounds import Cost, Rates
from batchkv_worker.bench.results import BatchRun
from batchkv_worker.bench.workloads import VOCABULARY, Workload, make
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Generation, Sequence

Tokens = list[list[int]]


class NoText:
    """A tokenizer for rows of token ids: nothing ends early, and nothing becomes text."""

    eos_token_ids: frozenset[int] = frozenset()
    text = ""

    @property
    def detokenizer(self) -> NoText:
        return self

    def add_token(self, token: int) -> None:
        """Nothing is decoded."""

    def finalize(self) -> None:
        """Nothing is left over."""


class Batches:
    """One model under one engine configuration; ``limit_seconds`` of repeats for a workload."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, repeats: int, limit_seconds: float
    ) -> None:
        self._loaded = replace(loaded, tokenizer=NoText())
        self._config = config
        self._repeats = repeats
        self._limit_seconds = limit_seconds

    def compare(self, name: str, rows: int, cost: Cost, rates: Rates) -> BatchRun:
        """A workload by name: two rows untimed, then both sides in turns, at least once each."""
        workload = make(name, rows, min(VOCABULARY, self._loaded.vocabulary))
        few = Workload(workload.name, workload.prompts[:2], workload.max_tokens[:2])
        self._run_engine(few)
        self._run_mlx_lm(few)
        ours: list[float] = []
        theirs: list[float] = []
        end = time.perf_counter() + self._limit_seconds
        while len(ours) < self._repeats and (not ours or time.perf_counter() < end):
            seconds, tokens = self._run_engine(workload)
            ours.append(seconds)
            seconds, other = self._run_mlx_lm(workload)
            theirs.append(seconds)
        return BatchRun(
            workload=workload.name,
            rows=len(workload.prompts),
            generated=workload.num_generated,
            repeats=len(ours),
            engine_seconds=statistics.median(ours),
            mlx_lm_seconds=statistics.median(theirs),
            bound_seconds=bound(workload, self._config.slots, cost, rates),
            same_rows=sum(a == b for a, b in zip(tokens, other, strict=True)),
        )

    def _run_engine(self, workload: Workload) -> tuple[float, Tokens]:
        """Seconds from the first row handed over to the last one's end; making it is not timed."""
        engine = Engine(self._loaded, self._config)
        tokens: Tokens = [[] for _ in workload.prompts]
        try:
            begin = time.perf_counter()
            for index, (prompt, count) in enumerate(
                zip(workload.prompts, workload.max_tokens, strict=True)
            ):
                row = Sequence(str(index), prompt, Generation(count, temperature=0.0))
                engine.submit_row(row)
            while not engine.is_idle:
                for event in engine.step():
                    assert isinstance(event, Completed), event
                    tokens[int(event.job_id)] = list(event.token_ids)
            return time.perf_counter() - begin, tokens
        finally:
            engine.close()
            _rest()

    def _run_mlx_lm(self, workload: Workload) -> tuple[float, Tokens]:
        generator = BatchGenerator(
            self._loaded.model, completion_batch_size=self._config.slots, prefill_batch_size=8
        )
        begin = time.perf_counter()
        ids = generator.insert(workload.prompts, workload.max_tokens)
        place: dict[Any, int] = {uid: index for index, uid in enumerate(ids)}
        tokens: Tokens = [[] for _ in workload.prompts]
        left = len(ids)
        while left:
            for response in generator.next_generated():
                tokens[place[response.uid]].append(response.token)
                left -= response.finish_reason is not None
        seconds = time.perf_counter() - begin
        generator.close()
        _rest()
        return seconds, tokens


def bound(workload: Workload, slots: int, cost: Cost, rates: Rates) -> float:
    """The least seconds: each different prompt token once, and full decode steps, without keys."""
    prefill = cost.seconds(workload.num_unique, rates)
    rows = min(slots, len(workload.prompts))
    return prefill + workload.num_generated / rows * cost.seconds(rows, rates)


def _rest() -> None:
    mx.synchronize()
    mx.clear_cache()

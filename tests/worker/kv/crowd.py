"""Rows through a whole engine, compared with mlx-lm, one row alone."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.sequence import Generation, Sequence
from parity.families import VOCABULARY
from support import tiny_models
from worker.kv.reference import x86

# Two tokens are as good as equal when one leads by no more, in standard deviations of the logits.
TIE = 1e-3

# Sliding, recurrent and full layers in one model.
_GEAR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "conv_mixer", "full_attention", "conv_mixer"],
    "sliding_window": 24,
    "max_position_embeddings": 4096,
}


@cache
def model_of(family: str) -> Any:
    """One of ``tiny_models``, or ``gear``; built once."""
    if family != "gear":
        return tiny_models.build(family)
    module = import_module("mlx_lm.models.gear")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": "gear", **_GEAR}))
    mx.eval(model.parameters())
    return model


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


class Crowd:
    """An engine over a family, its rows, and what they gave.

    What an engine of a named family checks at its start is checked once for all tests of this run.
    """

    def __init__(self, family: str | Any, group_cost: int | None = None, **changes: Any) -> None:
        self.model = model_of(family) if isinstance(family, str) else family
        values: dict[str, Any] = {
            "scheme": "float",
            "slots": 4,
            "chunk_tokens": 1024,
            "memory_bytes": 2**28,
            "path": "fused",
            **changes,
        }
        if "backend" not in values:
            values["backend"] = self._backend(values) if isinstance(family, str) else x86()
        self.engine = Engine(tiny_models.loaded(self.model), EngineConfig(**values))
        if group_cost is not None:  # a low one cuts rows into many groups
            views = self.engine._slots._views
            views.shapes = replace(views.shapes, group_cost=group_cost)
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, Completed] = {}

    def _backend(self, values: dict[str, Any]) -> Backend:
        # On a CPU a start's checks depend on the slots only through a path that is measured.
        path = values["path"]
        facts = {"scheme": values["scheme"], "path": path}
        if path is None:
            facts["slots"] = values["slots"]
        return x86(measurements=tiny_models.measurements(self.model, backend="x86", **facts))

    def add(self, job_id: str, prompt: list[int], count: int = 6, **changes: Any) -> None:
        self.prompts[job_id] = prompt
        generation = Generation(count, **{"temperature": 0.0, **changes})
        self.engine.submit_row(Sequence(job_id, list(prompt), generation))

    def step(self, count: int = 1) -> None:
        """Steps, the books checked after each."""
        for _ in range(count):
            for event in self.engine.step():
                assert isinstance(event, Completed), event
                assert event.job_id not in self.ended
                self.ended[event.job_id] = event
            self.engine.check_integrity()

    def drain(self) -> Crowd:
        for _ in range(3000):
            if self.engine.is_idle:
                return self
            self.step()
        raise AssertionError("the engine never becomes idle")

    def run(self, job_id: str, prompt: list[int], count: int = 6) -> Completed:
        """One row to its end."""
        self.add(job_id, prompt, count)
        return self.drain().ended[job_id]

    def cached(self, *job_ids: str) -> list[int]:
        """Prompt tokens that rows found in memory."""
        return [self.ended[job_id].usage.cached for job_id in job_ids or self.prompts]

    def tokens(self, job_id: str) -> list[int]:
        return list(self.ended[job_id].token_ids)

    def answers(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        """What each of several rows gives that come at once."""
        for job_id, prompt in prompts.items():
            self.add(job_id, prompt)
        self.drain()
        return {job_id: self.tokens(job_id) for job_id in prompts}

    def check_alone(self, *job_ids: str) -> None:
        """Float rows gave what mlx-lm gives for each alone."""
        for job_id in job_ids or self.ended:
            got = self.tokens(job_id)
            expected = tiny_models.alone_with_margins(
                self.model, self.prompts[job_id], len(got), chunk_tokens=256
            )
            for token, step in zip(got, expected, strict=True):
                if token != step.token:  # what follows a tie has another history
                    assert step.margin <= TIE, f"row {job_id}: {got}, alone {expected}"
                    break

"""Rows with constraints through an engine: random weights, and the demo model's tokenizer."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
from mlx_lm.tokenizer_utils import load

from batchkv_producer.wire.constraint import Constraint, Kind
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed, Event, Work
from batchkv_worker.model.loader import LoadedModel
from support import tiny_models

NUM_TOKENS = 4096  # of the tokenizer
VOCABULARY = NUM_TOKENS + 72  # of the model: the last ids have no token


@cache
def tokenizer() -> Any:
    return load(MODEL_PATH)


@cache
def loaded_model() -> LoadedModel:
    model = tiny_models.build("llama", vocab_size=VOCABULARY)
    return tiny_models.loaded(model, tokenizer=tokenizer(), vocabulary=VOCABULARY)


@cache
def enders() -> tuple[tuple[int, float], ...]:
    """A bias for tokens that end texts, numbers and lists, so that random answers are short."""
    words = ('"', "}", "]", '"}', '"]', ",", '",', "-", ".")
    found = {ids[0] for word in words if len(ids := tokenizer().encode(word)) == 1}
    return tuple((token, 9.0) for token in sorted({*found, *tokenizer().eos_token_ids}))


def engine(**changes: Any) -> Engine:
    values: dict[str, Any] = {
        **{"scheme": "float", "slots": 8, "chunk_tokens": 256, "memory_bytes": 2**28},
        **{"path": "fused", "group_cost": 0, "prefix_cells": 0},
    }
    loaded = loaded_model()
    config = tiny_models.with_measured(loaded.model, EngineConfig(**{**values, **changes}))
    return Engine(loaded, config)


def work(
    job_id: str, kind: Kind | None = None, value: Any = None, *, text: str = "A", **params: Any
) -> Work:
    values = {"max_tokens": 60, "temperature": 1.0, "seed": len(job_id), **params}
    constraint = None if kind is None else Constraint(kind, value)
    asked = Request(
        *(job_id, "completion"),
        prompt_tokens=tokenizer().encode(text),
        constraint=constraint,
        params=SamplingParams(**values),
    )
    return Work(job_id, asked)


def run(running: Engine, works: list[Work], *, gap: int = 0) -> dict[str, Any]:
    """All rows, ``gap`` steps apart. The events by their rows' names."""
    ended: dict[str, Event] = {}

    def step() -> None:
        for event in running.step():
            ended[event.job_id] = event  # type: ignore[union-attr]
        running.check_integrity()

    for one in works:
        running.add(one)
        for _ in range(gap):
            step()
    while not running.is_idle:
        step()
    return ended


def matches(constraint: Constraint, text: str) -> bool:
    """Whether a whole answer matches; a grammar cannot be judged here."""
    if constraint.kind == "regex":
        return re.fullmatch(constraint.value, text) is not None
    if constraint.kind == "choice":
        return text in constraint.value
    schema = {"type": "object"} if constraint.kind == "json_object" else constraint.value
    value = json.loads(text)
    return validator(schema).is_valid(value) and is_compact(text)


def validator(schema: dict[str, Any]) -> Any:
    """Judges values by the newest draft, formats too."""
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def is_compact(text: str) -> bool:
    """Whether JSON has no blank outside of its texts."""
    return re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)) is None


def completed(event: Event) -> Completed:
    assert isinstance(event, Completed), event
    return event

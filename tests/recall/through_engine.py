"""The recall models through the engine: many ragged rows at once, and how many answers are right.

`make test` takes 12 prompts and a few schemes; the environment variable `BATCHKV_RECALL=all` takes
300 prompts and every scheme, and prints what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.sequence import Generation, Sequence
from recall.evaluate import load
from recall.shapes import MARKED
from recall.task import NODES, Case, Kind, draw_case
from support import tiny_models

FAMILIES = ("full", "hybrid", "sliding")
FOUR_BITS = ("affine4", "affine4r", "nvfp4", "turbo4")
OTHERS = ("k8v4", "turbo3.5", "turbo3", "affine3", "affine2")

RUNS_ALL = os.environ.get("BATCHKV_RECALL", "") == "all"
COUNT, FAULT_COUNT = (300, 60) if RUNS_ALL else (12, 12)

SLOTS, CHUNK = 8, 256
BODY, LEAST_FACTS = range(200, 501), 48
"""Harder than what the models were trained for, which every scheme of 4 bits gets right."""
SEED = 40_000

_PATHS: tuple[Path, ...] = ("fused", "folded", "packed")
_FOURTH = {"full": "turbo4", "hybrid": "nvfp4", "sliding": "affine4r"}

Cases = dict[str, Case]
Plant = Callable[[Engine, Cases], None]
"""Spoils the caches of an engine whose rows will be these cases."""


def schemes_of(family: str) -> tuple[str, ...]:
    """What this run measures beside float."""
    if RUNS_ALL:
        return ("affine8", *FOUR_BITS, *OTHERS)
    return ("affine8", _FOURTH[family])


@lru_cache
def model_of(family: str) -> Any:
    return load(family)


@lru_cache
def crowded(family: str, count: int, kind: Kind | None = None) -> Cases:
    """Ragged prompts with 48 to 96 facts, by row id; without a `kind` every fourth is an echo."""
    rng = np.random.default_rng(SEED)
    cases: Cases = {}
    for number in range(count):
        body = BODY.start + int(rng.random() * len(BODY))
        most = min(len(NODES), (body - 1) // 3)
        facts = LEAST_FACTS + int(rng.random() * (most + 1 - LEAST_FACTS))
        chosen = kind or ("echo" if number % 4 == 3 else "recall")
        marks = family in MARKED
        cases[str(number)] = draw_case(SEED + number, facts, body, chosen, has_marks=marks)
    return cases


def answers(family: str, scheme: str, cases: Cases, plant: Plant | None = None) -> dict[str, Any]:
    """The engine's greedy tokens for each row.

    Rows wait for slots, join while others decode, and leave at different times, for some are asked
    for a few tokens more than their answer has.
    """
    names = ("float", "affine8", *FOUR_BITS, *OTHERS)
    config = EngineConfig(
        scheme=scheme,
        slots=SLOTS,
        chunk_tokens=CHUNK,
        memory_bytes=2**30,
        path=_PATHS[names.index(scheme) % len(_PATHS)],  # not measured: a run can be repeated
        group_cost=512,
    )
    model = model_of(family)
    running = Engine(tiny_models.loaded(model), tiny_models.with_measured(model, config))
    if plant is not None:
        plant(running, cases)
    for number, (job_id, case) in enumerate(cases.items()):
        generation = Generation(len(case.answer) + number % 5, temperature=0.0)
        running.submit_row(Sequence(job_id, list(case.prompt), generation))
    found: dict[str, Any] = {}
    while not running.is_idle:
        for event in running.step():
            assert isinstance(event, Completed), event
            found[event.job_id] = event.token_ids
        running.check_integrity()
    running.close()
    assert found.keys() == cases.keys()
    return found


def share_right(family: str, scheme: str, cases: Cases, plant: Plant | None = None) -> float:
    """The share of answers that are right in all their tokens."""
    found = answers(family, scheme, cases, plant)
    return sum(case.is_right(found[job_id]) for job_id, case in cases.items()) / len(cases)


MEASURED: dict[tuple[str, str], float] = {}
"""Accuracies in points by family and scheme, of this run's prompts."""
SPOILT: dict[tuple[str, str, Kind, str], float] = {}
"""Shares of right answers by family, scheme, question and fault."""


def accuracy(family: str, scheme: str) -> float:
    """Points from 0 to 100, measured once."""
    key = (family, scheme)
    if key not in MEASURED:
        MEASURED[key] = 100 * share_right(family, scheme, crowded(family, COUNT))
    return MEASURED[key]


def share_in_spite_of(family: str, scheme: str, kind: Kind, plant: Plant | None) -> float:
    """The share of right answers with a fault, or without any; measured once."""
    key = (family, scheme, kind, plant.__name__ if plant else "none")
    if key not in SPOILT:
        SPOILT[key] = share_right(family, scheme, crowded(family, FAULT_COUNT, kind), plant)
    return SPOILT[key]


def table() -> list[str]:
    """Lines of what has been measured: a row for each scheme, a column for each family."""
    schemes = list(dict.fromkeys(scheme for _, scheme in MEASURED))
    lines = [f"| scheme | {' | '.join(FAMILIES)} |", "|---" * (1 + len(FAMILIES)) + "|"]
    for scheme in schemes:
        points = (MEASURED.get((family, scheme)) for family in FAMILIES)
        cells = ("" if share is None else f"{share:.1f}" for share in points)
        lines.append(f"| {scheme} | {' | '.join(cells)} |")
    return lines


def fault_table() -> list[str]:
    """The same of the faults: a row for each."""
    lines = ["| family | scheme | question | fault | right |", "|---|---|---|---|---|"]
    return lines + [f"| {' | '.join(key)} | {share:.1%} |" for key, share in sorted(SPOILT.items())]

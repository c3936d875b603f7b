"""Named workloads: seeded, the same prompts on every machine.

Token ids are drawn at random, so they mean nothing, and no row ends before its ``max_tokens``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

VOCABULARY = 4096  # token ids below this are drawn where the model has as many


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts (token ids) in arrival order and how many tokens each row generates."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_generated(self) -> int:
        return sum(self.max_tokens)

    @property
    def num_unique(self) -> int:
        """Tokens of all prompts; those of a common beginning count once."""
        count, before = 0, list[int]()
        for prompt in sorted(self.prompts):
            pairs = enumerate(zip(before, prompt, strict=False))
            same = next((at for at, (a, b) in pairs if a != b), min(len(before), len(prompt)))
            count, before = count + len(prompt) - same, prompt
        return count


def equal(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """Every prompt 128 tokens, every answer 64."""
    draw = partial(_tokens, rng, vocabulary)
    return Workload("equal", [draw(128) for _ in range(rows)], [64] * rows)


def mixed(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """Lognormal lengths: prompts around 128 (8 to 1,024), answers around 48 (4 to 256)."""
    draw = partial(_tokens, rng, vocabulary)
    prompts = [draw(lognormal(rng, 128, 1.0, 8, 1024)) for _ in range(rows)]
    return Workload("mixed", prompts, [lognormal(rng, 48, 0.8, 4, 256) for _ in range(rows)])


def shared(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """A prefix of 768 tokens common to all, 40 of each row's own, 16 generated."""
    draw = partial(_tokens, rng, vocabulary)
    prefix = draw(768)
    return Workload("shared", [prefix + draw(40) for _ in range(rows)], [16] * rows)


def tree(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """A prefix of 1,024 tokens common to all, 512 more common to an eighth, 40 of each row's own.

    32 generated. The rows of an eighth are neighbours, as a planner would send them.
    """
    draw = partial(_tokens, rng, vocabulary)
    everyone = draw(1024)
    branches = [everyone + draw(512) for _ in range(8)]
    prompts = [branches[index * 8 // rows] + draw(40) for index in range(rows)]
    return Workload("tree", prompts, [32] * rows)


def shared_long(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """A prefix of 4,096 tokens common to all, 64 of each row's own, 64 generated."""
    draw = partial(_tokens, rng, vocabulary)
    prefix = draw(4096)
    return Workload("shared-long", [prefix + draw(64) for _ in range(rows)], [64] * rows)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "equal": equal,
    "mixed": mixed,
    "shared": shared,
    "shared-long": shared_long,
    "tree": tree,
}


def make(name: str, rows: int, vocabulary: int = VOCABULARY) -> Workload:
    """A workload by name, from seed 7."""
    return WORKLOADS[name](rows, random.Random(7), vocabulary)


def _tokens(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def lognormal(rng: random.Random, median: int, sigma: float, low: int, high: int) -> int:
    """A length in tokens, around ``median``, from ``low`` to ``high``."""
    return max(low, min(high, round(median * rng.lognormvariate(0, sigma))))

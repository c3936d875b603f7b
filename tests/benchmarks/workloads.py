"""Named models and workloads of the engine benchmark: seeded, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts (token ids) in arrival order and how many tokens each row generates."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_generated(self) -> int:
        return sum(self.max_tokens)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def equal(jobs: int, rng: random.Random) -> Workload:
    """Every prompt 128 tokens, every answer 64."""
    return Workload("equal", [_tokens(rng, 128) for _ in range(jobs)], [64] * jobs)


def mixed(jobs: int, rng: random.Random) -> Workload:
    """Lognormal lengths: prompts around 128 (8 to 1,024), answers around 48 (4 to 256)."""
    prompts = [_tokens(rng, _lognormal(rng, 128, 1.0, 8, 1024)) for _ in range(jobs)]
    return Workload("mixed", prompts, [_lognormal(rng, 48, 0.8, 4, 256) for _ in range(jobs)])


def shared(jobs: int, rng: random.Random) -> Workload:
    """A prefix of 768 tokens common to all, 40 of each row's own, 16 generated."""
    prefix = _tokens(rng, 768)
    return Workload("shared", [prefix + _tokens(rng, 40) for _ in range(jobs)], [16] * jobs)


def tree(jobs: int, rng: random.Random) -> Workload:
    """A prefix of 1,024 tokens common to all, 512 more common to an eighth, 40 of each row's own.

    32 generated. The rows of an eighth stand together, as a planner would send them.
    """
    everyone = _tokens(rng, 1024)
    branches = [everyone + _tokens(rng, 512) for _ in range(8)]
    prompts = [branches[index * 8 // jobs] + _tokens(rng, 40) for index in range(jobs)]
    return Workload("tree", prompts, [32] * jobs)


def shared_long(jobs: int, rng: random.Random) -> Workload:
    """A prefix of 4,096 tokens common to all, 64 of each row's own, 64 generated."""
    prefix = _tokens(rng, 4096)
    return Workload("shared-long", [prefix + _tokens(rng, 64) for _ in range(jobs)], [64] * jobs)


def _lognormal(rng: random.Random, median: int, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, round(median * rng.lognormvariate(0, sigma))))


WORKLOADS = {
    "equal": equal,
    "mixed": mixed,
    "shared": shared,
    "shared-long": shared_long,
    "tree": tree,
}

# Shapes by name, so that a table row can be run again anywhere; weights are random, seed 0.
MODELS: dict[str, dict[str, Any]] = {
    "bench-3m": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "bench-25m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "bench-600m": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
    },
}


def build_model(name: str, dtype: Any) -> Any:
    """A llama of the named shape with random weights."""
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.random.seed(0)
    common = {
        "model_type": "llama",
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    args = llama.ModelArgs(**{**common, **MODELS[name]})
    model = llama.Model(args)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model

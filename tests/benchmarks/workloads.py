"""Named models and workloads of the engine benchmark: seeded, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from batchkv_worker.bench import workloads
from batchkv_worker.bench.workloads import VOCABULARY, Workload

__all__ = ["MODELS", "VOCABULARY", "WORKLOADS", "Workload", "build_model"]

PER_GROUP = 40


def groups(rows: int, rng: random.Random, vocabulary: int = VOCABULARY) -> Workload:
    """40 rows behind each of several prefixes of 450 to 750 tokens, 20 to 50 of each row's own.

    16 generated. Few-shot prompts are so: what is common ends anywhere.
    """
    prompts: list[list[int]] = []
    for begun in range(0, rows, PER_GROUP):
        prefix = [rng.randrange(vocabulary) for _ in range(rng.randint(450, 750))]
        for _ in range(min(PER_GROUP, rows - begun)):
            own = [rng.randrange(vocabulary) for _ in range(rng.randint(20, 50))]
            prompts.append(prefix + own)
    return Workload("groups", prompts, [16] * rows)


WORKLOADS: dict[str, Callable[..., Workload]] = {**workloads.WORKLOADS, "groups": groups}

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

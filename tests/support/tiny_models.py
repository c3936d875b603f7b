"""Small models of mlx-lm's real classes with random float32 weights, and a tokenizer of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from batchkv_worker import blas

blas.load()

import mlx.core as mx  # noqa: E402
from mlx_lm.models import llama, phi3, qwen2, qwen3  # noqa: E402
from mlx_lm.models.cache import KVCache, QuantizedKVCache  # noqa: E402

from batchkv_worker.model import LoadedModel, layer_shapes  # noqa: E402

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False}),
    "mistral": (llama, {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": (qwen2, {"num_key_value_heads": 2}),
    "qwen3": (
        qwen3,
        {"num_key_value_heads": 1, "head_dim": 64, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "phi3": (phi3, {"num_key_value_heads": 1}),
}
FAMILIES = tuple(_FAMILIES)


class NumberTokenizer:
    """Token 7 is written "7 "; nothing is special. Stands where mlx-lm's tokenizer wrapper does."""

    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    @property
    def detokenizer(self) -> Any:
        text = SimpleNamespace(text="")

        def add_token(token: int) -> None:
            text.text += f"{token} "

        text.add_token, text.finalize = add_token, lambda: None
        return text


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of the family; the same seed gives the same weights."""
    module, special = _FAMILIES[family]
    mx.random.seed(seed)
    args = module.ModelArgs(model_type=family, **{**_COMMON, **special, **changes})
    model = module.Model(args)
    mx.eval(model.parameters())
    return model


def loaded(model: Any, **changes: Any) -> LoadedModel:
    """As ``model.load`` would give it."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": model,
        "tokenizer": NumberTokenizer(),
        "dtype": mx.float32,
        "layers": layer_shapes("tiny", model),
        "context": 4096,
        "weight_bytes": 0,
        "defaults": {"temperature": 0.0},
    }
    return LoadedModel(**{**values, **changes})


def alone(model: Any, prompt: list[int], count: int, bits: int | None = None) -> list[int]:
    """Greedy tokens of one row on mlx-lm's own cache, with ``bits`` quantized from token 0."""
    layers = range(len(model.layers))
    cache: list[Any] = [QuantizedKVCache(64, bits) if bits else KVCache() for _ in layers]
    tokens: list[int] = []
    inputs = prompt
    for _ in range(count):
        logits = model(mx.array([inputs]), cache=cache)[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        inputs = tokens[-1:]
    return tokens

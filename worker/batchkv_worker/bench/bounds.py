"""The least time that a piece of work can take, from what a model reads and multiplies.

A decode step reads all weights once and the keys and values of every row. A pass multiplies each
token with every weight. Neither can be faster than the memory's bandwidth and the rate of
products, both of which ``rates`` measures on the same machine. Real kernels reach a part of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx import nn
from mlx.utils import tree_flatten

from batchkv_worker.model.loader import LoadedModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at most: bytes read and operations of products, a second."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What one forward pass costs, whatever the length of the rows.

    ``weight_bytes`` and ``weights`` are of layers that every token passes; ``expert_bytes`` and
    ``experts`` of layers of which a token passes ``share``.
    """

    weight_bytes: int
    weights: int
    expert_bytes: int = 0
    experts: int = 0
    share: float = 1.0

    def seconds(self, tokens: int, rates: Rates, kv_bytes: float = 0.0) -> float:
        """The bound of a pass over ``tokens`` that reads ``kv_bytes`` of keys and values."""
        seen = 1 - (1 - self.share) ** tokens  # of the experts, if tokens choose at random
        read = self.weight_bytes + self.expert_bytes * seen + kv_bytes
        products = 2 * tokens * (self.weights + self.experts * self.share)
        return max(read / rates.bytes_per_second, products / rates.operations_per_second)


def cost_of(loaded: LoadedModel) -> Cost:
    """The cost of a loaded model, read off its layers.

    An embedding is looked up, not multiplied, unless it is also the head.
    """
    share = _share(loaded.config)
    config = loaded.config.get("text_config") or loaded.config
    is_tied = bool(config.get("tie_word_embeddings"))
    always, some = [0, 0], [0, 0]
    seen: set[int] = set()
    for name, layer in loaded.model.named_modules():
        if "weight" not in layer or id(layer) in seen:
            continue
        seen.add(id(layer))
        is_embedding = isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
        if is_embedding and not (is_tied and name.endswith("embed_tokens")):
            continue
        weight = layer["weight"]
        count = weight.size * (32 // layer.bits if hasattr(layer, "bits") else 1)
        num_bytes = sum(array.nbytes for _, array in tree_flatten(_own(layer)))
        total = some if weight.ndim == 3 and share < 1 else always
        total[0] += num_bytes
        total[1] += count if weight.ndim >= 2 else 0
    return Cost(always[0], always[1], some[0], some[1], share)


def _own(layer: Any) -> dict[str, Any]:
    """A layer's arrays without those of layers in it."""
    names = ("weight", "scales", "biases", "bias")
    return {name: layer[name] for name in names if name in layer and layer[name] is not None}


def _share(config: dict[str, Any]) -> float:
    """The share of the experts that a token passes; 1 for a model without experts."""
    text = config.get("text_config")
    known = {**config, **(text if isinstance(text, dict) else {})}
    total = next((known[name] for name in _EXPERTS if known.get(name)), 0)
    chosen = next((known[name] for name in _EXPERTS_A_TOKEN if known.get(name)), 0)
    return min(1.0, chosen / total) if total and chosen else 1.0

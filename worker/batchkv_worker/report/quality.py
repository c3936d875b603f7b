"""Measures a scheme on a text: the bytes of its arrays, and the model's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.types import Pieces
from batchkv_worker.report.results import KindBytes

CHUNK_TOKENS = 256  # logits of so many tokens are in memory at once


@dataclass(frozen=True, slots=True)
class Reading:
    """The results of a text: mean loss (nats a token), the likeliest token after each token, and
    the pieces that a decode row of it needs."""

    loss: float
    predictions: list[int]
    pieces: list[Pieces]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def agreement(self, other: Reading) -> float:
        """The share of tokens after which both predict the same token."""
        same = zip(self.predictions, other.predictions, strict=True)
        return sum(a == b for a, b in same) / len(self.predictions)


def read(
    backend: Backend,
    model: Any,
    tree: CacheTree,
    kinds: Sequence[LayerKind],
    tokens: Sequence[int],
) -> Reading:
    """Run a text through the model in chunks, like a prompt: attention reads packed values."""
    prefill = PrefillRows(backend, kinds, len(tokens), CHUNK_TOKENS)
    losses: list[mx.array] = []
    predictions: list[int] = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        nexts = mx.array(tokens[start + 1 : start + len(chunk) + 1], dtype=mx.int32)
        prefill.begin(Chunk(start, len(chunk)))
        logits = model(mx.array([chunk]), cache=tree.nested(prefill.layers))
        prefill.end()
        logits = logits[0, : nexts.size].astype(mx.float32)
        likely = mx.argmax(logits, axis=-1)
        right = mx.take_along_axis(logits, nexts[:, None], axis=-1)[:, 0]
        loss = (mx.logsumexp(logits, axis=-1) - right).sum()
        mx.eval(loss, likely, prefill.arrays)
        losses.append(loss)
        predictions += likely.tolist()
    pieces = prefill.row(0, len(tokens))
    mx.eval(pieces)
    return Reading(float(sum(losses).item()) / len(predictions), predictions, pieces)


def measured_bytes(kinds: Sequence[LayerKind], pieces: Sequence[Pieces]) -> tuple[KindBytes, ...]:
    """The bytes of each kind of layer, counted in the arrays of a row."""
    found: dict[str, list[tuple[LayerKind, Pieces]]] = {}
    for kind, arrays in zip(kinds, pieces, strict=True):
        found.setdefault(str(kind), []).append((kind, arrays))
    return tuple(_together(name, members) for name, members in found.items())


def _together(name: str, members: list[tuple[LayerKind, Pieces]]) -> KindBytes:
    schemes = (str(kind.scheme) for kind, _ in members if isinstance(kind, AttentionKind))
    per_token, per_row = 0.0, 0
    for kind, arrays in members:
        nbytes = sum(array.nbytes for array in arrays)
        if kind.has_state:
            per_row += nbytes
        else:
            per_token += nbytes / arrays[0].shape[-2]
    return KindBytes(name, len(members), _joined(schemes), per_token, per_row)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "as computed"

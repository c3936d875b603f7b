"""What the caches must hold, kept again in plain Python, and a stand-in for the model.

Tokens are numbers. Each has its own random vector as key, another as value, and a state adds
tokens up, so that whatever a cache hands out tells which tokens stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.layers.state import StateKind, StateShape
from batchkv_worker.kv.schemes.packing import LayerShape, fit_layer
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.types import Pieces, Window

SIZE, VALUE_SIZE, HEADS = 64, 128, 2
VOCABULARY = 4096
PAD = 0
# How far a packed vector may be from the token's, as a share of its length. Vectors of different
# tokens are more than 1 apart.
STRAY = 0.35

_DRAWN = np.random.RandomState(3)
_KEYS = _DRAWN.standard_normal((VOCABULARY, HEADS, SIZE)).astype(np.float32)
_VALUES = _DRAWN.standard_normal((VOCABULARY, HEADS, VALUE_SIZE)).astype(np.float32)
STATE = StateShape(((2, 3), None, (5,)), (mx.float32, None, mx.float32))


def x86(**changes: Any) -> CpuBackend:
    """An x86 CPU's backend, whatever machine runs the tests; nothing is measured for it."""
    named = {"uses_exp2": True, "uses_rope_cache": True}
    return CpuBackend(**{**named, **changes})


BACKEND = x86()


def attention_kind(
    name: str,
    window: Window = None,
    dtype: mx.Dtype = mx.float32,
    heads: int = HEADS,
    path: Path = "fused",
    backend: Backend = BACKEND,
) -> AttentionKind:
    """A layer under a scheme by name; keys and values differ in size."""
    names = SchemeSpec.parse(name).base
    scheme = fit_layer(names, LayerShape(heads, SIZE, VALUE_SIZE))
    return AttentionKind(backend, scheme, dtype, window, path)


def state_kind() -> StateKind:
    """Two arrays, and between them a place that the model never uses."""
    return StateKind(STATE)


def keys_of(tokens: Sequence[Sequence[int]]) -> mx.array:
    """``[rows, heads, tokens, size]``."""
    return mx.array(_KEYS[np.array(tokens)].swapaxes(1, 2))


def values_of(tokens: Sequence[Sequence[int]]) -> mx.array:
    return mx.array(_VALUES[np.array(tokens)].swapaxes(1, 2))


def mixed(state: Any, tokens: Any) -> Any:
    """A state after one more token; exact in float32, in MLX as in NumPy."""
    return state * 0.5 + tokens


@dataclass(frozen=True, slots=True)
class Reference:
    """A row: all tokens that it has had."""

    tokens: tuple[int, ...]

    def kept(self, window: Window) -> tuple[int, ...]:
        """What a layer keeps between steps."""
        if window is None:
            return self.tokens
        return self.tokens[-(window - 1) :] if window > 1 else ()

    def states(self) -> list[np.ndarray]:
        """The arrays of ``state_kind``."""
        found = []
        for _, shape, _ in STATE.used:
            state = np.zeros((1, *shape), np.float32)
            for token in self.tokens:
                state = mixed(state, np.float32(token))
            found.append(state)
        return found


def run_layers(layers: Sequence[Any], tokens: list[list[int]]) -> None:
    """What a model does to its caches with ``[rows, tokens]``."""
    for layer in layers:
        if isinstance(layer, (AttentionPrefill, AttentionSlots)):
            layer.update_and_fetch(keys_of(tokens), values_of(tokens))
        else:
            _run_state(layer, tokens)


def _run_state(layer: Any, tokens: list[list[int]]) -> None:
    given = mx.array(tokens).astype(mx.float32)
    mask = layer.make_mask(given.shape[1])
    for place, shape, dtype in STATE.used:
        state = layer[place]
        if state is None:
            state = mx.zeros((given.shape[0], *shape), dtype)
        axes = (-1, *[1] * len(shape))
        for index in range(given.shape[1]):
            after = mixed(state, given[:, index].reshape(axes))
            real = True if mask is None else mask[:, index].reshape(axes)
            state = mx.where(real, after, state)
        layer[place] = state
    layer.advance(given.shape[1])


def prefilled(
    kinds: Sequence[LayerKind], prompts: Sequence[Sequence[int]], widths: Sequence[int]
) -> PrefillRows:
    """Prompts computed together, right-padded, in chunks of ``widths`` and then whole."""
    longest = max(map(len, prompts))
    rows = PrefillRows(BACKEND, kinds, longest, max([*widths, longest]))
    position = 0
    for width in [*widths, longest]:
        width = min(width, longest - position)
        if not width:
            break
        append_chunk(rows, prompts, position, width)
        position += width
    return rows


def append_chunk(
    rows: PrefillRows, prompts: Sequence[Sequence[int]], position: int, width: int
) -> None:
    """Tokens [position, position + width) of every prompt."""
    lengths = tuple(max(0, min(width, len(prompt) - position)) for prompt in prompts)
    ragged = any(length != width for length in lengths)
    rows.begin(Chunk(position, width, lengths if ragged else None))
    parts = [
        [*prompt[position : position + length], *[PAD] * (width - length)]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    run_layers(rows.layers, parts)
    mx.eval(rows.arrays)


def bits(pieces: Pieces) -> list[tuple[tuple[int, ...], bytes]]:
    """Shapes and bytes: equal only if nothing was computed anew."""
    return [(tuple(piece.shape), bytes(memoryview(plain(piece)))) for piece in pieces]


def plain(piece: mx.array) -> mx.array:
    """In a dtype that NumPy knows, bit for bit."""
    return mx.contiguous(piece.view(mx.uint16) if piece.dtype == mx.bfloat16 else piece)


def check_content(kind: LayerKind, pieces: Pieces, row: Reference) -> None:
    """AssertionError unless the pieces are those of the row's tokens."""
    if isinstance(kind, AttentionKind):
        tokens = row.kept(kind.window)
        half = len(pieces) - len(kind.scheme.values.pack(mx.zeros((1, VALUE_SIZE))))
        check_vectors(kind, pieces[:half], pieces[half:], tokens)
        return
    for piece, expected in zip(pieces, row.states(), strict=True):
        assert np.array_equal(np.array(piece), expected)


def check_vectors(kind: AttentionKind, keys: Pieces, values: Pieces, tokens: Sequence[int]) -> None:
    """Packed keys and values ``[1, heads, time, part]`` are those of ``tokens``."""
    assert {part.shape[-2] for part in (*keys, *values)} == {len(tokens)}
    if tokens:
        check_dense(kind, kind.scheme.keys.unpack(keys, mx.float32), keys_of([tokens]))
        check_dense(kind, kind.scheme.values.unpack(values, mx.float32), values_of([tokens]))


def check_dense(kind: AttentionKind, found: mx.array, expected: mx.array) -> None:
    """Exact for floats, near enough to tell tokens apart for packed ones."""
    got, wanted = np.array(found.astype(mx.float32)), np.array(expected)
    assert got.shape == wanted.shape
    bound = STRAY if kind.scheme.is_packed else (0 if kind.dtype == mx.float32 else 0.01)
    strayed = np.linalg.norm(got - wanted, axis=-1)
    assert (strayed <= bound * np.linalg.norm(wanted, axis=-1)).all(), strayed.max()

"""Norms and rotary positions of queries and keys, for all tokens of all rows, as one kernel.

Models that normalize each head's queries and keys, and then turn them by their position, start four
kernels for it in each layer. A GPU's host takes longer to launch them than the device takes.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import LEAST_NUMBERS, Constant, Input, Launch, Run

_SIMD = 32  # threads
_SIMDS_OF_STEP, _SIMDS_OF_CHUNK = 4, 8  # of a threadgroup
_MOST_HEADS = 8  # of a simdgroup: a chunk's share the angles of their token
MOST_SIZE = 512  # of a head: a thread keeps a 32nd of it
MOST_TOKENS = 65_535  # of a row: CUDA's grids have no more in the third dimension

ROTARY = Body(
    "batchkv_rotary",
    ("rotary",),
    ("queries", "keys", "query_weights", "key_weights", "frequencies", "offsets"),
    ("turned_queries", "turned_keys"),
    ("wide", "turning"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a layer does to its queries and keys.

    ``turned``: pairs of numbers that are turned; the rest of a head stays. ``neighbours``: a pair's
    numbers are next to each other, else ``turned`` apart. ``epsilons`` are those of both norms.
    """

    size: int
    turned: int
    neighbours: bool
    epsilons: tuple[float, float]

    def __post_init__(self) -> None:
        """ValueError where there is no kernel for it."""
        if self.size % 2 or self.size > MOST_SIZE or not 0 < 2 * self.turned <= self.size:
            raise ValueError(f"no kernel turns {self.turned} pairs of {self.size} numbers")


@dataclass(frozen=True, slots=True)
class RotaryKernel:
    """``runs`` has the kernels that were made."""

    launch: Launch
    runs: dict[Hashable, Run] = field(default_factory=dict, repr=False, compare=False)

    def __call__(
        self,
        turn: Turn,
        queries: Input,
        keys: Input,
        weights: tuple[mx.array, mx.array],
        frequencies: mx.array,
        offsets: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Queries ``[rows, heads, tokens, size]`` and keys ``[rows, kv heads, tokens, size]``.

        They are given as ``[rows, tokens, heads, size]``, in one dtype with the norms' ``weights``.
        ``frequencies`` (float32, ``[turned]``) times a token's position is the angle of each pair;
        ``offsets`` (int32, ``[rows]``) are the positions of each row's first token. All arrays but
        queries and keys lie in one piece, and these should be views, if they do not.
        """
        rows, tokens, heads, size = queries.shape
        kv_heads = keys.shape[2]
        simds, each = _sharing(heads + kv_heads, is_step=tokens == 1)
        key = turn, (heads, kv_heads), (simds, each), queries.dtype, rows < LEAST_NUMBERS
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self.launch(ROTARY, _constants(*key))
        shapes: Any = [(rows, heads, tokens, size), (rows, kv_heads, tokens, size)]
        inputs: list[Input] = [queries, keys, *weights, frequencies, offsets]
        threads = _SIMD * simds
        grid = -(-(heads + kv_heads) // (simds * each)) * threads, rows, tokens
        found = run(inputs, grid, (threads, 1, 1), [(shape, queries.dtype) for shape in shapes])
        return found[0], found[1]


def _sharing(heads: int, *, is_step: bool) -> tuple[int, int]:
    """Simdgroups of a threadgroup, and the heads that each has.

    A step has few tokens, so each of its heads gets a simdgroup. A chunk has many.
    """
    if is_step:
        return min(heads, _SIMDS_OF_STEP), 1
    return min(heads, _SIMDS_OF_CHUNK), min(_MOST_HEADS, -(-heads // _SIMDS_OF_CHUNK))


def _constants(
    turn: Turn, heads: tuple[int, int], sharing: tuple[int, int], dtype: mx.Dtype, is_few: bool
) -> tuple[Constant, ...]:
    """``is_few``: fewer rows than LEAST_NUMBERS, for which Metal needs a kernel of its own."""
    query_bits, key_bits = (
        struct.unpack("<i", struct.pack("<f", epsilon))[0] for epsilon in turn.epsilons
    )
    return (
        ("T", dtype),
        ("SIZE", turn.size),
        ("TURNED", turn.turned),
        ("NEIGHBOURS", int(turn.neighbours)),
        ("QUERY_HEADS", heads[0]),
        ("KEY_HEADS", heads[1]),
        ("SIMDS", sharing[0]),
        ("HEADS", sharing[1]),
        ("QUERY_EPS", query_bits),
        ("KEY_EPS", key_bits),
        ("FEW_ROWS", int(is_few)),
    )

"""The sum of a layer's input and result, and the norm of the sum, as one kernel.

Models add what attention gives to each token's numbers, and normalize the sum for what comes next,
and so after the MLP: two kernels twice in each layer. A GPU's host takes longer to launch them than
the device takes for the few rows of a decode step.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass, field

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Constant, Launch, Run

_SIMD = 32  # threads
_RUN = 8  # numbers that a thread reads at once
_MOST_SIMDS = 16  # of a threadgroup
MOST_SIZE = 16_384  # numbers of a token: a thread keeps up to 32

RESIDUAL = Body(
    "batchkv_residual",
    ("residual",),
    ("x", "added", "weights"),
    ("sums", "normed"),
    ("wide",),
)


@dataclass(frozen=True, slots=True)
class ResidualKernel:
    """``runs`` has the kernels that were made."""

    launch: Launch
    runs: dict[Hashable, Run] = field(default_factory=dict, repr=False, compare=False)

    def __call__(
        self, x: mx.array, added: mx.array, weights: mx.array, epsilon: float
    ) -> tuple[mx.array, mx.array]:
        """``x + added``, and its norm, for ``[rows, tokens, size]`` in one dtype with ``weights``.

        ``size`` is at most ``MOST_SIZE``; ``epsilon`` is the norm's.
        """
        rows, tokens, size = x.shape
        key = size, x.dtype, epsilon
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self.launch(RESIDUAL, _constants(*key))
        threads, output = _SIMD * _simds(size), ((rows, tokens, size), x.dtype)
        grid = tokens * threads, rows, 1
        found = run([x, added, weights], grid, (threads, 1, 1), [output, output])
        return found[0], found[1]


def _constants(size: int, dtype: mx.Dtype, epsilon: float) -> tuple[Constant, ...]:
    (bits,) = struct.unpack("<i", struct.pack("<f", epsilon))
    return ("T", dtype), ("SIZE", size), ("SIMDS", _simds(size)), ("EPSILON", bits)


def _simds(size: int) -> int:
    """How many simdgroups share a token, so that all threads have as many numbers."""
    simds = -(-size // (_RUN * _SIMD))
    turns = -(-simds // _MOST_SIMDS)
    return -(-simds // turns)

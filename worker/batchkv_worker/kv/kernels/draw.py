"""One of the likeliest tokens of each row, drawn by one kernel.

The same as many small operations of MLX do (``engine/tokens/sampling.py``), which a GPU's host
takes longer to launch than the device takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Launch, Run

MOST_TOKENS = 64  # from which a row may draw
_THREADS = 512
_CAPACITY = 1024  # candidates; more only where so many are equal

DRAW = Body("batchkv_draw", ("draw",), ("logits", "given"), ("tokens",), ("keys",))


@dataclass(frozen=True, slots=True)
class DrawKernel:
    """Implements ``contract.DrawKernel``. ``runs`` has the kernel, once it was made."""

    launch: Launch
    runs: list[Run] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, logits: mx.array, given: mx.array) -> mx.array:
        """See ``contract.DrawKernel``."""
        if not self.runs:
            sizes = ("THREADS", _THREADS), ("CAPACITY", _CAPACITY), ("MOST", MOST_TOKENS)
            self.runs.append(self.launch(DRAW, sizes))
        rows = logits.shape[0]
        group = _THREADS, 1, 1
        (tokens,) = self.runs[0](
            [logits, given], (rows * _THREADS, 1, 1), group, [((rows,), mx.uint32)]
        )
        return tokens

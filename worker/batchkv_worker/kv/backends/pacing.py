"""How far the host may run ahead of the device while prompts are computed.

Layers are launched while later ones are built, where possible by another thread (``launching``).

Dense copies of packed keys and values are freed when the device is done with them, not when the
host has queued their use. CUDA accepts whole chunks of a long prompt before it has computed the
first layer, and the copies of many layers would then be in memory together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import mlx.core as mx

from batchkv_worker.kv.backends.launching import Launches

STARTS_AHEAD = 2  # whose dense copies may exist at once, however large they are
BYTES_AHEAD = 160 * 2**20  # of dense copies and results of layers that are not waited for
BYTES_AT_ONCE = 48 * 2**20  # of layers that are started together


class Unpaced:
    """For devices that keep the host from running far ahead by themselves."""

    def begin(self) -> None:
        """Does nothing."""

    def follow(self, output: mx.array, num_dense: int) -> None:
        """Does nothing."""

    def start(self, arrays: Sequence[mx.array]) -> None:
        """Start the whole chunk."""
        mx.async_eval(arrays)


UNPACED = Unpaced()


class LayersAhead:
    """Starts layers while later ones are built. Waits for earlier ones if too much is under way.

    A chunk's first layer starts at once, so that the device has work. Then small ones start
    together: each start costs the host as much as many kernels. ``STARTS_AHEAD`` of them keep the
    device busy while the host waits. Of a small chunk there are more, since the host also builds
    while the device still computes a decode step.
    """

    def __init__(self, launches: Launches) -> None:
        """``launches``: starts layers, and is joined before anything else is computed."""
        self._launches = launches
        self._started: deque[tuple[mx.array, int]] = deque()
        self._num_bytes = self._num_held = 0
        self._is_first = True

    def begin(self) -> None:
        self._num_held, self._is_first = 0, True

    def follow(self, output: mx.array, num_dense: int) -> None:
        """Start ``output``, the result of the attention of the next layer, or soon.

        ``num_dense``: numbers of the dense copies that it reads.
        """
        self._num_held += output.nbytes + num_dense * output.dtype.size
        if not self._is_first and self._num_held < BYTES_AT_ONCE:
            return
        self._is_first = False
        self._launches.join()
        while len(self._started) >= STARTS_AHEAD and self._num_bytes + self._num_held > BYTES_AHEAD:
            first, num_bytes = self._started.popleft()
            self._num_bytes -= num_bytes
            mx.eval(first)
        self._launches.start(output)
        self._started.append((output, self._num_held))
        self._num_bytes += self._num_held
        self._num_held = 0

    def start(self, arrays: Sequence[mx.array]) -> None:
        """Start what is left. One thread starts all: MLX keeps plans of attention for each."""
        self._launches.join()
        self._launches.start(arrays)
        self._launches.join()

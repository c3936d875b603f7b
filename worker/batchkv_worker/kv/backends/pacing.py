"""How far the host may run ahead of the device while prompts are computed.

Dense copies of packed keys and values are freed when the device is done with them, not when the
host has queued their use. CUDA accepts whole chunks of a long prompt before it has computed the
first layer, and the copies of many layers would then be in memory together.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

LAYERS_AHEAD = 2  # layers whose dense copies may exist at once, however large they are
BYTES_AHEAD = 64 * 2**20  # of dense copies and results of layers that are not waited for


class Unpaced:
    """For devices that keep the host from running far ahead by themselves."""

    def follow(self, output: mx.array, num_dense: int) -> None:
        """Does nothing."""


UNPACED = Unpaced()


class LayersAhead:
    """Starts each layer as it is built, and waits for an earlier one if too much is under way.

    ``LAYERS_AHEAD`` layers keep the device busy while the host waits. Of a small chunk there are
    more, since the host also builds while the device still computes a decode step.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[mx.array, int]] = deque()
        self._num_bytes = 0

    def follow(self, output: mx.array, num_dense: int) -> None:
        """Start ``output``, the result of the attention of the next layer.

        ``num_dense``: numbers of the dense copies that it reads.
        """
        mx.async_eval(output)
        num_bytes = output.nbytes + num_dense * output.dtype.size
        self._started.append((output, num_bytes))
        self._num_bytes += num_bytes
        while len(self._started) > LAYERS_AHEAD and self._num_bytes > BYTES_AHEAD:
            first, num_bytes = self._started.popleft()
            self._num_bytes -= num_bytes
            mx.eval(first)

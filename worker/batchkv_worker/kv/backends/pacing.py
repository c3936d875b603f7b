"""How far the host may run ahead of the device while prompts are computed.

Dense copies of packed keys and values are freed when the device is done with them, not when the
host has queued their use. CUDA accepts whole chunks of a long prompt before it has computed the
first layer, and the copies of many layers would then be in memory together.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

LAYERS_AHEAD = 2  # layers whose dense copies may exist at once


class Unpaced:
    """For devices that keep the host from running far ahead by themselves."""

    def follow(self, output: mx.array) -> None:
        """Does nothing."""


UNPACED = Unpaced()


class LayersAhead:
    """Starts each layer as it is built, and waits for the one ``LAYERS_AHEAD`` before it.

    That many layers keep the device busy while the host waits.
    """

    def __init__(self) -> None:
        self._started: deque[mx.array] = deque()

    def follow(self, output: mx.array) -> None:
        """Start ``output``, the result of the attention of the next layer."""
        mx.async_eval(output)
        self._started.append(output)
        if len(self._started) > LAYERS_AHEAD:
            mx.eval(self._started.popleft())

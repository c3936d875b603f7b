"""How far the host may run ahead of the device.

While a prompt is computed: dense copies of packed keys and values are freed when the device is done
with them, not when the host has queued their use. CUDA takes in whole chunks of a long prompt
before it has computed the first layer, and the copies of many layers then stand side by side.

While rows decode: MLX's CPU backend takes in about a hundred operations, and holds the host until
no more than these are left. They take less time than the host needs to build the next step, so a
CPU is given each layer of a step as soon as that is built (``starts_layers``).
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from batchkv_worker.kv.backends.device import is_cuda

LAYERS_AHEAD = 2  # of which dense copies may exist at once


def starts_layers() -> bool:
    """Whether each layer of a decode step is started when it is built, or the step as a whole.

    A GPU takes in a whole step at once, and each start would cost the host time.
    """
    return bool(mx.default_device() == mx.Device(mx.cpu))


class Pace:
    """Starts each layer as it is built, and waits for the one ``LAYERS_AHEAD`` before it.

    That many layers keep the device busy while the host waits. Only CUDA needs it: elsewhere
    ``follow`` does nothing.
    """

    def __init__(self) -> None:
        self._is_kept = is_cuda()
        self._started: deque[mx.array] = deque()

    def follow(self, output: mx.array) -> None:
        """``output``: what the attention of the next layer answers."""
        if not self._is_kept:
            return
        mx.async_eval(output)
        self._started.append(output)
        if len(self._started) > LAYERS_AHEAD:
            mx.eval(self._started.popleft())

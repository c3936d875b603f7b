"""Weights that are turned once, for linear layers that are multiplied alone.

MLX's linear layers turn their weights for each product. That computes nothing, but is a node of the
graph, which the host makes, visits and lets go: 72 in a decode step of Qwen3-4B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.rebind import swap_class, undo_all


class TurnedLinear(nn.Linear):  # type: ignore[misc]  # MLX has no types
    """An ``nn.Linear`` with the same results. ``_both``: its weight, and the same one turned."""

    _both: tuple[mx.array, mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        weight, turned = self._both
        if self["weight"] is not weight:  # another one since then
            weight = self["weight"]
            turned = weight.T
            self._both = weight, turned
        if "bias" in self:
            return mx.addmm(self["bias"], x, turned)
        return x @ turned


@dataclass(frozen=True)
class TurnWeights:
    """All layers that are plainly ``nn.Linear``: those of groups have one product already."""

    def install(self, model: Any) -> Undo:
        done = []
        for layer in model.modules():
            if type(layer) is nn.Linear:
                weight = layer["weight"]
                both = weight, weight.T
                mx.eval(both)  # so no later graph has the node
                done.append(swap_class(layer, TurnedLinear, _both=both))
        return undo_all(done)

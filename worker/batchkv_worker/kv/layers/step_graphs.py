"""Keeps graphs of decode steps, and uses them again for later steps.

Building a step costs the host as much as many kernels cost the device: Python runs through every
layer of the model. Most steps differ from the one before in a few numbers. So the model is traced
once (``mx.compile``), with these numbers and all buffers as arrays (``traced_view``), and the graph
is made from the trace after that, without Python. Buffers are still written in place.

Rows come and go in waves, so shapes come again: a few traces are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.layers.contract import SlotLayer
from batchkv_worker.kv.slots.step_view import StepView
from batchkv_worker.kv.slots.traced_view import arguments, signature, steps_left, traced

log = logging.getLogger("batchkv.engine")

LEAST_LEFT = 8  # steps with the same columns, for which a trace is worth its time
MOST_GRAPHS = 4  # that are kept: those used last
_Graph = Callable[[list[mx.array]], list[mx.array]]


class StepGraphs:
    """Graphs of steps of a model."""

    def __init__(self, layers: Sequence[SlotLayer], cache: list[Any]) -> None:
        """``cache``: the layers as the model gets them."""
        self._layers, self._cache = layers, cache
        self._last: Any = None  # the signature of the last step
        self._graphs: dict[Any, _Graph] = {}  # by signature, the one used last at the end
        self._view: StepView | None = (
            None  # of the step at hand: a graph must not hold its prefixes
        )
        self._is_refused = False
        self.num_replayed = 0

    def forward(self, model: Any, tokens: mx.array, view: StepView) -> mx.array:
        """The model's logits for ``tokens`` ``[rows, 1]``, in a step that has begun."""
        if self._is_refused:
            return model(tokens, cache=self._cache)
        is_exact = any(layer.is_exact for layer in self._layers)
        step = tokens.shape, signature(view, is_exact=is_exact)
        was, self._last = self._last, step
        graph = self._graphs.pop(step, None)
        if graph is None:
            if step != was or steps_left(view) < LEAST_LEFT:
                return model(tokens, cache=self._cache)
            graph = self._traced(model, len(arguments(view)))
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[step] = graph
        return self._replayed(model, tokens, view, graph)

    def drop(self) -> None:
        """Forget the graphs."""
        self._last = None
        self._graphs.clear()

    def _replayed(self, model: Any, tokens: mx.array, view: StepView, graph: _Graph) -> mx.array:
        given = [tokens, *arguments(view)]
        given += [array for layer in self._layers for array in layer.arrays]
        self._view = view
        try:
            logits, *arrays = graph(given)
        except (ValueError, RuntimeError, TypeError, AttributeError) as fault:
            if is_device_fault(fault):
                raise
            log.info(
                "the model's steps are built one by one, because it cannot be traced: %s", fault
            )
            self._is_refused = True
            self.drop()
            return model(tokens, cache=self._cache)
        finally:
            self._view = None
        del given
        self._swap(arrays)
        self.num_replayed += 1
        return logits

    def _traced(self, model: Any, count: int) -> _Graph:
        """A function of tokens, ``count`` arguments and buffers, for logits and buffers."""
        layers, cache = self._layers, self._cache

        def run(given: list[mx.array]) -> list[mx.array]:
            view = self._view
            assert view is not None
            before = [layer.arrays for layer in layers]
            try:
                self._swap(given[1 + count :])
                step = traced(view, given[1 : 1 + count])
                for layer in layers:
                    layer.begin(step)
                logits = model(given[0], cache=cache)
                return [logits, *(array for layer in layers for array in layer.arrays)]
            finally:
                for layer, arrays in zip(layers, before, strict=True):
                    layer.swap(arrays)
                    layer.begin(view)

        graph: _Graph = mx.compile(run)
        return graph

    def _swap(self, arrays: list[mx.array]) -> None:
        """Give the layers their arrays, one layer after the other."""
        for layer in self._layers:
            count = len(layer.arrays)
            layer.swap(arrays[:count])
            arrays = arrays[count:]

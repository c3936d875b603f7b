"""The attention layers of a model on their real inputs, on float caches and again on packed ones.

A model is run once on float caches while every module's call is watched: the innermost module that
is handed a layer's cache is that layer's attention. Called again with what it was called with, but
with the cache of a scheme, it makes the very same queries, keys and values, and what it gives
differs by what the scheme does to them. No class of model has to be known for this; where a model
computes attention itself, or from a latent, it does so here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn

from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.report.results import Error


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in an argument for the cache of a leaf, or for the keys and values it handed out."""

    leaf: int
    handed_out: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer's attention: with places for caches, and what it gave on float ones."""

    leaf: int
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: mx.array


@dataclass(slots=True)
class _Frame:
    """A module that is being called: leaves it was handed, those that its own modules were."""

    module: Any
    leaves: set[int]
    passed_on: set[int] = field(default_factory=set)


class _Watch:
    """Notes the calls of attention, in order."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.calls: list[_Call] = []
        self._layers = layers
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._open: list[_Frame] = []

    def call(self, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Call ``original`` on a module, noting it when it is a layer's attention."""
        places = [self._placed(value) for value in (*args, *kwargs.values())]
        leaves = {leaf for place in places for leaf in _leaves(place)}
        if not leaves or (self._open and self._open[-1].module is module):
            return original(module, *args, **kwargs)
        frame = _Frame(module, leaves)
        noted = len(self.calls)
        self._open.append(frame)
        try:
            found = original(module, *args, **kwargs)
        finally:
            self._open.pop()
            if self._open:
                self._open[-1].passed_on |= leaves | frame.passed_on
        own = [n for n in leaves - frame.passed_on if isinstance(self._layers[n], AttentionPrefill)]
        output = found[0] if isinstance(found, tuple) else found
        if own:
            # What it called (an indexer, say) runs again with it.
            del self.calls[noted:]
            named = dict(zip(kwargs, places[len(args) :], strict=True))
            self.calls.append(
                _Call(
                    min(own),
                    lambda *a, **k: original(module, *a, **k),
                    tuple(places[: len(args)]),
                    named,
                    output,
                )
            )
        return found

    def _placed(self, value: Any) -> Any:
        """The argument with places where caches stand, or what they handed out."""
        if id(value) in self._numbers:
            return _Place(self._numbers[id(value)])
        if not isinstance(value, tuple):
            return value
        for number, layer in enumerate(self._layers):
            is_pair = isinstance(layer, AttentionPrefill) and len(value) == 2
            if is_pair and layer.handed_out(*value, None):
                return _Place(number, handed_out=True)
        return tuple(self._placed(item) for item in value)


def _leaves(place: Any) -> Iterator[int]:
    if isinstance(place, _Place):
        yield place.leaf
    elif isinstance(place, tuple):
        for item in place:
            yield from _leaves(item)


@contextmanager
def _watched(model: Any, watch: _Watch) -> Iterator[None]:
    """Every module's calls go through ``watch``; Python looks calls up in the class."""
    owners = {
        owner
        for module in model.modules()
        for owner in type(module).__mro__
        if "__call__" in vars(owner) and issubclass(owner, nn.Module)
    }
    originals = {owner: vars(owner)["__call__"] for owner in owners}

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: watch.call(original, module, args, kwargs)

    try:
        for owner, original in originals.items():
            owner.__call__ = through(original)  # type: ignore[method-assign]
        yield
    finally:
        for owner, original in originals.items():
            owner.__call__ = original  # type: ignore[method-assign]


class AttentionSample:
    """The calls of attention over the first tokens of a text, with what they give in float."""

    def __init__(
        self,
        backend: Backend,
        model: Any,
        tree: CacheTree,
        exact: Sequence[LayerKind],
        tokens: Sequence[int],
    ) -> None:
        self._backend = backend
        self.num_tokens = len(tokens)
        self._tree = tree
        prefill = self._begun(exact)
        watch = _Watch(prefill.layers)
        with _watched(model, watch):
            model(mx.array([tokens]), cache=tree.nested(prefill.layers))
        self._calls = [
            call for call in watch.calls if mx.issubdtype(call.output.dtype, mx.floating)
        ]
        mx.eval([call.output for call in self._calls])

    def error(self, kinds: Sequence[LayerKind]) -> Error | None:
        """How far the outputs are from float under ``kinds``; None without attention."""
        prefill = self._begun(kinds)
        numbers = [
            number
            for number, layer in enumerate(prefill.layers)
            if isinstance(layer, AttentionPrefill)
        ]
        errors: list[tuple[float, int]] = []
        for call in self._calls:
            given = [_filled(value, prefill.layers) for value in call.args]
            named = {name: _filled(value, prefill.layers) for name, value in call.kwargs.items()}
            found = call.run(*given, **named)
            output = found[0] if isinstance(found, tuple) else found
            errors.append((_relative(output, call.output), numbers.index(call.leaf)))
        if not errors:
            return None
        worst, layer = max(errors)
        return Error(sum(error for error, _ in errors) / len(errors), worst, layer)

    def _begun(self, kinds: Sequence[LayerKind]) -> PrefillRows:
        prefill = PrefillRows(self._backend, kinds, self.num_tokens, self.num_tokens)
        prefill.begin(Chunk(0, self.num_tokens))
        return prefill


def _filled(value: Any, layers: Sequence[Any]) -> Any:
    """The argument with caches, and what they handed out, in their places."""
    if isinstance(value, _Place):
        layer = layers[value.leaf]
        return layer.keys_and_values() if value.handed_out else layer
    if isinstance(value, tuple):
        return tuple(_filled(item, layers) for item in value)
    return value


def _relative(found: mx.array, wanted: mx.array) -> float:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    length = mx.maximum(mx.linalg.norm(wanted), 1e-30)
    return float((mx.linalg.norm(found - wanted) / length).item())

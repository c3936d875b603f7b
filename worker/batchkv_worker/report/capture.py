"""Runs a model's attention layers on their real inputs, with float caches and with packed ones.

First the model runs on float caches while all calls of modules are recorded. The innermost module
that receives a layer's cache is that layer's attention. Then this module is called again with the
same arguments, but with the cache of a scheme. It computes the same queries, keys and values, so
its output differs only by the effect of the scheme. This needs no knowledge of model classes. It
also works for a model that computes attention itself, or from a latent.
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
class _Placeholder:
    """In an argument: the cache of a leaf, or the keys and values that this cache returned."""

    leaf: int
    handed_out: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer's attention, with placeholders for caches, and its output in float."""

    leaf: int
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: mx.array


@dataclass(slots=True)
class _OpenCall:
    """A module during its call: the leaves that it received, and those that it passed on."""

    module: Any
    leaves: set[int]
    passed_on: set[int] = field(default_factory=set)


class _CallRecorder:
    """Records the calls of attention, in order."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.calls: list[_Call] = []
        self._layers = layers
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._open: list[_OpenCall] = []

    def call(self, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Call ``original`` on a module, and record the call if it is a layer's attention."""
        values = [self._with_placeholders(value) for value in (*args, *kwargs.values())]
        leaves = {leaf for value in values for leaf in _leaves(value)}
        if not leaves or (self._open and self._open[-1].module is module):
            return original(module, *args, **kwargs)
        opened = _OpenCall(module, leaves)
        num_before = len(self.calls)
        self._open.append(opened)
        try:
            found = original(module, *args, **kwargs)
        finally:
            self._open.pop()
            if self._open:
                self._open[-1].passed_on |= leaves | opened.passed_on
        own = [
            n for n in leaves - opened.passed_on if isinstance(self._layers[n], AttentionPrefill)
        ]
        output = found[0] if isinstance(found, tuple) else found
        if own:
            # Drop the calls inside of it (of an indexer, for example): they run again with it.
            del self.calls[num_before:]
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            self.calls.append(
                _Call(
                    min(own),
                    lambda *a, **k: original(module, *a, **k),
                    tuple(values[: len(args)]),
                    named,
                    output,
                )
            )
        return found

    def _with_placeholders(self, value: Any) -> Any:
        """The argument with placeholders for caches, and for keys and values of caches."""
        if id(value) in self._numbers:
            return _Placeholder(self._numbers[id(value)])
        if not isinstance(value, tuple):
            return value
        for number, layer in enumerate(self._layers):
            is_pair = isinstance(layer, AttentionPrefill) and len(value) == 2
            if is_pair and layer.handed_out(*value, None):
                return _Placeholder(number, handed_out=True)
        return tuple(self._with_placeholders(item) for item in value)


def _leaves(value: Any) -> Iterator[int]:
    if isinstance(value, _Placeholder):
        yield value.leaf
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)


@contextmanager
def _recorded(model: Any, recorder: _CallRecorder) -> Iterator[None]:
    """Inside the block, calls of all modules go through ``recorder``.

    Python looks up ``__call__`` in the class, so the classes are changed.
    """
    owners = {
        owner
        for module in model.modules()
        for owner in type(module).__mro__
        if "__call__" in vars(owner) and issubclass(owner, nn.Module)
    }
    originals = {owner: vars(owner)["__call__"] for owner in owners}

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: recorder.call(original, module, args, kwargs)

    try:
        for owner, original in originals.items():
            owner.__call__ = through(original)  # type: ignore[method-assign]
        yield
    finally:
        for owner, original in originals.items():
            owner.__call__ = original  # type: ignore[method-assign]


class AttentionSample:
    """The calls of attention over the first tokens of a text, with their outputs in float."""

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
        prefill = self._empty_caches(exact)
        recorder = _CallRecorder(prefill.layers)
        with _recorded(model, recorder):
            model(mx.array([tokens]), cache=tree.nested(prefill.layers))
        self._calls = [
            call for call in recorder.calls if mx.issubdtype(call.output.dtype, mx.floating)
        ]
        mx.eval([call.output for call in self._calls])

    def error(self, kinds: Sequence[LayerKind]) -> Error | None:
        """The error of the outputs under ``kinds``, relative to float; None without attention."""
        prefill = self._empty_caches(kinds)
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

    def _empty_caches(self, kinds: Sequence[LayerKind]) -> PrefillRows:
        prefill = PrefillRows(self._backend, kinds, self.num_tokens, self.num_tokens)
        prefill.begin(Chunk(0, self.num_tokens))
        return prefill


def _filled(value: Any, layers: Sequence[Any]) -> Any:
    """The argument with caches, or their keys and values, in place of placeholders."""
    if isinstance(value, _Placeholder):
        layer = layers[value.leaf]
        return layer.keys_and_values() if value.handed_out else layer
    if isinstance(value, tuple):
        return tuple(_filled(item, layers) for item in value)
    return value


def _relative(found: mx.array, wanted: mx.array) -> float:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    length = mx.maximum(mx.linalg.norm(wanted), 1e-30)
    return float((mx.linalg.norm(found - wanted) / length).item())

"""Wrong caches on purpose, to see that the recall models' answers show them.

Each fault changes mlx-lm's own caches, of prompts of one length, where decoding begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from recall.task import Case

Fault = Callable[[list[Any], list[Case]], None]
"""Takes the caches of all layers, and the prompts that fill their rows."""


def _attention(caches: list[Any]) -> list[Any]:
    return [cache for cache in caches if not isinstance(cache, ArraysCache)]


def _in_order(cache: Any) -> tuple[Any, Any]:
    """Keys and values, oldest first: [1, heads, tokens, size]."""
    if not isinstance(cache, RotatingKVCache):
        keys, values = cache.keys_and_values()
        return keys, values
    # Right behind a prefill the window may hold more than it shows to a decode step.
    ordered = (cache._temporal_order(x) for x in (cache.keys, cache.values))
    keys, values = (x[:, :, -cache.max_size :] for x in ordered)
    return keys, values


def _replace(cache: Any, keys: Any, values: Any, offset: int) -> None:
    """The new content, oldest first, and the position that comes next."""
    if isinstance(cache, RotatingKVCache) and keys.shape[2] < min(offset, cache.max_size):
        # mlx-lm's ring must be full once its size has been passed: a blank stands at its front.
        missing = min(offset, cache.max_size) - keys.shape[2]
        keys, values = (mx.pad(x, [(0, 0), (0, 0), (missing, 0), (0, 0)]) for x in (keys, values))
    cache.keys, cache.values, cache.offset = keys, values, offset
    if isinstance(cache, RotatingKVCache):
        cache._idx = keys.shape[2]


def _without(x: Any, place: int) -> Any:
    return mx.concatenate([x[:, :, :place], x[:, :, place + 1 :]], axis=2)


def lose_last(caches: list[Any], cases: list[Case]) -> None:
    """The prompt's last token is missing; what follows stands at its position."""
    for cache in _attention(caches):
        keys, values = _in_order(cache)
        last = keys.shape[2] - 1
        _replace(cache, _without(keys, last), _without(values, last), cache.offset - 1)


def blank_last(caches: list[Any], cases: list[Case]) -> None:
    """Keys and values of the prompt's last token are zeros; positions are right."""
    _blank(caches, [1] * len(cases))


def blank_source(caches: list[Any], cases: list[Case]) -> None:
    """Keys and values of one token that the answer repeats are zeros; positions are right."""
    sources = [case.sources[len(case.answer) // 2] for case in cases]
    _blank(caches, [len(case.prompt) - place for case, place in zip(cases, sources, strict=True)])


def _blank(caches: list[Any], back: list[int]) -> None:
    """In each row the token so many places before the end, where a layer still has it."""
    for cache in _attention(caches):
        keys, values = _in_order(cache)
        size = keys.shape[2]
        is_kept = mx.arange(size) != size - mx.array(back)[:, None]
        keys, values = (x * is_kept[:, None, :, None] for x in (keys, values))
        _replace(cache, keys, values, cache.offset)


def shift_positions(caches: list[Any], cases: list[Case]) -> None:
    """Positions go on one too late; nothing is missing, and BOS stands twice where it is seen."""
    for cache in _attention(caches):
        keys, values = _in_order(cache)
        if not isinstance(cache, RotatingKVCache) or keys.shape[2] < cache.max_size:
            keys, values = (mx.concatenate([x[:, :, :1], x], 2) for x in (keys, values))
        _replace(cache, keys, values, cache.offset + 1)


def take_other_row(caches: list[Any], cases: list[Case]) -> None:
    """Keys and values are another row's; recurrent states are right."""
    for cache in _attention(caches):
        keys, values = (mx.roll(x, 1, axis=0) for x in _in_order(cache))
        _replace(cache, keys, values, cache.offset)


def take_other_state(caches: list[Any], cases: list[Case]) -> None:
    """Recurrent states are another row's; keys and values are right."""
    for cache in caches:
        if isinstance(cache, ArraysCache):
            cache[0], cache[1] = (mx.roll(cache[part], 1, axis=0) for part in (0, 1))


def _zero(caches: list[Any], part: int) -> None:
    for cache in caches:
        if isinstance(cache, ArraysCache):
            cache[part] = mx.zeros_like(cache[part])


def zero_state(caches: list[Any], cases: list[Case]) -> None:
    """Both recurrent states are zeros."""
    _zero(caches, 0)
    _zero(caches, 1)


def zero_conv(caches: list[Any], cases: list[Case]) -> None:
    """The convolutions' last inputs are zeros."""
    _zero(caches, 0)


def zero_ssm(caches: list[Any], cases: list[Case]) -> None:
    """The state-space states are zeros."""
    _zero(caches, 1)


def narrow_window(caches: list[Any], cases: list[Case]) -> None:
    """The oldest token of every window is gone: the window is one token too narrow."""
    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            keys, values = _in_order(cache)
            cache.max_size -= 1
            size = cache.max_size
            _replace(cache, keys[:, :, -size:], values[:, :, -size:], cache.offset)


FAULTS: dict[str, Fault] = {
    "last token lost": lose_last,
    "last token blank": blank_last,
    "token of the answer blank": blank_source,
    "positions off by one": shift_positions,
    "another row's KV": take_other_row,
}
STATE_FAULTS: dict[str, Fault] = {
    "state zeroed": zero_state,
    "conv state zeroed": zero_conv,
    "SSM state zeroed": zero_ssm,
    "another row's state": take_other_state,
}
WINDOW_FAULTS: dict[str, Fault] = {"window one narrower": narrow_window}

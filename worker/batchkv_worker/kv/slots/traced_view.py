"""The view of a step whose graph is kept: all that changes from step to step is an array.

A graph can be used again for a later step if both have the same ``signature``. Then rows, groups,
columns and shared prefixes are the same. Where rows begin, the column that is written and the
positions of tokens are arrays, which are given to the graph at each step (``arguments``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from batchkv_worker.kv.backends.host_numbers import host_numbers
from batchkv_worker.kv.slots.pool_view import PoolView
from batchkv_worker.kv.slots.step_view import ColumnSpan, StepView

if TYPE_CHECKING:
    from batchkv_worker.kv.attention.shared_prefix import SharedPrefix


def signature(view: StepView, *, is_exact: bool) -> Any:
    """Equal for steps that may have one graph; a key of those that are kept.

    ``is_exact``: some layers read rows of one length without rounding (``exact_groups``).
    """
    spans = tuple(
        [
            (
                window,
                span.num_rows,
                span.stored,
                span.low,
                span.high,
                span.longest,
                span.shape_of_groups,
                None if span.pool is None else span.pool.shape,
            )
            for window, span in view.spans.items()
        ]
    )
    exact = tuple([span.exact_columns for span in view.spans.values()]) if is_exact else None
    return view.num_rows, spans, exact


def steps_left(view: StepView) -> int:
    """Steps after this one until the columns of some layer are rounded up to others."""
    return min(span.high - span.write - 1 for span in view.spans.values())


def arguments(view: StepView) -> list[mx.array]:
    """What changes from step to step, and the arrays of shared prefixes."""
    found = [view.offsets]
    for span in view.spans.values():
        found += [span.bounds, host_numbers([span.write])]
        found += [] if span.pool is None else span.pool.arrays
    return [*found, *_prefix_arrays(view)]


def traced(view: StepView, given: Sequence[mx.array]) -> StepView:
    """The same step with the arrays ``given`` in the place of ``arguments``."""
    left = iter(given)
    offsets = next(left)
    pairs, pools = [], []
    for span in view.spans.values():
        pairs.append((next(left), next(left)))
        pools.append(None if span.pool is None else span.pool.with_arrays(left))
    clones: dict[int, SharedPrefix] = {}
    for prefix in _prefixes(view):
        clones[prefix.rank] = _clone(prefix, clones, left)
    spans = {
        window: TracedSpan(
            span, *pair, {slot: clones[one.rank] for slot, one in span.prefixes}, pool
        )
        for (window, span), pair, pool in zip(view.spans.items(), pairs, pools, strict=True)
    }
    return StepView(view.num_rows, offsets, spans)


class TracedSpan(ColumnSpan):
    """A span whose masks and bounds follow from arrays."""

    def __init__(
        self,
        span: ColumnSpan,
        bounds: mx.array,
        write: mx.array,
        prefixes: Mapping[int, SharedPrefix],
        pool: PoolView | None = None,
    ) -> None:
        self.pool = pool
        for name in self.FIXED:
            setattr(self, name, getattr(span, name))
        self._prefixes = prefixes
        self._place = write
        self._cell = write.reshape(1, 1, 1, 1)  # once for all layers
        self.__dict__["bounds"] = bounds

    def store(self, part: mx.array, new: mx.array) -> mx.array:
        """At a place that an array says, for all rows of the buffer.

        The rows behind those of the step are free and get zeros: CUDA takes 25 times as long to
        write some rows alone at such a place.
        """
        free = part.shape[0] - self.num_rows
        if free:
            new = mx.pad(new, [(0, free), (0, 0), (0, 0), (0, 0)])
        return mx.put_along_axis(part, self._cell, new, axis=2)

    def windowed(self, window: int) -> mx.array | None:
        return self._seen(0, self.num_rows, self.low, window)

    def _masked(self, first: int, last: int, low: int, window: int | None) -> mx.array | None:
        return self._seen(first, last, low, None) if self._hides(first, last, low) else None

    def _seen(self, first: int, last: int, low: int, window: int | None) -> mx.array:
        starts = self.bounds[first:last, 0]
        if window is not None:
            starts = mx.maximum(starts, self._place - (window - 1))
        return self._compared(starts, self._place, low)


def _prefixes(view: StepView) -> list[SharedPrefix]:
    """All that rows have, parents first."""
    found = {
        part.rank: part
        for span in view.spans.values()
        for _, prefix in span.prefixes
        for part in prefix.chain
    }
    return [found[rank] for rank in sorted(found)]


def _prefix_arrays(view: StepView) -> Iterator[mx.array]:
    for prefix in _prefixes(view):
        for keys, values in prefix.slots.values():
            yield from (*keys, *values)


def _clone(
    prefix: SharedPrefix, clones: Mapping[int, SharedPrefix], given: Iterator[mx.array]
) -> SharedPrefix:
    """The same prefix with the next arrays of those given."""
    slots = {
        place: (tuple(next(given) for _ in keys), tuple(next(given) for _ in values))
        for place, (keys, values) in prefix.slots.items()
    }
    parent = None if prefix.parent is None else clones[prefix.parent.rank]
    return type(prefix)(
        prefix.key, prefix.num_tokens, parent, rank=prefix.rank, packed={}, slots=slots
    )

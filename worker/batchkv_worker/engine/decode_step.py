"""A decode step that was built and not read yet, and the input tokens of the next one.

Steps are built while the last one runs. A step with guided rows is built in two parts, because a
guide must see the last token before it says which may follow: first the logits, then the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_producer.wire.job import ErrorCode
from batchkv_worker.engine.grammar.grammars import Grammars
from batchkv_worker.engine.tokens import outputs
from batchkv_worker.engine.tokens.sampling import FewTokens, Sampled, sample
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.sequence import Sequence
from batchkv_worker.trace import DECODE, ENGINE, MASKS


@dataclass(slots=True)
class Step:
    """A decode step: its rows by slot, and the tokens that it samples."""

    rows: list[Sequence | None]
    sampled: Sampled
    mark: mx.array | None = None  # computed after its first layers: then the next may start theirs
    # With a mark, the tokens as the next step's inputs ``[rows]``. MLX moves what the host reads,
    # wherever the device still needs it. So the next step, which may have begun, must not read
    # ``sampled``.
    inputs: mx.array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.mark is not None:
            self.inputs = self.sampled.tokens.astype(mx.int32)

    @property
    def arrays(self) -> list[mx.array]:
        """What is computed for it, apart from the slots."""
        early = [one for one in (self.inputs, self.mark) if one is not None]
        return [*self.sampled.arrays, *early]

    def fetch(self) -> outputs.ReadBack:
        """Wait for it, and copy its results to the host."""
        mx.eval(self.arrays)
        return outputs.read_back(self.sampled)


@dataclass(slots=True)
class OpenStep:
    """A decode step with guided rows whose tokens are not chosen yet, only their logits."""

    rows: list[Sequence | None]
    tokens: mx.array  # that it is fed
    logits: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        """What can be computed before its tokens are chosen."""
        return [self.logits]


def build_step(
    model: Any,
    slots: DecodeSlots,
    by_slot: Mapping[int, Sequence],
    in_flight: Step | None,
    few: FewTokens,
    *,
    starts_early: bool = False,
) -> Step | OpenStep:
    """The graph of the next step, which takes the tokens that the last one sampled.

    ``starts_early``: the one after it may start its first layers before this one has ended.
    """
    view = slots.begin_step()
    rows = [by_slot.get(slot) for slot in range(view.num_rows)]
    tokens = inputs(rows, in_flight)
    logits = slots.forward(model, tokens.reshape(-1, 1))[:, -1]
    is_guided = any(row is not None and row.guide is not None for row in rows)
    step: Step | OpenStep
    if is_guided:
        step = OpenStep(rows, tokens, logits)
    else:
        mark = slots.mark() if starts_early else None
        step = Step(rows, sample(logits, tokens, rows, few=few), mark)
    slots.end_step()
    return step


def start(
    upcoming: Step | OpenStep | None, landed: Step | None, slots: DecodeSlots, launches: Launches
) -> outputs.ReadBack | None:
    """Wait for the last step, and start the next one. Returns what the last one gave.

    Nothing may be launched meanwhile. Where steps have a mark, the first layers of the next step
    start before the last step has ended, and after it has computed the same layers.
    """
    if isinstance(upcoming, Step) and landed is not None and landed.mark is not None:
        mx.eval(landed.mark)
        mark = [] if upcoming.mark is None else [upcoming.mark]
        rest = [*upcoming.arrays, *slots.unread_arrays]
        return launches.start_around(slots.first_arrays, landed.fetch, mark, rest)
    read = landed.fetch() if landed is not None else None
    if upcoming is not None:
        launches.start(upcoming.arrays, slots.unread_arrays)
    return read


def choose(
    step: OpenStep, grammars: Grammars, stop: Callable[[Sequence, str, str], None], few: FewTokens
) -> Step:
    """Choose the tokens of a step with guided rows, which have read their last tokens.

    ``stop`` ends a row whose guide fails.
    """
    ENGINE.enter(MASKS)  # meanwhile the device computes the logits
    masks, faults = grammars.masks(step.rows, step.logits.shape[-1])
    ENGINE.enter(DECODE)
    for row, fault in faults:
        stop(row, ErrorCode.INVALID_REQUEST, str(fault))
    rows = [None if row is None or row.is_ended else row for row in step.rows]
    return Step(rows, sample(step.logits, step.tokens, rows, masks, few))


def inputs(rows: list[Sequence | None], in_flight: Step | None) -> mx.array:
    """Input tokens ``[rows]``: those that the step in flight samples, else each row's last one."""
    known = [0 if row is None else (row.generated or row.prompt)[-1] for row in rows]
    before = in_flight.rows if in_flight else []
    slots = {id(row): place for place, row in enumerate(before) if row is not None}
    places = [-1 if row is None else slots.get(id(row), -1) for row in rows]
    if in_flight is None or all(place < 0 for place in places):
        return mx.array(known)
    previous = in_flight.inputs
    if previous is None:
        previous = in_flight.sampled.tokens.astype(mx.int32)
    if places == list(range(previous.shape[0])):
        return previous
    gathered = mx.take(previous, mx.array([max(0, place) for place in places]))
    return mx.where(mx.array(places) >= 0, gathered, mx.array(known))

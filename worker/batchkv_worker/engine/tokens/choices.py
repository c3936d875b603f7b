"""Rows with several choices (``n`` in a line): one job and one prompt, several answers, one result.

Each choice is a ``Sequence``, so that scheduling, decoding and recovery know no choices. The first
one has the id of its job. It is queued alone, and the engine computes its prompt. When it enters a
slot, the others are queued after that prompt (``decode_rows``). They have ids of their own, as the
replays of the audit have. The engine reports the row when its last choice has ended.

Choice k draws with the seed (seed + k) mod 2**64. So a row with ``n: 8`` has the answers of eight
rows with those seeds. At temperature 0 all choices are equal: the first is computed, and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from batchkv_producer.wire.choice import Choice
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Sequence

SEEDS = 2**64


@dataclass(slots=True)
class _Row:
    """The choices that are computed, and how they ended. ``num_wanted``: of the result."""

    choices: list[Sequence]
    num_wanted: int
    ended: dict[int, Completed] = field(default_factory=dict)


class Choices:
    """The rows of one engine that have several choices, from their start to their end."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def add(
        self,
        first: Sequence,
        num_computed: int,
        num_wanted: int,
        make_detokenizer: Callable[[], Any],
    ) -> None:
        """Make the other choices of a row that is queued next, whose keys are known.

        ``num_computed`` is ``num_wanted``, or 1 if that one choice is to be repeated.
        """
        if num_wanted == 1:
            return
        assert first.job_id not in self._rows, f"row {first.job_id} is here already"
        for number in range(1, num_computed):
            seed = (first.generation.seed + number) % SEEDS
            other = replace(
                first,
                job_id=f"choice {number} of {first.job_id}",  # no job has such an id: it has blanks
                generation=replace(first.generation, seed=seed),
                generated=[],
                logprobs=[],
                detokenizer=None if first.detokenizer is None else make_detokenizer(),
                guide=None,  # it gets one when it is queued
                choice=number,
                first_choice=first,
                unqueued=[],
            )
            first.unqueued.append(other)
        self._rows[first.job_id] = _Row([first, *first.unqueued], num_wanted)

    def end(self, choice: Sequence, event: Completed) -> Completed | None:
        """A choice has ended well. Returns the event of its row, if that has ended, too."""
        row = self._rows.get(choice.row_id)
        if row is None:
            return event
        row.ended[choice.choice] = event
        if len(row.ended) < len(row.choices):
            return None
        del self._rows[choice.row_id]
        ended = [row.ended[number] for number in range(len(row.choices))]
        return _joined(ended * (row.num_wanted // len(ended)))

    def leave(self, job_id: str) -> list[str]:
        """Forget a row that has failed or was cancelled; the ids of its choices that may run on."""
        row = self._rows.pop(job_id, None)
        if row is None:
            return []
        row.choices[0].queue_choices()  # they never start
        return [one.job_id for one in row.choices if not one.is_ended]

    def is_begun(self, row: Sequence) -> bool:
        """Whether any choice of a row that waits was computed before."""
        known = self._rows.get(row.job_id)
        return row.is_begun or (known is not None and len(known.choices) > 1 + len(row.unqueued))

    def fresh(self, waiting: Iterable[Sequence], job_ids: Collection[str], count: int) -> list[str]:
        """Of these rows, those that wait and were never begun, the last first.

        All their choices together are at most ``count``.
        """
        wanted, found = {*job_ids}, []
        for row in reversed(list(waiting)):
            num_choices = 1 + len(row.unqueued)
            if row.job_id in wanted and not self.is_begun(row) and num_choices <= count:
                count -= num_choices
                found.append(row.job_id)
        return found

    def check(self, *, is_idle: bool) -> None:
        """Raise AssertionError if a row waits for a choice that is not computed any more."""
        assert not (is_idle and self._rows), f"rows wait for choices: {[*self._rows]}"
        for row in self._rows.values():
            assert len(row.ended) < len(row.choices)
            for number, one in enumerate(row.choices):
                assert one.is_ended == (number in row.ended), f"{one.job_id}: {one.status.name}"

    def report(self) -> str:
        """How many choices are to come, for the engine's report; empty when there are none."""
        rows = [*self._rows.values()]
        if not rows:
            return ""
        num_left = sum(len(row.choices) - len(row.ended) for row in rows)
        num_all = sum(len(row.choices) for row in rows)
        return f"; {num_left} of {num_all} choices are to come"


def _joined(ended: list[Completed]) -> Completed:
    """One event for all choices of a row. The prompt counts once, with what the first one found."""
    first = ended[0]
    usage = replace(
        first.usage,
        completion=sum(one.usage.completion for one in ended),
        reasoning=sum(one.usage.reasoning for one in ended),
    )
    return replace(first, usage=usage, more=tuple(map(_choice, ended[1:])))


def _choice(one: Completed) -> Choice:
    return Choice(
        text=one.text,
        finish_reason=one.finish_reason,
        logprobs=one.logprobs,
        reasoning=one.reasoning,
        tool_calls=one.tool_calls,
        token_ids=None if one.prompt_token_ids is None else one.token_ids,
    )

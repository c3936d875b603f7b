"""The choices of a row as sequences, and their ends as one event. No engine."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_producer.wire.choice import Choice, ToolCall
from batchkv_producer.wire.job import TokenLogprob, Usage
from batchkv_worker.engine.tokens.choices import Choices
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Generation, Sequence


class Counter:
    """A guide that counts the tokens that it has taken."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.is_over = False

    def take(self, token: int) -> None:
        self.num_taken += 1

    def fresh(self) -> Counter:
        return Counter()


def row(**changes: Any) -> Sequence:
    values = {"generation": Generation(9, seed=2**64 - 1, stop=("x",)), "detokenizer": object()}
    return Sequence("job", [1, 2, 3], **{**values, **changes})


def test_a_choice_differs_in_what_it_generates_alone() -> None:
    """Choices share prompt and keys. Seed, id, texts, detokenizer and guide are their own."""
    choices, first = Choices(), row(block_keys=[b"k"], num_common=2, guide=Counter())
    choices.add(first, 3, 3, object)
    one, two = first.unqueued
    assert [other.generation.seed for other in (first, one, two)] == [2**64 - 1, 0, 1]
    assert len({other.job_id for other in (first, one, two)}) == 3
    assert one.row_id == two.row_id == "job" and " " in one.job_id
    assert one.prompt is first.prompt and (one.block_keys, one.num_common) == ([b"k"], 2)
    assert len({id(other.detokenizer) for other in (first, one, two)}) == 3
    one.generated.append(1)
    assert first.guide is not None
    first.guide.take(7)
    first.is_converted = True
    assert first.queue_choices() == [one, two] and first.unqueued == []
    assert first.generated == two.generated == [] and one.is_converted
    guides: list[Any] = [other.guide for other in (first, one, two)]
    assert [guide.num_taken for guide in guides] == [1, 0, 0] and guides[1] is not guides[2]


def test_a_row_ends_with_its_last_choice() -> None:
    """In whatever order choices end, the result has them by number, with all that each has."""
    choices, first = Choices(), row()
    choices.add(first, 3, 3, object)
    one, two = first.queue_choices()
    logprobs = (TokenLogprob("t", -0.5),)
    call = ToolCall("id", "f", "{}")
    ends = {
        two: Completed("c2", "t2", "length", Usage(3, 5, 2, 1), (7,), logprobs),
        first: Completed("job", "t0", "stop", Usage(3, 2, 0), (8, 9), saved_ms=4),
        one: Completed(
            *("c1", "t1", "tool_calls", Usage(3, 4, 2, 3), (6,)),
            reasoning="r", tool_calls=(call,), prompt_token_ids=(1, 2, 3),
        ),
    }  # fmt: skip
    *early, whole = [choices.end(*each) for each in ends.items()]
    assert early == [None, None] and whole is not None
    assert (whole.job_id, whole.text, whole.saved_ms) == ("job", "t0", 4)
    assert whole.usage == Usage(prompt=3, completion=11, cached=0, reasoning=4)
    assert whole.more == (
        Choice("t1", "tool_calls", None, "r", (call,), (6,)),
        Choice("t2", "length", logprobs),
    )
    assert choices.report() == ""
    choices.check(is_idle=True)


def test_a_row_that_leaves_is_forgotten() -> None:
    """Only the choices that run on are named. A row of one choice is never kept."""
    choices, first = Choices(), row()
    choices.add(first, 4, 4, object)
    one, two, three = first.queue_choices()
    assert choices.end(one, Completed("c1", "t", "stop", Usage())) is None
    one.end("stop")
    assert choices.report() == "; 3 of 4 choices are to come"
    assert choices.leave("job") == ["job", two.job_id, three.job_id]
    assert choices.leave("job") == []
    single = row()
    choices.add(single, 1, 1, object)
    event = Completed("job", "t", "stop", Usage(1, 1, 0))
    assert choices.end(single, event) is event and not single.unqueued


def test_a_choice_that_is_lost_is_noticed() -> None:
    """The check of the engine's books fails for a row that waits for a choice that has ended."""
    choices, first = Choices(), row()
    choices.add(first, 2, 2, object)
    choices.check(is_idle=False)
    with pytest.raises(AssertionError, match="wait for choices"):
        choices.check(is_idle=True)
    first.unqueued[0].end("canceled")
    with pytest.raises(AssertionError, match="choice 1 of job"):
        choices.check(is_idle=False)

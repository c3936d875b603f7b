"""Guides of thoughts: the budget ends them, and a grammar begins after them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.answers.thinking import Lead, State, ThinkingGuide, Thoughts
from batchkv_worker.engine.tokens.generation import Generation
from batchkv_worker.engine.tokens.guide import (
    AllOf,
    Mask,
    allow_only,
    doubted_of,
    forbid,
    new_masks,
)
from batchkv_worker.engine.tokens.sampling import sample
from batchkv_worker.guide import Guide, GuideFault
from batchkv_worker.sequence import Sequence as Row

VOCABULARY = 70
END, BLANK, CALL = 0, 5, 6
OPEN, CLOSE = 10, 11  # <think> and </think>
ONE = Thoughts(VOCABULARY, (OPEN,), (CLOSE,), blanks=frozenset({BLANK}), enders=frozenset({END}))
# As gpt-oss: a channel's name distinguishes a thought from an answer.
CHANNEL, ANALYSIS, FINAL, MESSAGE, STOP, START, ROLE = 20, 21, 22, 23, 24, 25, 26
MANY = Thoughts(
    VOCABULARY,
    (CHANNEL, ANALYSIS, MESSAGE),
    (STOP,),
    fork=1,
    bridge=(START, ROLE),
    answer=(CHANNEL, FINAL, MESSAGE),
    enders=frozenset({END}),
)


class Exactly:
    """A grammar of one answer: these tokens, and then the end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def is_over(self) -> bool:
        return self.at == len(self.tokens)

    def fill(self, allowed: Mask) -> None:
        allow_only(allowed, [END if self.is_over else self.tokens[self.at]])

    def take(self, token: int) -> None:
        if self.is_over or token != self.tokens[self.at]:
            raise GuideFault(f"{token} is not part of the answer")
        self.at += 1

    def restart(self, tokens: Sequence[int]) -> None:
        self.at = 0
        for token in tokens:
            self.take(token)

    def fresh(self) -> Guide:
        return Exactly(*self.tokens)

    def and_then(self, grammar: Guide) -> Guide:
        return AllOf([self, grammar])


def allowed(guide: Guide) -> set[int]:
    """The tokens that may follow."""
    mask = new_masks(1, VOCABULARY)[0]
    guide.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]
    return {int(token) for token in np.flatnonzero(bits)}


def write(guide: Guide, *tokens: int) -> None:
    for token in tokens:
        assert token in allowed(guide), (token, allowed(guide))
        guide.take(token)


EVERYTHING = set(range(VOCABULARY))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_ends_a_thought(budget: int) -> None:
    """After so many tokens only the closing marker may follow, and then anything but a thought."""
    guide = ThinkingGuide(ONE, State.START, budget)
    if budget:
        write(guide, OPEN, *[30] * budget)
        assert allowed(guide) == {CLOSE}
        write(guide, CLOSE)
    assert allowed(guide) == EVERYTHING - {OPEN}
    write(guide, 30, 30)
    assert allowed(guide) == EVERYTHING - {OPEN} and not guide.is_over


def test_a_prompt_that_opened_the_thought() -> None:
    """Its tokens count from the first; a budget of 0 closes it at once."""
    guide = ThinkingGuide(ONE, State.THOUGHT, 0)
    assert allowed(guide) == {CLOSE}
    guide = ThinkingGuide(ONE, State.THOUGHT, 2)
    write(guide, 30, 31)
    assert allowed(guide) == {CLOSE}


def test_a_short_thought_is_left_alone() -> None:
    """Nothing is forced, and what is left counts for a further thought."""
    guide = ThinkingGuide(ONE, State.START, 5)
    write(guide, OPEN, 30, CLOSE, 40, OPEN, 31, 32, 33, 34)
    assert allowed(guide) == {CLOSE}


def test_a_marker_of_several_tokens_is_finished() -> None:
    """If the thought's last tokens begin the marker, only its rest is forced."""
    pair = Thoughts(VOCABULARY, (OPEN, 12), (CLOSE, 13))
    guide = ThinkingGuide(pair, State.THOUGHT, 2)
    write(guide, 30, CLOSE)
    assert allowed(guide) == {13}
    write(guide, 13)
    assert allowed(guide) == EVERYTHING - {OPEN}
    other = ThinkingGuide(pair, State.THOUGHT, 2)
    write(other, CLOSE, 30)
    assert allowed(other) == {CLOSE}
    write(other, CLOSE, 13)
    assert allowed(other) == EVERYTHING - {OPEN}


def test_a_call_ends_a_thought() -> None:
    """It is not cut by the budget, because it is no part of the thought."""
    calling = replace(ONE, call=(CALL, 7))
    guide = ThinkingGuide(calling, State.THOUGHT, 4)
    write(guide, 30, CALL, 7, 31, 32, 33)
    assert allowed(guide) == EVERYTHING
    write(guide, OPEN, 34, 35, 36)
    assert allowed(guide) == {CLOSE}
    silent = ThinkingGuide(ONE, State.THOUGHT, 4)
    write(silent, 30, CALL, 7, 31)
    assert allowed(silent) == {CLOSE}


def test_a_grammar_begins_after_the_thought() -> None:
    """At first either may come; in the thought all but the end of the row; then the grammar."""
    guide = ThinkingGuide(ONE, State.START).and_then(Exactly(30, 31))
    assert allowed(guide) == {OPEN, 30}
    write(guide, OPEN, 30, 31, 7)
    assert allowed(guide) == EVERYTHING - {END} and not guide.is_over
    write(guide, CLOSE)
    assert allowed(guide) == {BLANK, 30}
    write(guide, BLANK)
    assert allowed(guide) == {30}
    write(guide, 30, 31)
    assert guide.is_over and allowed(guide) == {END}


def test_a_grammar_without_a_thought() -> None:
    """A model may answer at once, or its prompt has closed the thought."""
    for state in (State.START, State.ANSWER):
        guide = ThinkingGuide(ONE, state).and_then(Exactly(30, 31))
        write(guide, 30)
        assert allowed(guide) == {31}
        write(guide, 31)
        assert guide.is_over
    assert allowed(ThinkingGuide(ONE, State.ANSWER).and_then(Exactly(30))) == {30}


def doubted(guide: Guide) -> tuple[int, ...]:
    """What is doubted of the tokens that may follow."""
    mask = new_masks(1, VOCABULARY)[0]
    guide.fill(mask)
    return doubted_of(guide, mask)


def test_a_thought_that_nobody_asked_for_is_doubted() -> None:
    """A grammar is no reason to think. A blank line may come before a thought."""
    first = ThinkingGuide(ONE, State.START)
    guide = first.and_then(Exactly(30, 31))
    assert doubted(guide) == (OPEN, BLANK)
    assert doubted(AllOf([guide, AllOf([])])) == (OPEN, BLANK)
    assert doubted(ThinkingGuide(ONE, State.START)) == ()  # without a grammar
    write(guide, OPEN)
    assert doubted(guide) == ()
    write(guide, CLOSE)
    assert doubted(guide) == ()
    begun = first.fresh().and_then(Exactly(30, 31))
    write(begun, 30)
    assert doubted(begun) == ()


def test_a_marker_that_the_grammar_begins_with_is_not_doubted() -> None:
    """Nor is the only token that may come."""
    guide = ThinkingGuide(MANY, State.START).and_then(Exactly(30))
    assert doubted(guide) == ()  # an answer begins with a channel, too
    write(guide, CHANNEL)
    assert doubted(guide) == (ANALYSIS,)
    write(guide, ANALYSIS)
    assert allowed(guide) == {MESSAGE} and doubted(guide) == ()


@pytest.mark.parametrize(("likeliest", "chosen"), [(40, 30), (OPEN, OPEN), (BLANK, OPEN)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_thinks_if_it_would_without_the_grammar(
    likeliest: int, chosen: int, temperature: float
) -> None:
    """Also beside rows that have no guide, or none that doubts."""
    guides = [None, ThinkingGuide(ONE, State.START), AllOf([Exactly(30)])]
    guides.append(ThinkingGuide(ONE, State.START).and_then(Exactly(30)))
    generation = Generation(9, temperature=temperature)
    rows = [Row(str(place), (1, 2), generation) for place in range(len(guides))]
    masks = new_masks(len(rows), VOCABULARY)
    for row, guide, mask in zip(rows, guides, masks, strict=True):
        row.guide = guide
        if guide is not None:
            guide.fill(mask)
    logits = np.full((len(rows), VOCABULARY), -99.0, np.float32)
    logits[:, likeliest] = 50
    logits[:, OPEN] += 20  # likelier than the answer's first token
    found = sample(mx.array(logits), mx.array([2] * len(rows)), rows, masks).tokens.tolist()
    assert found == [likeliest, likeliest, 30, chosen]


def test_a_blank_line_that_the_grammar_wants_is_its_own() -> None:
    """Only one that it does not allow belongs to the marker."""
    guide = ThinkingGuide(ONE, State.THOUGHT).and_then(Exactly(BLANK, 30))
    write(guide, CLOSE, BLANK)
    assert allowed(guide) == {30}


def test_a_budget_and_a_grammar() -> None:
    """The thought is closed at the budget, and the grammar goes on; 0 allows no thought."""
    guide = ThinkingGuide(ONE, State.START, 2).and_then(Exactly(30))
    write(guide, OPEN, 40, 41, CLOSE, 30)
    assert guide.is_over
    assert allowed(ThinkingGuide(ONE, State.START, 0).and_then(Exactly(30))) == {30}


def test_channels_of_gpt_oss() -> None:
    """The grammar begins in the final channel, right away or after a thought."""
    guide = ThinkingGuide(MANY, State.START).and_then(Exactly(30))
    write(guide, CHANNEL)
    assert allowed(guide) == {ANALYSIS, FINAL}
    write(guide, FINAL, MESSAGE, 30)
    assert guide.is_over
    guide = ThinkingGuide(MANY, State.START).and_then(Exactly(30))
    write(guide, CHANNEL, ANALYSIS, MESSAGE, 40, 41, STOP)
    for token in (START, ROLE, CHANNEL, FINAL, MESSAGE, 30):
        assert allowed(guide) == {token}
        guide.take(token)
    assert guide.is_over


def test_the_budget_of_gpt_oss() -> None:
    """The thought's message is ended, another begins, and it cannot be a thought."""
    guide = ThinkingGuide(MANY, State.START, 2)
    write(guide, CHANNEL, ANALYSIS, MESSAGE, 40, 41)
    for token in (STOP, START, ROLE):
        assert allowed(guide) == {token}
        guide.take(token)
    write(guide, CHANNEL)
    assert allowed(guide) == EVERYTHING - {ANALYSIS}
    none = ThinkingGuide(MANY, State.START, 0)
    write(none, CHANNEL)
    assert allowed(none) == EVERYTHING - {ANALYSIS}
    both = ThinkingGuide(MANY, State.START, 0).and_then(Exactly(30))
    write(both, CHANNEL)
    assert allowed(both) == {FINAL}


@pytest.mark.parametrize("thoughts", [ONE, MANY])
@pytest.mark.parametrize("state", [State.START, State.THOUGHT, State.ANSWER])
def test_a_restart_forgets_nothing(thoughts: Thoughts, state: State) -> None:
    """At each token of random rows: a guide that was given the tokens again allows the same."""
    answer = Exactly(*random.Random(0).sample(range(40, 60), 6), BLANK)
    rng, markers = random.Random(1), [*thoughts.start, *thoughts.end, BLANK, *thoughts.answer]
    for round_ in range(30):
        guide: Guide = ThinkingGuide(thoughts, state, rng.choice([None, 0, 1, 4]))
        if round_ % 2:
            guide = guide.and_then(answer.fresh())
        again, written = guide.fresh(), list[int]()
        for _ in range(25):
            again.restart(written)
            now = allowed(guide)
            assert allowed(again) == now and again.is_over == guide.is_over
            if guide.is_over or not now - {END}:
                break
            likely = sorted((now - {END}) & {*markers}) or sorted(now - {END})
            token = rng.choice(likely if rng.random() < 0.6 else sorted(now - {END}))
            written.append(token)
            guide.take(token)


def test_other_guides_still_count() -> None:
    """A token that another guide of the row forbids does not come back."""

    class NoBlank(Exactly):
        def fill(self, allowed: Mask) -> None:
            forbid(allowed, [BLANK, OPEN])

        def take(self, token: int) -> None:
            pass

    guide = AllOf([ThinkingGuide(ONE, State.THOUGHT), NoBlank()]).and_then(Exactly(30))
    write(guide, CLOSE)
    assert allowed(guide) == {30}
    other_order = AllOf([NoBlank(), ThinkingGuide(ONE, State.START, None, Exactly(30))])
    assert allowed(other_order) == {30}


def test_a_lead_is_written_first() -> None:
    """Then the other guide decides; a restart in the middle of it goes on there."""
    guide = Lead((40, 41), Exactly(30))
    write(guide, 40)
    guide.restart((40,))
    assert allowed(guide) == {41}
    guide.restart((40, 41, 30))
    assert guide.is_over and not guide.fresh().is_over

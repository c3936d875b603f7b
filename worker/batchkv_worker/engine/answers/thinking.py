"""Guides of rows on models that think: the thought's budget, and a grammar that begins after it.

A thought's marker may be several tokens. So these guides compare the last tokens with the marker.

==========  ==================================================================================
``START``   nothing was decided yet: the model may open a thought, or begin its answer.
            With a grammar it opens one only if it would without the grammar, too: else a
            model that answers at once would think, because its own first word is forbidden
``THOUGHT`` in the thought; nothing is forbidden but what would end the row
``FORCED``  the end of the thought is written, token by token
``BLANK``   right after a thought: blank lines may come before the answer
``ANSWER``  the grammar decides; without one, a thought may be opened again
==========  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchkv_worker.engine.answers.thoughts import State, Thoughts
from batchkv_worker.engine.tokens.guide import (
    AllOf,
    Mask,
    allow_only,
    forbid,
    has_bit,
    new_masks,
)
from batchkv_worker.guide import Guide


class ThinkingGuide:
    """Ends thoughts after ``budget`` tokens in all, and lets a grammar begin after the thought.

    ``state`` is that of the row's beginning: ``THOUGHT`` if its prompt opened one, ``ANSWER`` if
    its prompt closed one, else ``START``. Without a budget nothing is forced. ``doubted`` belongs
    to the mask that was filled last (``engine.tokens.guide.doubted_of``).
    """

    def __init__(
        self,
        thoughts: Thoughts,
        state: State,
        budget: int | None = None,
        grammar: Guide | None = None,
    ) -> None:
        self._thoughts, self._first, self._budget = thoughts, state, budget
        self._grammar = grammar
        self.doubted: tuple[int, ...] = ()
        self._forget()

    @property
    def is_over(self) -> bool:
        grammar = self._grammar
        return self._state is State.ANSWER and grammar is not None and grammar.is_over

    def fresh(self) -> Guide:
        grammar = None if self._grammar is None else self._grammar.fresh()
        return ThinkingGuide(self._thoughts, self._first, self._budget, grammar)

    def and_then(self, grammar: Guide) -> Guide:
        """The grammar decides after the thought."""
        assert self._grammar is None and self._state is self._first, "it has begun"
        answer = self._thoughts.answer
        led = Lead(answer, grammar) if answer else grammar
        return ThinkingGuide(self._thoughts, self._first, self._budget, led)

    def restart(self, tokens: Sequence[int]) -> None:
        self._forget()
        for token in tokens:
            self.take(token)

    def _forget(self) -> None:
        self._state = self._first
        self._num_thought = 0  # tokens of thoughts so far
        self._recent: list[int] = []  # since the last marker, as many as a marker has
        self._forced: list[int] = []  # tokens still to write
        self._is_grammar_alive = self._grammar is not None  # it has taken what there was
        if self._grammar is not None:
            self._grammar.restart(())

    # -- the next token

    def fill(self, allowed: Mask) -> None:
        self.doubted = ()
        self._force_if_due()
        if self._state is State.FORCED:
            allow_only(allowed, self._forced[:1])
        elif self._state is State.THOUGHT:
            if self._grammar is not None:
                forbid(allowed, self._thoughts.enders)
        elif self._grammar is None:
            if self._is_used_up:
                self._forbid_thought(allowed)
        else:
            self._fill_by_grammar(allowed)

    def _force_if_due(self) -> None:
        """Begin to write the end of the thought, once it is as long as it may be."""
        if self._state is not State.THOUGHT or not self._is_used_up:
            return
        end = self._thoughts.end
        self._forced = [*end[self._num_matched(end) :], *self._thoughts.bridge]
        self._state = State.FORCED

    @property
    def _is_used_up(self) -> bool:
        return self._budget is not None and self._num_thought >= self._budget

    def _forbid_thought(self, allowed: Mask) -> None:
        start, fork = self._thoughts.start, self._thoughts.fork
        if self._num_matched(start) == fork:
            forbid(allowed, [start[fork]])

    def _fill_by_grammar(self, allowed: Mask) -> None:
        """What the grammar allows; at the beginning also a thought, or blank lines."""
        also = list[int]()
        if self._state is State.START:
            num = self._num_matched(self._thoughts.start)
            if not (self._is_used_up and num == self._thoughts.fork):
                also = [self._thoughts.start[num]]
        elif self._state is State.BLANK:
            also = [*self._thoughts.blanks]
        if not also:
            self._fill_alive(allowed)
            return
        of_grammar = np.full_like(allowed, 0xFFFFFFFF)
        self._fill_alive(of_grammar)
        others = allowed.copy()
        allow_only(others, also)
        allowed &= of_grammar
        if self._state is State.START and not has_bit(of_grammar, also[0]):
            self.doubted = (also[0], *self._thoughts.blanks)
        allowed |= others

    def _fill_alive(self, allowed: Mask) -> None:
        if self._grammar is not None and self._is_grammar_alive:
            self._grammar.fill(allowed)
        else:
            allowed[:] = 0

    # -- the token that came

    def take(self, token: int) -> None:
        self._force_if_due()
        if self._state is State.FORCED:
            self._forced = self._forced[1:]
            if not self._forced:
                self._begin_answer()
        elif self._state is State.THOUGHT:
            self._take_thought(token)
        elif self._state is State.START:
            self._take_first(token)
        elif self._grammar is not None and self._state is State.BLANK:
            self._take_after_thought(self._grammar, token)
        elif self._grammar is not None:
            self._grammar.take(token)
        elif self._matches(token, self._thoughts.start):
            self._open()

    def _take_thought(self, token: int) -> None:
        self._num_thought += 1
        end, call = self._thoughts.end, self._thoughts.call
        if self._matches(token, end):
            self._num_thought -= len(end)
            self._forced = [] if self._grammar is None else [*self._thoughts.bridge]
            if self._forced:
                self._state = State.FORCED
            else:
                self._begin_answer()
        elif call and tuple(self._recent[-len(call) :]) == call:
            self._num_thought -= len(call)
            self._begin_answer()

    def _take_first(self, token: int) -> None:
        """A token of the marker of a thought, or the answer's first. It may be either for a while.

        So the grammar takes it, too, and begins again after a thought.
        """
        start = self._thoughts.start
        num = self._num_matched(start)
        if self._grammar is not None:
            self._offer(self._grammar, token)
        if self._matches(token, start):
            self._open()
            if self._grammar is not None:
                self._grammar.restart(())
        elif self._num_matched(start) != num + 1:
            self._state = State.ANSWER

    def _take_after_thought(self, grammar: Guide, token: int) -> None:
        self._state = State.ANSWER
        if token not in self._thoughts.blanks or self._is_allowed(grammar, token):
            grammar.take(token)

    def _offer(self, grammar: Guide, token: int) -> None:
        """The grammar takes a token if it may follow; else it is out until a thought has ended."""
        self._is_grammar_alive = self._is_grammar_alive and self._is_allowed(grammar, token)
        if self._is_grammar_alive:
            grammar.take(token)

    def _open(self) -> None:
        self._state, self._recent = State.THOUGHT, []

    def _begin_answer(self) -> None:
        self._recent, self._is_grammar_alive = [], True
        self._state = State.ANSWER if self._grammar is None else State.BLANK

    # -- its parts

    def _is_allowed(self, grammar: Guide, token: int) -> bool:
        mask = new_masks(1, self._thoughts.vocabulary)[0]
        grammar.fill(mask)
        return has_bit(mask, token)

    def _matches(self, token: int, marker: tuple[int, ...]) -> bool:
        """Whether the last tokens are the marker, with this one, which is remembered."""
        self._recent = [*self._recent, token][-self._thoughts.longest :]
        return tuple(self._recent[-len(marker) :]) == marker

    def _num_matched(self, marker: tuple[int, ...]) -> int:
        """How many tokens of the marker the last tokens are; not all of them."""
        return next(
            num
            for num in range(len(marker) - 1, -1, -1)
            if tuple(self._recent[len(self._recent) - num :]) == marker[:num]
        )


class Lead:
    """Writes some tokens, and then another guide decides."""

    def __init__(self, tokens: Sequence[int], guide: Guide) -> None:
        self._tokens, self._guide = tuple(tokens), guide
        self._num_written = 0

    @property
    def is_over(self) -> bool:
        return self._is_written and self._guide.is_over

    @property
    def _is_written(self) -> bool:
        return self._num_written >= len(self._tokens)

    def fill(self, allowed: Mask) -> None:
        if self._is_written:
            self._guide.fill(allowed)
        else:
            allow_only(allowed, [self._tokens[self._num_written]])

    def take(self, token: int) -> None:
        if self._is_written:
            self._guide.take(token)
        else:
            self._num_written += 1

    def restart(self, tokens: Sequence[int]) -> None:
        self._num_written = min(len(tokens), len(self._tokens))
        self._guide.restart(tokens[self._num_written :])

    def fresh(self) -> Guide:
        return Lead(self._tokens, self._guide.fresh())

    def and_then(self, grammar: Guide) -> Guide:
        return AllOf([self, grammar])

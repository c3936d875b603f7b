"""The tokens with which a model thinks, and whether a prompt has opened or closed a thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from batchkv_worker.engine.answers import harmony
from batchkv_worker.engine.answers.answer_format import AnswerFormat
from batchkv_worker.engine.answers.split import REASONING
from batchkv_worker.model.loader import LoadedModel

_BLANKS = ("\n\n", "\n")
_TAIL_TOKENS = 16  # of a prompt, where a template opens or closes a thought


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tokens with which a model thinks.

    ``start`` and ``end`` are the markers. ``fork`` is the place in ``start`` of the token that
    distinguishes a thought from an answer. ``bridge`` must be written between a thought and what
    follows. ``answer`` begins an answer's text. ``call`` begins a call, and so ends a thought; it
    is empty if the row may not call. ``blanks`` are tokens of blank lines. ``enders`` end a row or
    begin a call: a thought that a grammar waits for must not have them. ``vocabulary``: tokens of a
    mask.
    """

    vocabulary: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    fork: int = 0
    bridge: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    call: tuple[int, ...] = ()
    blanks: frozenset[int] = frozenset()
    enders: frozenset[int] = frozenset()

    @property
    def longest(self) -> int:
        """The number of tokens of the longest marker."""
        return max(len(self.start), len(self.end), len(self.call))


class State(Enum):
    """Where in its answer a row is."""

    START = auto()
    THOUGHT = auto()
    FORCED = auto()
    BLANK = auto()
    ANSWER = auto()


def thoughts_of(form: AnswerFormat, loaded: LoadedModel) -> Thoughts:
    """The thoughts of a model that can think."""
    tokenizer = loaded.tokenizer

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    enders = {*tokenizer.eos_token_ids}
    vocabulary = max(loaded.vocabulary, len(tokenizer))  # as ``grammar.tokens`` has it
    if form.is_harmony:  # what comes before the channel's name is the same for thoughts and answers
        return Thoughts(
            *(vocabulary, form.thought_start, form.thought_end),
            fork=len(tokens(harmony.CHANNEL)),
            bridge=tokens(harmony.NEXT),
            answer=tokens(harmony.FINAL),
            enders=frozenset(enders),
        )
    if len(form.call_start) == 1:
        enders |= {*form.call_start}
    blanks = (tokens(text) for text in _BLANKS)
    return Thoughts(
        *(vocabulary, form.thought_start, form.thought_end),
        call=form.call_start,
        blanks=frozenset(blank[0] for blank in blanks if len(blank) == 1),
        enders=frozenset(enders),
    )


def first_state(form: AnswerFormat, prompt: Sequence[int], tokenizer: Any) -> State:
    """Where a row is at its first token: its prompt may end in a thought, or with the end of one.

    A marker further ahead does not count, because it may be a text of the user.
    """
    if form.is_harmony or not form.can_think:
        return State.START
    if _ends_with(prompt, form.thought_start, tokenizer):
        return State.THOUGHT
    return State.ANSWER if _ends_with(prompt, form.thought_end, tokenizer) else State.START


def first_part(form: AnswerFormat, prompt: Sequence[int], tokenizer: Any) -> str:
    """The part of its output in which a row begins (``split``)."""
    is_open = first_state(form, prompt, tokenizer) is State.THOUGHT
    return REASONING if is_open else form.initial_state


def _ends_with(prompt: Sequence[int], marker: tuple[int, ...], tokenizer: Any) -> bool:
    """Whether the prompt ends with the marker and perhaps white space."""
    tail = prompt[-_TAIL_TOKENS:]
    for start in range(len(tail) - len(marker), -1, -1):
        if tuple(tail[start : start + len(marker)]) == marker:
            rest = list(tail[start + len(marker) :])
            return not rest or not str(tokenizer.decode(rest)).strip()
    return False

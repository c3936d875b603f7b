"""Divides an answer's text into its parts at the model's markers: thought, calls and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from batchkv_worker.engine.answers import harmony
from batchkv_worker.engine.answers.answer_format import AnswerFormat

REASONING, TOOL, NORMAL = "reasoning", "tool", "normal"


@dataclass(slots=True)
class Parts:
    """The parts of one answer.

    ``calls``: a text for each call or group of calls, with the function's name where that is
    outside of the text, else "".
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def split(text: str, form: AnswerFormat, state: str, *, is_exact: bool = False) -> Parts:
    """The parts of an answer that begins in ``state``.

    White space beside a marker belongs to the marker. A text without markers stays as it is.
    ``is_exact``: what follows the thought has a form. It stays as it is, even if it has a marker.
    """
    if form.is_harmony:
        return _split_harmony(text, form, is_exact=is_exact)
    if is_exact and state in (NORMAL, REASONING):
        return _split_thought(text, form, is_open=state == REASONING)
    if form.is_plain or (state != REASONING and not form.pattern().search(text)):
        return Parts(text)
    runs = list(_runs(_segments(text, form, state)))
    if [state for state, _ in runs] == [NORMAL]:
        return Parts(runs[0][1])
    found = {
        wanted: [piece for state, piece in runs if state == wanted]
        for wanted in (NORMAL, REASONING, TOOL)
    }
    return Parts(
        "".join(found[NORMAL]).strip(),
        _joined(found[REASONING]),
        [("", call) for call in found[TOOL]],
    )


def _split_thought(text: str, form: AnswerFormat, *, is_open: bool) -> Parts:
    """A thought at the beginning, if there is one, and the rest without blank lines before it."""
    if not is_open:
        if not form.think_start or not text.startswith(form.think_start):
            return Parts(text)
        text = text.removeprefix(form.think_start)
    thought, _, rest = text.partition(form.think_end)
    return Parts(rest.lstrip("\n"), thought.strip())


def _segments(text: str, form: AnswerFormat, state: str) -> Iterator[tuple[str, str]]:
    """(state, text) in order, from mlx-lm's state machine.

    The machine reads one character at a time, so it only gets the markers. The text between them
    cannot change its state.
    """
    machine = make_text_state_machine(form).make_state(state)
    at = 0
    for match in form.pattern().finditer(text):
        yield machine[0], text[at : match.start()]
        machine, segments = TextStateMachine.split(machine, match[0])
        yield from segments
        machine, held_back, name = TextStateMachine.flush(machine)
        yield name, held_back
        at = match.end()
    yield machine[0], text[at:]


def _runs(segments: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Neighbours of the same state as one. Two calls in a row have an empty text between them."""
    before, pieces = None, list[str]()
    for state, piece in segments:
        if before is not None and state != before:
            yield before, "".join(pieces)
            pieces = []
        before = state
        pieces.append(piece)
    if before is not None:
        yield before, "".join(pieces)


def _split_harmony(text: str, form: AnswerFormat, *, is_exact: bool) -> Parts:
    found = list(harmony.parts(text))
    kinds = {"text"} if form.may_call else {"text", "call"}
    texts = [part.text for part in found if part.kind in kinds]
    return Parts(
        "".join(texts) if is_exact else _joined(texts),
        _joined([part.text for part in found if part.kind == "reasoning"]),
        [(part.name, part.text) for part in found if part.kind == "call" and form.may_call],
    )


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in map(str.strip, texts) if text)

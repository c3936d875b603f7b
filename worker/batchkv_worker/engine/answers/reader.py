"""Reads a row's whole output: its answer, its thought and its tool calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchkv_producer.wire.choice import ToolCall
from batchkv_worker.engine.answers import harmony
from batchkv_worker.engine.answers.answer_format import AnswerFormat
from batchkv_worker.engine.answers.split import REASONING, Parts, split
from batchkv_worker.engine.answers.tool_calls import TimeLimit, Unparsed, id_maker, tool_calls
from batchkv_worker.engine.tokens.outputs import Answer

log = logging.getLogger("batchkv.engine")

Marker = tuple[int, ...]  # its tokens


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the output of a row and its choices; implements ``outputs.Reader``.

    ``state``: the part of an answer in which it begins (``split``). ``tools``: those that the row
    may call. ``is_single``: at most one call. ``is_exact``: the text has a form, so that white
    space belongs to it. ``limit`` is shared by all rows of an engine.
    """

    form: AnswerFormat
    state: str
    tokenizer: Any
    limit: TimeLimit
    tools: Sequence[dict[str, Any]] = ()
    is_single: bool = False
    is_exact: bool = False

    def read(self, job_id: str, text: str, tokens: Sequence[int]) -> Answer:
        """The parts of an output. Calls that cannot be read stay in the text, as they are."""
        parts, calls = self._split(text, self.form), tuple[ToolCall, ...]()
        if parts.calls:
            try:
                calls = self.limit.run(lambda: self._calls(job_id, parts))
            except Unparsed as fault:
                log.debug("row %s: its tool calls stay text: %s", job_id, fault)
                parts = self._split(text, self.form.without_calls())
        num = self._num_reasoning(tokens, parts.reasoning) if parts.reasoning else 0
        return Answer(parts.text, parts.reasoning, calls, num)

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts of the markers, of which no part belongs to the answer."""
        return tuple(harmony.MARKERS) if self.form.is_harmony else self.form.markers

    def _split(self, text: str, form: AnswerFormat) -> Parts:
        return split(text, form, self.state, is_exact=self.is_exact)

    def certain(self, text: str) -> tuple[str, str]:
        """The thought and the answer's text that an output so far is certain to have.

        Once there is a marker, white space around the text is left out. So it is not sent before. A
        gpt-oss message without a header may turn out to be a header.
        """
        if self.form.is_harmony and harmony.MESSAGE not in text:
            return "", ""
        parts = self._split(text, self.form)
        is_divided = bool(parts.reasoning) or self.state == REASONING or self.form.is_harmony
        if parts.calls or (text[:1].isspace() and not is_divided):
            return "", ""
        return parts.reasoning.rstrip(), parts.text.rstrip()

    def _calls(self, job_id: str, parts: Parts) -> tuple[ToolCall, ...]:
        name_id = id_maker(job_id, self.form.parser_name)
        found = tool_calls(parts.calls, self.form.parser, self.tools, name_id)
        return found[:1] if self.is_single else found

    def _num_reasoning(self, tokens: Sequence[int], reasoning: str) -> int:
        if self.form.is_harmony:
            return harmony.num_reasoning(tokens, self.form.added, self.tokenizer.decode)
        form, is_open = self.form, self.state == REASONING
        num = 0
        if form.can_think:
            ends = tuple(marker for marker in (form.thought_end, form.call_start) if marker)
            num = num_between(
                *(tokens, form.thought_start, ends), is_open=is_open, only_first=self.is_exact
            )
        return num or len(self.tokenizer.encode(reasoning, add_special_tokens=False))


def num_between(
    tokens: Sequence[int],
    start: Marker,
    ends: Sequence[Marker],
    *,
    is_open: bool,
    only_first: bool = False,
) -> int:
    """How many tokens are after ``start`` and before the next of ``ends``, also several times.

    The last one may lack its end. ``is_open``: the first one began before the first token.
    """
    count, at = 0, 0
    while at < len(tokens):
        found, length = _find(tokens, ends if is_open else (start,), at)
        count += found - at if is_open else 0
        if is_open and only_first:
            break
        at, is_open = found + length, not is_open
    return count


def _find(tokens: Sequence[int], wanted: Sequence[Marker], at: int) -> tuple[int, int]:
    """Where the first of these begins, and its length; the end of the tokens if there is none."""
    firsts = {marker[0] for marker in wanted}
    for place in range(at, len(tokens)):
        if tokens[place] in firsts:
            for marker in wanted:
                if tuple(tokens[place : place + len(marker)]) == marker:
                    return place, len(marker)
    return len(tokens), 0

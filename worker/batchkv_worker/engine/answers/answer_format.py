"""How a model writes its thought and its tool calls, read off its tokenizer once.

mlx-lm's tokenizer wrapper finds the markers of most models, and the parser of their calls. Two
kinds are added here: further markers of a thought, and the messages of gpt-oss (``harmony``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchkv_worker.engine.answers import harmony
from batchkv_worker.engine.answers.call_styles import STYLES
from batchkv_worker.model.added_tokens import added_tokens

Parser = Callable[[str, Any], Any]  # of a call's text and the row's tools

# Markers of a thought that mlx-lm does not know, each one token.
_MORE_THOUGHTS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
_NOTHING: Mapping[str, list[tuple[str, str]]] = {}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The markers of one model. "" and ``()`` stand for "has none".

    The names without an underscore that mlx-lm's ``make_text_state_machine`` reads are the same as
    those of its tokenizer. ``thought_start``, ``thought_end`` and ``call_start`` are the tokens of
    markers. ``tokens`` are those of all markers, also of those inside calls: an output that is
    divided needs their texts, and those of no other special token. ``added`` are the added tokens
    of the tokenizer, by text. ``initial_state`` is that of an answer whose prompt opened no
    thought.
    """

    think_start: str = ""
    think_end: str = ""
    thought_start: tuple[int, ...] = ()
    thought_end: tuple[int, ...] = ()
    tool_call_start: str = ""
    tool_call_end: str = ""
    call_start: tuple[int, ...] = ()
    parser: Parser | None = None
    parser_name: str = ""
    structural_markers: tuple[str, ...] = ()
    response_transitions: Mapping[str, list[tuple[str, str]]] = field(
        default_factory=lambda: _NOTHING
    )
    initial_state: str = "normal"
    tokens: frozenset[int] = frozenset()
    added: Mapping[str, int] = field(default_factory=dict)
    is_harmony: bool = False
    may_call: bool = True

    @property
    def has_thinking(self) -> bool:
        return bool(self.think_start)

    @property
    def has_tool_calling(self) -> bool:
        return bool(self.tool_call_start)

    @property
    def can_think(self) -> bool:
        """Whether the tokens of a thought's markers are known."""
        return bool(self.thought_start and self.thought_end)

    @property
    def is_plain(self) -> bool:
        """Whether no answer has anything but text."""
        return not (self.is_harmony or self.markers)

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may end a part of an answer, the longest first."""
        edges = [edge for edges in self.response_transitions.values() for edge in edges]
        known = [self.think_start, self.think_end, self.tool_call_start, self.tool_call_end]
        found = {*known, *self.structural_markers, *(text for text, _ in edges)}
        return tuple(sorted(found - {""}, key=lambda text: (-len(text), text)))

    def pattern(self) -> re.Pattern[str]:
        """Matches any marker."""
        return re.compile("|".join(map(re.escape, self.markers)))

    def without_calls(self) -> AnswerFormat:
        """The same format for a row that may not call: a call is text like any other."""
        edges = {
            state: [edge for edge in edges if edge[1] != "tool"]
            for state, edges in self.response_transitions.items()
        }
        return replace(
            self,
            tool_call_start="",
            tool_call_end="",
            call_start=(),
            parser=None,
            response_transitions=edges,
            may_call=False,
        )


def answer_format(tokenizer: Any) -> AnswerFormat:
    """The format of a model's answers. A tokenizer that mlx-lm did not wrap has none."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    vocabulary: Mapping[str, int] = get_vocab() if callable(get_vocab) else {}
    listed = added_tokens(tokenizer).items()
    added = {facts.content: token for token, facts in listed if facts.content}
    if added.keys() >= harmony.MARKERS:
        return _of_harmony(tokenizer, added)
    found = AnswerFormat(
        added=added,
        structural_markers=tuple(getattr(tokenizer, "structural_markers", ())),
        response_transitions=getattr(tokenizer, "response_transitions", _NOTHING),
        initial_state=getattr(tokenizer, "response_initial_state", None) or "normal",
    )
    if getattr(tokenizer, "has_tool_calling", False):
        found = replace(
            found,
            tool_call_start=tokenizer.tool_call_start,
            tool_call_end=tokenizer.tool_call_end or "",
            call_start=tuple(tokenizer.tool_call_start_tokens),
            parser=tokenizer.tool_parser,
            parser_name=_parser_name(tokenizer.tool_parser),
        )
    found = _with_thought(found, tokenizer, vocabulary)
    return with_tokens(found, tokenizer)


def with_tokens(form: AnswerFormat, tokenizer: Any) -> AnswerFormat:
    """The format with ``tokens``."""
    markers = harmony.MARKERS if form.is_harmony else form.markers
    encoded = (tokenizer.encode(marker, add_special_tokens=False) for marker in markers)
    tokens = {token for marker in encoded for token in marker}
    if form.may_call and form.parser_name in STYLES:
        text = STYLES[form.parser_name].text
        tokens |= {token for marker, token in form.added.items() if marker in text}
    return replace(form, tokens=frozenset(tokens))


def _with_thought(
    found: AnswerFormat, tokenizer: Any, vocabulary: Mapping[str, int]
) -> AnswerFormat:
    if getattr(tokenizer, "has_thinking", False):
        return replace(
            found,
            think_start=tokenizer.think_start,
            think_end=tokenizer.think_end,
            thought_start=tuple(tokenizer.think_start_tokens),
            thought_end=tuple(tokenizer.think_end_tokens),
        )
    for start, end in _MORE_THOUGHTS:
        if start in vocabulary and end in vocabulary:
            return replace(
                found,
                think_start=start,
                think_end=end,
                thought_start=(vocabulary[start],),
                thought_end=(vocabulary[end],),
            )
    return found


def _of_harmony(tokenizer: Any, added: Mapping[str, int]) -> AnswerFormat:
    form = AnswerFormat(
        added=added,
        thought_start=tuple(tokenizer.encode(harmony.ANALYSIS, add_special_tokens=False)),
        thought_end=tuple(tokenizer.encode(harmony.END, add_special_tokens=False)),
        parser_name="harmony",
        is_harmony=True,
    )
    return with_tokens(form, tokenizer)


def _parser_name(parser: Any) -> str:
    """``qwen3_coder`` for the parser of ``mlx_lm.tool_parsers.qwen3_coder``."""
    return str(getattr(parser, "__module__", "")).rpartition(".")[2]

"""The messages that gpt-oss writes, taken apart.

An answer is a sequence of messages. Each has a header with a channel, and perhaps a recipient::

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt has the first ``<|start|>assistant``. A thought is on the channel "analysis". A message
to a function is a call. All else is for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
MARKERS = frozenset({START, CHANNEL, MESSAGE, END, CALL, RETURN})
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"

_FUNCTIONS = "functions."
_ENDS = re.compile("|".join(map(re.escape, (START, END, CALL, RETURN))))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

Kind = Literal["reasoning", "call", "text"]


@dataclass(frozen=True, slots=True)
class Part:
    """One message: what it is, its text, and the function's name if it is a call."""

    kind: Kind
    text: str
    name: str = ""


def parts(text: str) -> Iterator[Part]:
    """The messages of an answer in order. An unfinished header at the end is left out."""
    if CHANNEL not in text and MESSAGE not in text:  # the model wrote no header: a text
        yield Part("text", text)
        return
    for message in _ENDS.split(text):
        header, found, body = message.partition(MESSAGE)
        if found:
            kind, name = _kind(header)
            yield Part(kind, body, name)


def num_reasoning(
    tokens: Iterable[int], ids: Mapping[str, int], decode: Callable[[list[int]], str]
) -> int:
    """How many tokens are in thoughts. ``ids`` are the tokens of the markers."""
    ends = {ids[name] for name in (START, END, CALL, RETURN)}
    count, header, is_thought = 0, list[int](), False
    in_header = True
    for token in tokens:
        if token in ends:
            in_header, header = True, []
        elif not in_header:
            count += is_thought
        elif token == ids[MESSAGE]:
            in_header, is_thought = False, _kind(decode(header))[0] == "reasoning"
        else:
            header.append(token)
    return count


def _kind(header: str) -> tuple[Kind, str]:
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    to = recipient[1] if recipient else ""
    if to.startswith(_FUNCTIONS) and len(to) > len(_FUNCTIONS):
        return "call", to.removeprefix(_FUNCTIONS)
    return ("reasoning" if channel and channel[1] == "analysis" else "text"), ""

"""One answer of a row: its text, and what else the row asked for. No Redis.

A row with ``n`` above 1 has several. The first is stored in the result's own keys, as it was before
rows could have more. The others are a list of maps with the same one-letter keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one generated token and of its likeliest alternatives."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for. ``arguments`` is a text, mostly JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. ``text`` has neither the reasoning nor the tool calls.

    ``token_ids`` are all generated tokens, of rows that ask for them.
    """

    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] | None = None


def packed_choice(choice: Choice) -> dict[str, Any]:
    """A choice as stored: the keys that are needed, one letter each."""
    packed: dict[str, Any] = {
        "t": choice.text,
        "f": choice.finish_reason,
        "r": choice.reasoning,
        "k": [(call.id, call.name, call.arguments) for call in choice.tool_calls],
    }
    kept = {key: value for key, value in packed.items() if value}
    if choice.logprobs is not None:
        kept["l"] = [(item.token, item.logprob, item.top) for item in choice.logprobs]
    if choice.token_ids is not None:
        kept["i"] = choice.token_ids
    return kept


def unpacked_choice(packed: dict[str, Any]) -> Choice:
    """Inverse of ``packed_choice``; ignores other keys. A wrong value raises an ordinary error."""
    logprobs, token_ids = packed.get("l"), packed.get("i")
    return Choice(
        text=str(packed.get("t", "")),
        finish_reason=str(packed.get("f", "")),
        logprobs=None if logprobs is None else tuple(_token_logprob(item) for item in logprobs),
        reasoning=str(packed.get("r", "")),
        tool_calls=tuple(_tool_call(item) for item in packed.get("k") or ()),
        token_ids=None if token_ids is None else unpacked_ids(token_ids),
    )


def unpacked_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    """Token ids as stored. Raises ValueError for a negative one, TypeError for another kind."""
    found = tuple(index(token) for token in ids)
    if any(token < 0 for token in found):
        raise ValueError("a token id is negative")
    return found


def _token_logprob(item: Any) -> TokenLogprob:
    token, logprob, top = item
    return TokenLogprob(str(token), float(logprob), tuple((str(t), float(p)) for t, p in top))


def _tool_call(item: Any) -> ToolCall:
    call_id, name, arguments = item
    return ToolCall(str(call_id), str(name), str(arguments))

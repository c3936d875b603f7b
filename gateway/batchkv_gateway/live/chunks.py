"""The chunks of a streamed answer, as OpenAI's API has them.

A chat answer begins with its role. Then come pieces of the thought and the text. Tool calls come
whole, after the text. The last chunk of each choice says why it ended. The choices of a row with
several are sent one after the other, when the row has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from batchkv_producer.live import Piece
from batchkv_producer.results.bodies import (
    body_id,
    call_of,
    logprobs_of,
    made_by,
    usage_of,
)
from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import Endpoint, Result

MADE_BY = "system_fingerprint"
DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """An event. Half of a surrogate pair stays an escape."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


class Chunks:
    """Writes the chunks of one answer. ``has_usage``: the last one has the counts of tokens."""

    def __init__(self, row_id: str, endpoint: Endpoint, model: str, *, has_usage: bool) -> None:
        self._is_chat = endpoint == "chat"
        self._endpoint = endpoint
        self._has_usage = has_usage
        self._facts: dict[str, Any] = {
            "id": body_id(row_id, endpoint),
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()  # choices

    def pieces(self, index: int, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """The chunks of pieces of a choice."""
        for piece in pieces:
            yield from self._piece(index, piece.text, is_thought=piece.is_thought)

    def _piece(
        self, index: int, text: str, *, is_thought: bool, logprobs: dict[str, Any] | None = None
    ) -> Iterator[bytes]:
        yield from self._begin(index)
        if self._is_chat:
            name = "reasoning_content" if is_thought else "content"
            yield self._chunk(index, {"delta": {name: text}}, logprobs)
        elif is_thought:
            yield self._chunk(index, {"text": "", "reasoning_content": text}, logprobs)
        else:
            yield self._chunk(index, {"text": text}, logprobs)

    def _begin(self, index: int) -> Iterator[bytes]:
        if index in self._begun:
            return
        self._begun.add(index)
        if self._is_chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def end(self, first_index: int, result: Result) -> Iterator[bytes]:
        """The chunks after the last pieces of a row, whose choices begin with an index."""
        facts = made_by(result)
        if MADE_BY in facts:  # from here on each chunk says what made it
            self._facts[MADE_BY] = facts[MADE_BY]
        for number, choice in enumerate(result.choices):
            index = first_index + number
            if index not in self._begun:  # nothing of it was sent
                yield from self._whole(index, choice)
            yield from self._begin(index)
            if choice.tool_calls:
                calls = [{"index": at, **call_of(one)} for at, one in enumerate(choice.tool_calls)]
                yield self._chunk(index, {"delta": {"tool_calls": calls}})
            more: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            if choice.token_ids is not None:
                more["token_ids"] = choice.token_ids
            yield self._chunk(index, more, finish_reason=choice.finish_reason)

    def _whole(self, index: int, choice: Choice) -> Iterator[bytes]:
        if choice.reasoning:
            yield from self._piece(index, choice.reasoning, is_thought=True)
        logprobs = logprobs_of(self._endpoint, choice.logprobs)
        if choice.text or logprobs is not None:
            yield from self._piece(index, choice.text, is_thought=False, logprobs=logprobs)

    def last(self, results: Sequence[Result]) -> Iterator[bytes]:
        """What comes after all choices."""
        if self._has_usage:
            yield event({**self._facts, "choices": [], "usage": usage_of(results)})
        yield DONE

    def _chunk(
        self,
        index: int,
        part: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        more = {"usage": None} if self._has_usage else {}
        return event({**self._facts, "choices": [choice], **more})

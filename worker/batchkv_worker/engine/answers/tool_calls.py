"""Tool calls from the text that a model wrote: by mlx-lm's parsers, within limits.

A parser runs over text that a model made up. It may raise anything, or take minutes: regular
expressions of some parsers are slow on text that is nearly a call. So it runs in a thread of its
own, and gets no more than ``MAX_CALL_CHARS``. A thread that does not end in time is left behind. If
``MAX_LATE`` of them still run, calls stay text until one ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Sequence
from threading import Thread
from typing import Any, TypeVar

from batchkv_producer.wire.choice import ToolCall
from batchkv_worker.engine.answers.answer_format import Parser
from batchkv_worker.engine.tokens.text_limits import RowRefused, refusals

log = logging.getLogger("batchkv.engine")

MAX_CALL_CHARS = 64 * 2**10  # of all calls of an answer
MAX_SECONDS = 1.0  # a call is parsed in well under a millisecond
MAX_LATE = 4
MAX_ID_CHARS = 256

_ID_DIGITS = 24
_MISTRAL_ID = 9  # letters and digits; its templates refuse ids of another length

T = TypeVar("T")


class Unparsed(Exception):
    """The calls of an answer cannot be read; the message says why."""


class TimeLimit:
    """Runs a function, at most for some seconds."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._late: list[Thread] = []

    def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``; raises Unparsed if it fails in any way or takes too long."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= MAX_LATE:
            raise Unparsed("the parser still works on earlier answers")
        results, faults = list[T](), list[BaseException]()

        def run() -> None:
            try:
                with refusals("tool calls"):
                    results.append(work())
            except RowRefused as fault:
                faults.append(fault.__cause__ or fault)

        thread = Thread(target=run, name="batchkv-tool-calls", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            self._late.append(thread)
            log.warning("a parser took too long for the tool calls of an answer: they stay text")
            raise Unparsed(f"the parser took longer than {self._seconds:g} s")
        if not results:
            fault = next(iter(faults), None)
            # Another fault's message may have the row's text.
            name = str(fault) if isinstance(fault, Unparsed) else type(fault).__name__
            raise Unparsed(f"the parser failed: {name}")
        return results[0]


def tool_calls(
    texts: Sequence[tuple[str, str]],
    parser: Parser | None,
    tools: Sequence[dict[str, Any]],
    name_id: Callable[[int], str],
) -> tuple[ToolCall, ...]:
    """The calls in these texts; raises anything if one of them is no call of one of the tools.

    A text comes with the function's name if it has the arguments alone. ``name_id`` makes the id of
    the call of an index.
    """
    if sum(len(text) for _, text in texts) > MAX_CALL_CHARS:
        raise Unparsed(f"the calls have more than {MAX_CALL_CHARS} characters")
    names = {tool["function"]["name"] for tool in tools}
    found = list[ToolCall]()
    for name, text in texts:
        for call in _parsed(name, text, parser, tools):
            if call.get("name") not in names:
                raise Unparsed("it calls a function that the row does not have")
            call_id = _own_id(call, {one.id for one in found}) or name_id(len(found))
            found.append(
                ToolCall(
                    call_id, call["name"], _arguments(call.get("arguments", call.get("parameters")))
                )
            )
    return tuple(found)


def _parsed(
    name: str, text: str, parser: Parser | None, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    if name:
        return [{"name": name, "arguments": json.loads(text)}]
    if parser is None:
        raise Unparsed("no parser is known for this model's calls")
    found = parser(text, list(tools))
    return found if isinstance(found, list) else [found]


def _arguments(value: Any) -> str:
    """The arguments as JSON; raises ValueError for what is not an object."""
    if isinstance(value, str):
        value = json.loads(value)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _own_id(call: dict[str, Any], taken: Collection[str]) -> str:
    """The id that the model wrote, which its template wants back; "" if there is none."""
    own = call.get("id")
    is_fit = isinstance(own, str) and 0 < len(own) <= MAX_ID_CHARS and own not in taken
    return own if is_fit and isinstance(own, str) else ""


def id_maker(job_id: str, parser_name: str) -> Callable[[int], str]:
    """Names the calls of a row's answer: the same for the same job, others for each other."""

    def name_id(index: int) -> str:
        digest = hashlib.sha256(f"{job_id}:{index}".encode()).hexdigest()
        return digest[:_MISTRAL_ID] if parser_name == "mistral" else f"call_{digest[:_ID_DIGITS]}"

    return name_id

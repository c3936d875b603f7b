"""Texts that are too long, in every disguise: refused before they cost memory or the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import SLICE_CHARS, RowRefused
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.model.loader import LoadedModel, load
from support import tiny_models

CONTEXT = 131_072


class Listening:
    """A tokenizer that writes down how long each text was that it was to encode."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.lengths: list[int] = []
        self.num_chats = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        return list(self._inner.encode(text, **options))

    def apply_chat_template(self, *values: Any, tokenize: bool, **options: Any) -> Any:
        self.num_chats += tokenize
        return self._inner.apply_chat_template(*values, tokenize=tokenize, **options)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return replace(load("demo"), context=CONTEXT)


def listened(loaded: LoadedModel, request: Request) -> Listening:
    """What the tokenizer got of a row that is refused as too long."""
    tokenizer = Listening(loaded.tokenizer)
    with pytest.raises(RowRefused) as caught:
        prepare(Work("b-1", request), replace(loaded, tokenizer=tokenizer))
    assert caught.value.code == "context_length_exceeded"
    return tokenizer


@pytest.mark.parametrize("text", [" " * 11_000_000 + "x", "a" * 11_000_000, "word one " * 10**6])
def test_a_long_prompt_is_tokenized_up_to_the_context(demo: LoadedModel, text: str) -> None:
    """Slices are counted until there are too many tokens; the whole is never tokenized.

    Of the blanks the tokenizer's native code panics, where it gets them all.
    """
    heard = listened(demo, Request("c", "completion", prompt=text))
    assert max(heard.lengths) <= SLICE_CHARS
    assert sum(heard.lengths) <= 20 * SLICE_CHARS


def test_a_long_chat_is_rendered_and_counted(demo: LoadedModel) -> None:
    """A chat's text is made and counted in slices before all of it is tokenized."""
    messages = [{"role": "user", "content": "word one " * 1_000_000}]
    heard = listened(demo, Request("c", "chat", messages=messages))
    assert not heard.num_chats and max(heard.lengths) <= SLICE_CHARS


@pytest.mark.parametrize("value", [1, 1.5, None, True, [], {}])
def test_tools_of_other_values_count_like_texts(value: Any) -> None:
    """Numbers, nulls, empty lists: a megabyte of them is refused at a context of 8,192."""
    function = {"name": "f", "parameters": {"enum": [value] * 500_000}}
    tools = [{"type": "function", "function": function}]
    request = Request("c", "chat", messages=[{"role": "user", "content": "x"}], tools=tools)
    heard = listened(load("demo"), request)
    assert not heard.num_chats and not heard.lengths


def test_arguments_of_calls_count_as_what_they_become() -> None:
    """Arguments come as a text and are rendered as JSON: a megabyte of numbers is too much."""
    function = {"name": "f", "arguments": '{"a": [' + "1," * 200_000 + "1]}"}
    call = {"type": "function", "function": function}
    request = Request(
        "c", "chat", messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    heard = listened(load("demo"), request)
    assert not heard.num_chats and not heard.lengths


def test_a_text_that_fits_is_the_whole_text(demo: LoadedModel) -> None:
    """Counting in slices changes no token of a long prompt that fits."""
    text = "The keys of the ledger are 123 456. " * 5_000
    for request in (
        Request("c", "completion", prompt=text),
        Request("c", "chat", messages=[{"role": "user", "content": text}]),
    ):
        row = prepare(Work("b-1", request), demo)
        whole = (
            demo.tokenizer.encode(text)
            if request.prompt
            else demo.tokenizer.apply_chat_template(request.messages, add_generation_prompt=True)
        )
        assert len(text) > 2 * SLICE_CHARS and row.prompt == list(whole)


class Panic(BaseException):
    """As native code raises it: no Exception."""


class Panicking(tiny_models.NumberTokenizer):
    """Panics at one text."""

    def encode(self, text: str) -> list[int]:
        if text == "evil":
            raise Panic("retry-limit-in-match over")
        return super().encode(text)


def test_a_panic_of_the_tokenizer_ends_its_row_alone() -> None:
    """A BaseException out of native code is one row's error; the rows beside it are answered."""
    model = tiny_models.loaded(tiny_models.build("llama"), tokenizer=Panicking())
    engine = Engine(model, EngineConfig(scheme="float", slots=2, memory_bytes=2**28))
    params = SamplingParams(max_tokens=2)
    for number, prompt in enumerate(("1 2 3", "evil", "4 5")):
        request = Request(str(number), "completion", prompt=prompt, params=params)
        engine.add(Work(str(number), request))
    ended: dict[str, Any] = {}
    while not engine.is_idle:
        ended |= {event.job_id: event for event in engine.step()}  # type: ignore[union-attr]
    assert isinstance(ended["0"], Completed) and isinstance(ended["2"], Completed)
    refusal = ended["1"]
    assert isinstance(refusal, Rejected) and refusal.code == "invalid_request"
    assert "retry-limit" in refusal.message


def test_an_interrupt_is_no_rows_fault() -> None:
    """What ends the process goes on to end it."""

    class Interrupted(tiny_models.NumberTokenizer):
        def encode(self, text: str) -> list[int]:
            raise KeyboardInterrupt

    model = tiny_models.loaded(tiny_models.build("llama"), tokenizer=Interrupted())
    engine = Engine(model, EngineConfig(scheme="float", slots=2, memory_bytes=2**28))
    with pytest.raises(KeyboardInterrupt):
        engine.add(Work("0", Request("0", "completion", prompt="1")))

"""From request to sequence: a fault in one row ends that row, and only that row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from batchkv_producer.order.canonical import canonical_text
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.tokens.prompts import SHARED_SLACK
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel, load
from support import tiny_models  # first: it loads the BLAS


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load("demo")


def chat(messages: list[dict[str, Any]], **changes: Any) -> Work:
    return Work("b-1", Request("c", "chat", messages=messages, **changes))


def chat_of(system: str, question: str, tools: Any) -> Request:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Request("c", "chat", messages=messages, tools=tools)


def completion(prompt: str = "hello", **params: Any) -> Work:
    return Work("b-1", Request("c", "completion", prompt=prompt, params=SamplingParams(**params)))


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


def refused(work: Work, loaded: LoadedModel) -> RowRefused:
    with pytest.raises(RowRefused) as caught:
        prepare(work, loaded)
    return caught.value


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": -5},
        {"max_tokens": 0},
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"top_k": 2**63},
        {"top_k": -1},
        {"repetition_penalty": 10**400},
        {"repetition_penalty": 1e-40},
        {"logprobs": 10**30},
        {"logprobs": -3},
        {"top_p": 1.5},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"min_tokens": -1},
        {"min_tokens": 6, "max_tokens": 5},
        {"stop_token_ids": (4096,)},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (1,) * 1025},
        {"logit_bias": ((4096, 1.0),)},
        {"logit_bias": ((2**63, 1.0),)},
        {"logit_bias": ((1, 100.5),)},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": tuple((token, 1.0) for token in range(1025))},
        {"bad_words": ("word",) * 257},
    ],
)
def test_numbers_out_of_range_end_their_row(params: dict[str, Any], demo: LoadedModel) -> None:
    """The producer checks ranges; the worker refuses wrong ones that another program wrote."""
    fault = refused(completion(**params), demo)
    assert fault.code == "invalid_request" and next(iter(params)) in str(fault)


@pytest.mark.parametrize("words", [("",), ("fine", "w" * 1025), (" ",)])
def test_bad_words_that_cannot_be_barred_end_their_row(
    words: tuple[str, ...], demo: LoadedModel
) -> None:
    """Empty, too long, or without a token of its own."""
    fault = refused(completion(bad_words=words), demo)
    assert fault.code == "invalid_request" and "bad word" in str(fault)


def test_ids_at_the_edges_of_the_vocabulary_are_accepted(demo: LoadedModel) -> None:
    """0 and the last one, in every field that has token ids; the next one is refused by name."""
    last = demo.vocabulary - 1
    edges: dict[str, Any] = {"stop_token_ids": (0, last), "logit_bias": ((0, -100.0), (last, 100))}
    request = Request("c", "completion", prompt_tokens=[last, 0], params=SamplingParams(**edges))
    row = prepare(Work("b-1", request), demo)
    assert row.prompt == [last, 0] and row.generation.stop_token_ids == {0, last}
    fault = refused(Work("b-1", replace(request, prompt_tokens=[0, last + 1])), demo)
    assert "the prompt has the token id 4096; this model has ids from 0 to 4095" in str(fault)


def test_fields_reach_the_engine(demo: LoadedModel) -> None:
    """Each field that a row gives, with the model's end tokens and special tokens filled in."""
    end = min(demo.tokenizer.eos_token_ids)
    asked: dict[str, Any] = {
        **{"presence_penalty": 1.5, "frequency_penalty": -1.0, "min_tokens": 3, "ignore_eos": True},
        **{"include_stop": True, "return_token_ids": True, "logit_bias": ((7, 2.5),)},
    }
    generation = prepare(completion(**asked, stop_token_ids=(9, 9)), demo).generation
    assert {name: getattr(generation, name) for name in asked} == asked
    assert generation.stop_token_ids == {9} and generation.late_tokens == {9, end}
    assert generation.hidden_tokens == demo.special_tokens >= {end}
    assert not prepare(completion(skip_special_tokens=False), demo).generation.hidden_tokens
    plain = prepare(completion(), demo).generation
    assert not plain.late_tokens and not plain.is_penalized and plain.bad_words == ()


def test_a_stop_string_may_be_a_special_token(demo: LoadedModel) -> None:
    """Its text is left out of the answer, so the token itself ends the row, or its text does."""
    asked: dict[str, Any] = {"stop": ("<|user|>", "a", "\ud800"), "stop_token_ids": (9,)}
    (user,) = demo.tokenizer.encode("<|user|>")
    assert prepare(completion(**asked), demo).generation.stop_token_ids == {9, user}
    shown = completion(**asked, skip_special_tokens=False)
    assert prepare(shown, demo).generation.stop_token_ids == {9}


def test_bad_words_are_barred_at_the_beginning_and_after_a_blank() -> None:
    """Both forms, where they differ in the first token and are as long, as vLLM does it."""

    class Spaced(tiny_models.NumberTokenizer):
        """A letter is a token; one after a blank is another, but for "x", which has two then."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if text.startswith(" x"):
                return [95, *map(ord, text[1:])]
            first, *others = map(ord, text.strip())
            return [first + 100 * text.startswith(" "), *others]

    odd = tiny_models.loaded(tiny_models.build("llama"), tokenizer=Spaced())
    generation = prepare(completion("1", bad_words=("ab", " ab", "c", "xy")), odd).generation
    assert generation.bad_words == ((97, 98), (197, 98), (99,), (199,), (120, 121))


@pytest.mark.parametrize("num_shared", [0, 1, 299, 300])
def test_shared_token_ids_are_counted_exactly(num_shared: int, demo: LoadedModel) -> None:
    """Bytes of the canonical text are translated back into token ids; half an id counts as none."""
    first = Request("a", "completion", prompt_tokens=[7] * 300)
    second = replace(first, prompt_tokens=[7] * num_shared + [8] * (300 - num_shared))
    texts = [canonical_text(request).encode() for request in (first, second)]
    work = Work("b-1", first, num_common(*texts))
    assert prepare(work, demo, counts_shared=True).num_common == num_shared


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_shared_text_is_counted_in_tokens(tools: Any, demo: LoadedModel) -> None:
    """Never fewer than the prompts have in common, whatever the template puts around the text."""
    system = "The keys of the ledger are made of words, 123 456. " * 40
    questions = ["What is it? " * 30, "Ist das 98765432101234567890? " * 30]
    requests = [chat_of(system, question, tools) for question in questions]
    num_bytes = num_common(*(canonical_text(request).encode() for request in requests))
    works = [Work("b-1", request, num_bytes) for request in requests]
    rows = [prepare(work, demo, counts_shared=True) for work in works]
    common = num_common(*(row.prompt for row in rows))
    assert common > 256
    for row in rows:
        assert row.num_common is not None
        assert common <= row.num_common <= common + 2 * SHARED_SLACK


def test_nobody_asks_and_nobody_knows(demo: LoadedModel) -> None:
    """Nothing is counted if it is not needed, or if the job has no count of shared text."""
    work = completion("word " * 600)
    assert prepare(work, demo, counts_shared=True).num_common is None
    assert prepare(replace(work, shared_bytes=5), demo).num_common is None
    alone = prepare(replace(work, shared_bytes=0), demo, counts_shared=True)
    assert alone.num_common is not None and alone.num_common <= SHARED_SLACK


def test_a_plain_prompt_is_a_user_message(demo: LoadedModel) -> None:
    """Through the chat template, with the system message before it; a raw one is its text alone."""
    plain = Request("c", "completion", prompt="hello there", style="auto")
    styled = replace(plain, system="Be brief.")
    user = {"role": "user", "content": "hello there"}
    system = {"role": "system", "content": "Be brief."}
    assert prepare(Work("b-1", plain), demo).prompt == prepare(chat([user]), demo).prompt
    assert prepare(Work("b-1", styled), demo).prompt == prepare(chat([system, user]), demo).prompt
    raw = prepare(completion("hello there"), demo).prompt
    assert raw == list(demo.tokenizer.encode("hello there"))
    assert raw != prepare(Work("b-1", plain), demo).prompt


def test_a_plain_prompt_without_a_template_stays_as_it_is() -> None:
    """A model that has no chat template gets the text; a system message is refused."""
    bare = tiny_models.loaded(tiny_models.build("llama"))
    plain = Request("c", "completion", prompt="1 2 3", style="auto")
    assert not bare.tokenizer.has_chat_template
    assert prepare(Work("b-1", plain), bare).prompt == prepare(completion("1 2 3"), bare).prompt
    fault = refused(Work("b-1", replace(plain, system="s")), bare)
    assert fault.code == "invalid_request" and "no chat template" in str(fault)


def test_shared_text_of_plain_prompts_is_counted(demo: LoadedModel) -> None:
    """Never fewer tokens than two styled prompts have in common, system message included."""
    system = "The keys of the ledger are made of words, 123 456. " * 40
    questions = ["What is it? " * 30, "Ist das 98765432101234567890? " * 30]
    requests = [
        Request("c", "completion", prompt=question, style="auto", system=system)
        for question in questions
    ]
    num_bytes = num_common(*(canonical_text(request).encode() for request in requests))
    rows = [prepare(Work("b-1", r, num_bytes), demo, counts_shared=True) for r in requests]
    common = num_common(*(row.prompt for row in rows))
    assert common > 256
    for row in rows:
        assert row.num_common is not None
        assert common <= row.num_common <= common + 2 * SHARED_SLACK


def test_defaults_come_from_the_model_then_from_us(demo: LoadedModel) -> None:
    """A field that a row lacks is the model's, if valid, else batchkv's; the seed is the job's."""
    generation = prepare(completion(), demo).generation
    assert (generation.temperature, generation.max_tokens) == (0.0, 512)
    odd = tiny_models.loaded(
        tiny_models.build("llama"), defaults={"temperature": 1e9, "top_p": 0.5, "max_tokens": 9.0}
    )
    generation = prepare(completion("1 2"), odd).generation
    assert (generation.temperature, generation.top_p, generation.max_tokens) == (1.0, 0.5, 9)
    assert generation.seed == prepare(completion("3"), odd).generation.seed


def test_unasked_max_tokens_is_cut_and_asked_is_not(demo: LoadedModel) -> None:
    """The default is cut to what the context leaves; what a row asks for must fit."""
    words = "one " * 7900
    assert prepare(completion(words), demo).generation.max_tokens < 512
    assert refused(completion(words, max_tokens=512), demo).code == "context_length_exceeded"
    assert refused(completion("one " * 9000), demo).code == "context_length_exceeded"


def test_hopeless_lengths_are_refused_before_tokenizing(demo: LoadedModel) -> None:
    """Megabytes that cannot fit are not tokenized, because that would delay other rows."""
    assert "characters" in str(refused(completion("x" * 2_000_000), demo))


def test_template_variables_are_an_allow_list(demo: LoadedModel) -> None:
    """A template that comes with the job is refused by the worker too, and never rendered."""
    work = chat(
        [{"role": "user", "content": "x"}], chat_template_kwargs={"chat_template": "{{ 1 }}"}
    )
    assert refused(work, demo).code == "unsupported_parameter"


def test_template_faults_end_their_row(demo: LoadedModel) -> None:
    """Any exception of a template is that row's error."""
    later = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    strict = demo.tokenizer.chat_template.replace("('system', 'user'", "('user'")
    demo.tokenizer.chat_template, own = strict, demo.tokenizer.chat_template
    try:
        assert "unknown role: system" in str(refused(chat(later), demo))
    finally:
        demo.tokenizer.chat_template = own


def test_tool_call_arguments_are_objects_for_the_template() -> None:
    """OpenAI sends arguments as text; templates need the object."""

    class Tokenizer(tiny_models.NumberTokenizer):
        has_chat_template = True
        seen: Any = None

        def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
            self.seen = messages
            return [1, 2]

    tokenizer = Tokenizer()
    loaded = tiny_models.loaded(tiny_models.build("llama"), tokenizer=tokenizer)
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "no json")]
    prepare(chat([{"role": "assistant", "content": "", "tool_calls": calls}]), loaded)
    seen = [call["function"]["arguments"] for call in tokenizer.seen[0]["tool_calls"]]
    assert seen == [{"a": 1}, "no json"]


def test_tokens_beyond_the_embedding_are_refused() -> None:
    """An id that the model has no row for would be read out of bounds."""
    loaded = tiny_models.loaded(tiny_models.build("llama"), vocabulary=tiny_models.VOCABULARY)
    assert "512 rows" in str(refused(completion("1 900 3"), loaded))
    assert prepare(completion("1 511 3"), loaded).prompt == [1, 511, 3]

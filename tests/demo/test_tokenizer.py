"""The shipped tokenizer: any text comes back, words are short, chats have one form."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="needs the worker's packages")

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from batchkv_worker.demo import MODEL_PATH
from demo_model.ledger import make_ledger
from demo_model.tokenizer import build_tokenizer
from demo_model.words import ADJECTIVES, NOUNS

ENGLISH = (
    "A farmer fills 14 baskets with pears and 9 baskets with plums. Every basket holds 25 pieces "
    "of fruit, and each piece sells for 40 cents at the market. How many dollars does she earn if "
    "a tenth of the fruit is spoiled and cannot be sold?"
)
AWKWARD = [
    "",
    "plain words",
    "tabs\tand\r\nbreaks\n\n\n  and   runs of spaces  ",
    "\x01\x02\x1b[0m\x7f",
    "\U0001f9d1\u200d\U0001f680 \U0001f469\U0001f3fd\u200d\U0001f52c",
    "e\u0301 vs \u00e9, \ufb01 vs fi",
    "\u4e2d\u6587 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u200b\ufeff\u202e\u00a0",
    "<|user is not a special token|>",
    "don't 3.14 1,000 x**2",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped tokenizer as mlx-lm loads it."""
    return load_tokenizer(MODEL_PATH)


@pytest.mark.parametrize("text", [*AWKWARD, " leading space", "\x00 byte zero"])
def test_every_text_comes_back(tokenizer: Any, text: str) -> None:
    """Encoding and decoding changes no character, whatever the text holds."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_streamed_text_is_the_decoded_text(tokenizer: Any, text: str) -> None:
    """Token by token gives what decoding the whole gives, with the linear-time detokenizer.

    Left out: a leading space and byte zero, which mlx-lm's detokenizer drops and garbles.
    """
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, BPEStreamingDetokenizer)
    detokenizer.reset()
    for token in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_words_of_keys_are_single_tokens(tokenizer: Any) -> None:
    """Each word of a ledger key is one token, so that a fact costs ten tokens."""
    words = [f" {word}" for word in (*ADJECTIVES, *NOUNS)]
    assert all(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in words)
    lines = "".join(f"{fact.line}\n" for fact in make_ledger(0, 64).facts)
    assert len(tokenizer.encode(lines, add_special_tokens=False)) == 640


def test_english_is_compact(tokenizer: Any) -> None:
    """A school problem costs a token for 2.8 characters or more, with every digit alone."""
    ids = tokenizer.encode(ENGLISH, add_special_tokens=False)
    assert len(ENGLISH) / len(ids) >= 2.8
    assert len(tokenizer.encode("40817", add_special_tokens=False)) == 5


def test_chat_template_renders_each_role(tokenizer: Any) -> None:
    """Turns stand between their role's token and the end token; the answer is then opened."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Bye<|end|>"
        "<|assistant|>"
    )
    closed = tokenizer.apply_chat_template(chat[1:2], tokenize=False)
    assert closed == "<|user|>Hi<|end|>"
    assert tokenizer.apply_chat_template(chat) == tokenizer.encode(text[: -len("<|assistant|>")])


def test_tools_are_listed_in_the_system_turn(tokenizer: Any) -> None:
    """Each tool is a line of JSON in the system turn, which tools alone bring about."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tools=tools, tokenize=False
    )
    heading, line = text.removesuffix("<|end|><|user|>Hi<|end|>").split("\n")
    assert heading == "<|system|>Tools:"
    assert json.loads(line) == tools[0]


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    """A role that the template does not know is an error, not a turn without a name."""
    with pytest.raises(Exception, match="unknown role: critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "No"}], tokenize=False)


def test_the_script_builds_the_shipped_tokenizer(tokenizer: Any) -> None:
    """The tokenizer in the package is the one that its script makes."""
    shipped = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    assert build_tokenizer().get_vocab() == shipped.get_vocab()

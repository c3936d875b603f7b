"""A tokenizer that two threads use: one makes tokens, and the other one makes texts of tokens."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load
from transformers import CodeLlamaTokenizer, PreTrainedTokenizerFast

from batchkv_producer.wire.job import Request
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.engine.answers.preparing import MANY, Preparing
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel
from support import tiny_models, tiny_tokenizers

SECONDS = 1.0


def demo(*, has_limits: bool = False) -> LoadedModel:
    """A tiny model with the demo's tokenizer. ``has_limits``: its file cuts and fills texts up."""
    tokenizer = load(Path(MODEL_PATH))
    if has_limits:
        backend = tokenizer._tokenizer.backend_tokenizer
        backend.enable_truncation(max_length=8)
        backend.enable_padding(length=8)
    model = tiny_models.build("llama")
    return tiny_models.loaded(model, tokenizer=tokenizer, vocabulary=len(tokenizer))


def chat(text: str) -> Work:
    return Work("a", Request("a", "chat", messages=[{"role": "user", "content": text}]))


def test_the_settings_of_a_tokenizer_stay_once_rows_are_prepared() -> None:
    """A file may say that texts are cut. This is taken back before another thread uses it."""
    tokenizer = tiny_tokenizers.tokenizer.__wrapped__("no_tools")  # no marker is tokenized at start
    loaded = tiny_models.loaded(
        tiny_models.build("llama"), tokenizer=tokenizer, vocabulary=len(tokenizer)
    )
    backend = tokenizer._tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=8)
    assert backend.truncation is not None and backend.padding is not None
    preparing = Preparing(loaded)
    assert preparing.num_threads == MANY
    assert backend.truncation is None and backend.padding is None
    row, _ = preparing.prepare(chat("Say a word. " * 20))
    assert len(row.prompt) > 60


def test_a_tokenizer_that_changes_its_settings_is_used_by_one_thread() -> None:
    """Code Llama's does for a text with a gap. One whose class only reads is used by many."""
    tokenizer = tiny_tokenizers.tokenizer.__wrapped__("no_tools")
    model = tiny_models.build("llama")

    def num_threads() -> int:
        loaded = tiny_models.loaded(model, tokenizer=tokenizer, vocabulary=len(tokenizer))
        return Preparing(loaded).num_threads

    assert num_threads() == MANY
    plain = type(tokenizer._tokenizer)
    for name in ("_encode_plus", "encode"):

        def more(self: Any, *args: Any, name: str = name, **options: Any) -> Any:
            return getattr(plain, name)(self, *args, **options)

        tokenizer._tokenizer.__class__ = type("Gapped", (plain,), {name: more})
        assert num_threads() == 1
    assert issubclass(CodeLlamaTokenizer, PreTrainedTokenizerFast)
    assert CodeLlamaTokenizer._encode_plus is not PreTrainedTokenizerFast._encode_plus


@pytest.mark.parametrize("has_limits", [False, True])
def test_tokens_and_texts_are_right_while_both_are_made(has_limits: bool) -> None:
    """One thread prepares rows, and another one uses all that the engine's thread uses: the tokens
    and texts are those that come one after the other, and nothing is raised."""
    loaded = demo(has_limits=has_limits)
    preparing, tokenizer = Preparing(loaded), loaded.tokenizer
    texts = [f"{number} naïve 🙂 words. " * (1 + number * 7 % 40) for number in range(16)]
    prompts = [preparing.prepare(chat(text))[0].prompt for text in texts]
    tokens = [tokenizer.encode(text) for text in texts]
    faults: list[str] = []
    end = time.monotonic() + SECONDS

    def prepare(number: int) -> Any:
        return preparing.prepare(chat(texts[number]))[0].prompt == prompts[number]

    def read(number: int) -> Any:
        detokenizer = tokenizer.detokenizer
        for token in tokens[number]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert tokenizer.encode("</think>", add_special_tokens=False)
        assert tokenizer._tokenizer.backend_tokenizer.to_str() and len(tokenizer)
        return detokenizer.text == texts[number] == tokenizer.decode(tokens[number])

    def repeat(is_right: Any) -> None:
        number = 0
        while time.monotonic() < end and not faults:
            number += 1
            try:
                if not is_right(number % len(texts)):
                    faults.append(f"{is_right.__name__} of {number % len(texts)}")
            except BaseException as fault:  # noqa: BLE001 - a panic in native code, too
                faults.append(repr(fault))

    threads = [threading.Thread(target=repeat, args=[one]) for one in (prepare, read)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not faults

"""What a row's parameters mean for this model: defaults, ranges, token ids, end tokens.

The producer has checked ranges and sizes. Data that comes over Redis is checked again. Only here is
it known which token ids the model has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from batchkv_producer.agreed import DEFAULT_MAX_TOKENS
from batchkv_producer.intake.checks import MAX_STOP_BYTES
from batchkv_producer.intake.rules import MAX_BAD_WORDS, MAX_BIAS, MAX_LISTED_TOKENS
from batchkv_producer.wire.job import ErrorCode, SamplingParams
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Generation

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, 20),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "min_tokens": (0, 2**31 - 1),
    "thinking_budget": (0, 2**31 - 1),
    "n": (2, 128),
}


def check_params(asked: SamplingParams, vocabulary: int) -> None:
    """Refuse numbers and lists out of range, and ids that the model lacks; raises RowRefused."""
    for name, (low, high) in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and not low <= value <= high:  # also true for nan
            raise _refusal(f"{name} must be between {low:g} and {high:g}")
    for name, count, most in (
        ("stop_token_ids", len(asked.stop_token_ids), MAX_LISTED_TOKENS),
        ("logit_bias", len(asked.logit_bias), MAX_LISTED_TOKENS),
        ("bad_words", len(asked.bad_words), MAX_BAD_WORDS),
    ):
        if count > most:
            raise _refusal(f"{name} has {count} entries; at most {most} are accepted")
    check_ids("stop_token_ids", asked.stop_token_ids, vocabulary)
    check_ids("logit_bias", (token for token, _ in asked.logit_bias), vocabulary)
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in asked.logit_bias):
        raise _refusal(f"logit_bias must be between -{MAX_BIAS} and {MAX_BIAS}")


def check_ids(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    """Refuse ids that the model has no row for; raises RowRefused."""
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        last = vocabulary - 1
        raise _refusal(f"{name} has the token id {wrong}; this model has ids from 0 to {last}")


def generation_of(work: Work, num_prompt: int, loaded: LoadedModel) -> Generation:
    """The row's parameters with every default filled in; raises RowRefused."""
    asked, tokenizer = work.request.params, loaded.tokenizer
    defaults = {
        name: value
        for name, value in loaded.defaults.items()
        if _RANGES[name][0] <= value <= _RANGES[name][1]
    }
    max_tokens = _max_tokens(asked, num_prompt, loaded.context, defaults.get("max_tokens"))
    min_tokens = asked.min_tokens or 0
    if min_tokens > max_tokens:
        raise _refusal(f"min_tokens {min_tokens} is more than the row's max_tokens, {max_tokens}")
    skips_special = asked.skip_special_tokens is not False
    hidden = loaded.special_tokens if skips_special else frozenset[int]()
    stop_tokens = frozenset(asked.stop_token_ids) | _hidden_stops(asked.stop, tokenizer, hidden)
    ends = {*tokenizer.eos_token_ids, *stop_tokens} if min_tokens else ()
    return Generation(
        max_tokens=max_tokens,
        temperature=_first(asked.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(asked.top_p, defaults.get("top_p"), 1.0),
        top_k=int(_first(asked.top_k, defaults.get("top_k"), 0)),
        min_p=_first(asked.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(
            asked.repetition_penalty, defaults.get("repetition_penalty"), 1.0
        ),
        seed=_first(asked.seed, None, _seed(work.job_id)),
        stop=asked.stop,
        logprobs=asked.logprobs,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        min_tokens=min_tokens,
        ignore_eos=bool(asked.ignore_eos),
        stop_token_ids=stop_tokens,
        include_stop=bool(asked.include_stop),
        return_token_ids=bool(asked.return_token_ids),
        logit_bias=asked.logit_bias,
        bad_words=_words(asked.bad_words, tokenizer, loaded.vocabulary),
        late_tokens=frozenset(token for token in ends if 0 <= token < loaded.vocabulary),
        hidden_tokens=hidden,
    )


def _hidden_stops(stops: tuple[str, ...], tokenizer: Any, hidden: frozenset[int]) -> frozenset[int]:
    """Stop strings that are special tokens: their text is hidden, so the tokens stop the row."""
    if not hidden:
        return frozenset()
    texts = (stop for stop in stops if stop.encode("utf-8", "ignore").decode() == stop)
    found = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return frozenset(tokens[0] for tokens in found if len(tokens) == 1 and tokens[0] in hidden)


def _words(words: tuple[str, ...], tokenizer: Any, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of each bad word: at the beginning of a text and, if they differ, after a blank.

    As in vLLM, the second form counts if it begins with another token and is as long.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not 0 < len(word.encode("utf-8", "replace")) <= MAX_STOP_BYTES:
            raise _refusal(f"a bad word must have 1 to {MAX_STOP_BYTES} bytes")
        bare = word.lstrip()
        first, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")
        )
        if not first:
            raise _refusal(f"the bad word {word[:60]!r} has no token in this model")
        check_ids("a bad word", first, vocabulary)
        found[first] = None
        if spaced and spaced[0] != first[0] and len(spaced) == len(first):
            check_ids("a bad word", spaced, vocabulary)
            found[spaced] = None
    return tuple(found)


def _max_tokens(asked: SamplingParams, num_prompt: int, context: int, default: float | None) -> int:
    """A requested number must fit the context; a default is cut to what is left of it."""
    room = context - num_prompt
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens and max_tokens {asked.max_tokens} are more than the "
            f"model's context of {context} tokens: {_advice(room)}",
        )
    if room < 1:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens leave no room in the model's context of {context} "
            f"tokens: {_advice(room)}",
        )
    return min(room, int(_first(asked.max_tokens, default, DEFAULT_MAX_TOKENS)))


def _advice(room: int) -> str:
    """What helps where a prompt leaves ``room`` tokens of the context."""
    return f"lower max_tokens to {room} or less" if room > 0 else "shorten the prompt"


def _refusal(message: str) -> RowRefused:
    return RowRefused(ErrorCode.INVALID_REQUEST, message)


def _first(asked: Any, default: Any, last: Any) -> Any:
    """The first that is not None."""
    return asked if asked is not None else default if default is not None else last


def _seed(job_id: str) -> int:
    """A seed for a row that named none: stable for the job, different for each."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "little")

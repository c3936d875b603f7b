"""Generation parameters of a row, or of a batch's defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from batchkv_producer.errors import WireError

_INT: tuple[type, ...] = (int,)
_NUMBER: tuple[type, ...] = (int, float)
_OPTIONAL_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": _INT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INT,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _INT,
    "logprobs": _INT,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "min_tokens": _INT,
    "thinking_budget": _INT,
    "n": _INT,
}
# Switches are stored only with the one value that changes something.
_SWITCHES = {
    "ignore_eos": True,
    "include_stop": True,
    "return_token_ids": True,
    "skip_special_tokens": False,
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. None, and an empty tuple, mean "not given": the default is used.

    ``logprobs`` is None (off) or the number of alternatives returned for each token, 0 to 20.
    ``seed`` None means a hash of the job id. ``include_stop`` keeps the stop string in the text.
    ``logit_bias`` has pairs of token and bias, sorted by token. ``n`` is 2 to 128: one answer is
    "not given". A value that changes nothing is stored as "not given".

    A new parameter needs an entry in each of these: here and in the tables of this module; in
    ``intake.fields`` (its name in a line, and its rule); in ``cli.shared`` (its flag, if it has
    one); in ``maker`` as a need, because older workers refuse it; in the worker's
    ``engine.tokens.requests`` and ``sequence.Generation``.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    thinking_budget: int | None = None
    n: int | None = None


_NAMES = tuple(item.name for item in fields(SamplingParams))
_NUM_FIRST = _NAMES.index("logprobs") + 1  # those of the first version
_first_names, _newer_names = _NAMES[:_NUM_FIRST], _NAMES[_NUM_FIRST:]
_first_values, _newer_values = attrgetter(*_first_names), attrgetter(*_newer_names)
_NONE_NEWER = _newer_values(SamplingParams())


def given_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are given, in the order in which a job has them."""
    pairs = zip(_first_names, _first_values(params), strict=True)
    found = {name: value for name, value in pairs if value is not None and value != ()}
    return found | newer if (newer := newer_params(params)) else found


def newer_params(params: SamplingParams) -> dict[str, Any]:
    """The given parameters that the first version did not have."""
    values = _newer_values(params)
    if values == _NONE_NEWER:  # almost every row's
        return {}
    pairs = zip(_newer_names, values, strict=True)
    return {name: value for name, value in pairs if value is not None and value != ()}


def read_params(payload: dict[str, Any]) -> SamplingParams:
    """The parameters in a job's payload. Raises WireError. The worker checks their ranges."""
    values: dict[str, Any] = {}
    for name, value in payload.items():
        if name in _LISTS:
            values[name] = _LISTS[name](name, value)
        elif name in _SWITCHES:
            if value is not _SWITCHES[name]:
                raise WireError(f"job payload: params.{name} has a value that is never written")
            values[name] = value
        else:
            kinds = _OPTIONAL_TYPES.get(name)
            if kinds is None or isinstance(value, bool) or not isinstance(value, kinds):
                raise WireError(f"job payload: params.{name} is unknown or of the wrong type")
            values[name] = value
    return SamplingParams(**values)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WireError(f"job payload: {name} is not a list of strings")
    return tuple(value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_whole(item) for item in value):
        raise WireError(f"job payload: {name} is not a list of token ids")
    return tuple(value)


def _pairs(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(item, list) and len(item) == 2 for item in value):
        raise WireError(f"job payload: {name} is not a list of pairs")
    if not all(_is_whole(token) and _is_number(bias) for token, bias in value):
        raise WireError(f"job payload: {name} is not a list of token ids and numbers")
    return tuple((token, bias) for token, bias in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_LISTS: dict[str, Callable[[str, Any], Any]] = {
    "stop": _texts,
    "stop_token_ids": _tokens,
    "logit_bias": _pairs,
    "bad_words": _texts,
}

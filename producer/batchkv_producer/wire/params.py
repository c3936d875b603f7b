"""Generation parameters of a row, or of a batch's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchkv_producer.errors import WireError

_OPTIONAL_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "seed": (int,),
    "logprobs": (int,),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. None means "not given": the worker uses the model's default.

    ``logprobs`` is None (off) or the number of alternatives returned for each token, 0 to 20.
    ``seed`` None means a hash of the job id.

    A new parameter needs an entry in each of these: here and in ``_OPTIONAL_TYPES``; in
    ``intake.body`` (its name in a line); in ``cli.shared`` (its flag); in ``maker`` as a need,
    because older workers refuse it; in the worker's ``engine.tokens.requests`` and
    ``sequence.Generation``; in ``docs/input-format.md``.
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


def read_params(payload: dict[str, Any]) -> SamplingParams:  # raises WireError
    stop = payload.get("stop", [])
    if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
        raise WireError("job payload: stop is not a list of strings")
    values: dict[str, Any] = {}
    for name, value in payload.items():
        if name == "stop":
            continue
        kinds = _OPTIONAL_TYPES.get(name)
        if kinds is None or isinstance(value, bool) or not isinstance(value, kinds):
            raise WireError(f"job payload: params.{name} is unknown or of the wrong type")
        values[name] = value
    return SamplingParams(stop=tuple(stop), **values)

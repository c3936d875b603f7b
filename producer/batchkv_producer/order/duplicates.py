"""Duplicates: rows of a batch with the same request, which get one answer (``--dedupe``).

Two requests are the same if all fields that decide the answer are equal: all but ``custom_id``,
with the batch's defaults filled in. Rows that sample without a seed are no duplicates, since their
answers are meant to differ. A row without a temperature counts as one that samples, because the
model's own configuration may set a temperature. The first row is the leader and runs. The others
wait for its end.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import Any

import msgspec

from batchkv_producer.wire.job import Request, asked_of
from batchkv_producer.wire.params import newer_params

_write_json = msgspec.json.Encoder().encode
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")  # 0 and 0.0 are the same
_reals = attrgetter(*_REAL)
_OLD = ("max_tokens", "top_k", "seed", "stop", "logprobs")  # an order that digests depend on
_others = attrgetter(*_OLD)
_NEW_REAL = ("presence_penalty", "frequency_penalty")
KEY_BYTES = 16


def can_have_duplicates(request: Request) -> bool:
    """Whether another row with the same request would get the same answer."""
    params = request.params
    return params.seed is not None or params.temperature == 0


def request_digest(request: Request) -> bytes | None:
    """16 bytes that are equal only for equal requests. The ``custom_id`` does not count."""
    params = request.params
    reals = [None if value is None else float(value) for value in _reals(params)]
    parts: list[Any] = [request.endpoint, request.messages, request.prompt, request.tools]
    if request.style != "raw":
        parts += [request.style, request.system]
    parts += [request.chat_template_kwargs, reals, _others(params)]
    if newer := _newer(request):  # only then, so that digests of older versions stay
        parts.append(newer)
    try:
        raw = _write_json(parts)
    except UnicodeEncodeError:  # half of a surrogate pair: rare, so compute it twice
        return None
    return hashlib.blake2b(raw, digest_size=KEY_BYTES).digest()


def _newer(request: Request) -> dict[str, Any]:
    """What rows of the first version could not ask for, by name.

    ``repetition_penalty`` counts other tokens than in older versions, so their answers are others.
    """
    found = asked_of(request) | newer_params(request.params)
    if not found and request.params.repetition_penalty is None:  # almost every row
        return found
    found |= {name: float(found[name]) for name in _NEW_REAL if name in found}
    if request.params.repetition_penalty is not None:
        found["repetition"] = "all tokens"
    return found

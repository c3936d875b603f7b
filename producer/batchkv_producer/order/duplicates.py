"""Twins: rows of a batch that ask for the same, so that one answer serves them all (``--dedupe``).

Two rows are twins when they agree in every field that decides the answer: all of the request but
its ``custom_id``, with the batch's defaults filled in. A row that samples without a seed has no
twin, for two such rows are meant to differ. It samples unless its temperature is said to be 0: what
nobody says, the model's own configuration may.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from operator import attrgetter

import msgspec

from batchkv_producer.wire.job import Request, SamplingParams

_write_json = msgspec.json.Encoder().encode
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")  # 0 and 0.0 are the same
_reals = attrgetter(*_REAL)
_others = attrgetter(*(item.name for item in fields(SamplingParams) if item.name not in _REAL))
KEY_BYTES = 16


def can_have_twin(request: Request) -> bool:
    """Whether a row that asks for the same as another one gets the same answer."""
    params = request.params
    return params.seed is not None or params.temperature == 0


def request_digest(request: Request) -> bytes | None:
    """16 bytes that only requests for the same have in common, whatever their ``custom_id``."""
    params = request.params
    reals = [None if value is None else float(value) for value in _reals(params)]
    parts = [request.endpoint, request.messages, request.prompt, request.tools]
    if request.style != "raw":
        parts += [request.style, request.system]
    try:
        raw = _write_json([*parts, request.chat_template_kwargs, reals, _others(params)])
    except UnicodeEncodeError:  # half of a surrogate pair: rare enough to be computed twice
        return None
    return hashlib.blake2b(raw, digest_size=KEY_BYTES).digest()

"""Duplicates: rows of a batch with the same request, which get one answer (``--dedupe``).

Two requests are the same if all fields that decide the answer are equal: all but ``custom_id``,
with the batch's defaults filled in. Rows that sample without a seed are no duplicates, since their
answers are meant to differ. A row without a temperature counts as one that samples, because the
model's own configuration may set a temperature. The first row is the leader and runs. The others
wait for its end.
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


def can_have_duplicates(request: Request) -> bool:
    """Whether another row with the same request would get the same answer."""
    params = request.params
    return params.seed is not None or params.temperature == 0


def request_digest(request: Request) -> bytes | None:
    """16 bytes that are equal only for equal requests. The ``custom_id`` does not count."""
    params = request.params
    reals = [None if value is None else float(value) for value in _reals(params)]
    parts = [request.endpoint, request.messages, request.prompt, request.tools]
    if request.style != "raw":
        parts += [request.style, request.system]
    try:
        raw = _write_json([*parts, request.chat_template_kwargs, reals, _others(params)])
    except UnicodeEncodeError:  # half of a surrogate pair: rare, so compute it twice
        return None
    return hashlib.blake2b(raw, digest_size=KEY_BYTES).digest()

"""A batch's generation defaults, as its hash stores them."""

from __future__ import annotations

import json
from dataclasses import asdict

from batchkv_producer.errors import WireError
from batchkv_producer.wire.params import SamplingParams, read_params


def encode_defaults(defaults: SamplingParams) -> str:
    """The defaults as JSON, without fields that were not given."""
    given = {name: value for name, value in asdict(defaults).items() if value not in (None, ())}
    return json.dumps(given)


def decode_defaults(text: str) -> SamplingParams:
    """Inverse of encode_defaults; raises WireError on anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise WireError(f"a batch's defaults on the server cannot be read: {fault}") from fault
    if not isinstance(value, dict):
        raise WireError("a batch's defaults on the server are not an object")
    return read_params(value)

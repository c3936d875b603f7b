"""The settings and versions of a batch, for people. Texts that models read are left out."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.progress import duration
from batchkv_producer.report.words import utc
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.kept_defaults import decode_defaults

_FIELDS = ("order", "rules", "style", "thinking", "system", "defaults")


def settings_of(connection: Redis, status: BatchStatus) -> list[tuple[str, str]]:
    """(name, value) of each setting that the batch has."""
    values: Any = connection.hmget(redis_keys.batch(status.batch_id), _FIELDS)
    texts = [(value or b"").decode("utf-8", "replace") for value in values]
    stored = dict(zip(_FIELDS, texts, strict=True))
    options = {
        "model": status.model,
        "adapter": status.adapter,
        "queue": status.queue,
        "fingerprint of the model's files": status.fingerprint,
        "KV scheme": status.scheme,
        "dtype": status.dtype,
        "several schemes and dtypes": "allowed" if status.is_mixed else "",
        "generation": f"{status.generation} of {status.base}" if status.base else "",
        "priority": status.priority,
        "deadline": utc(status.expires) if status.expires else "",
        "results stay": _kept(status),
        "duplicates": "computed once" if status.is_deduped else "",
        "remembered answers": "used" if status.is_reusing else "",
        "time limit of a row": _limit(status.job_timeout_seconds),
        "plain prompts": stored["style"],
        "system message": "given (its text is not shown)" if stored["system"] else "",
        "thinking": stored["thinking"],
        "order of rows": f"version {stored['order'] or '1'}",
        "rules for fields": f"version {stored['rules']}" if stored["rules"] else "",
    }
    found = [(name, value) for name, value in options.items() if value]
    return found + _defaults(stored["defaults"])


def _limit(seconds: int) -> str:
    return duration(seconds) if seconds else ""


def _kept(status: BatchStatus) -> str:
    if status.kept_until:
        return f"until {utc(status.kept_until)}"
    if status.keep_seconds:
        return f"{duration(status.keep_seconds)} after the end"
    return "until they are forgotten"


def _defaults(text: str) -> list[tuple[str, str]]:
    """The parameters for rows that set none. Texts of ``stop`` are only counted."""
    try:
        params = asdict(decode_defaults(text)) if text else {}
    except WireError:
        return [("defaults", "cannot be read")]
    found = []
    for name, value in params.items():
        if value in (None, (), []):
            continue
        is_short = isinstance(value, int | float | bool)
        shown = json.dumps(value) if is_short else f"given ({len(value)})"
        found.append((f"default {name}", shown))
    return found

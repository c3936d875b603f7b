"""RQ's configuration module: ``rq worker -c batchkv_worker.rq_config -w ...``.

The URL comes from BATCHKV_REDIS_URL or from the file that BATCHKV_REDIS_URL_FILE names, so that no
process list shows a password. ``--url`` overrides both. With BATCHKV_MODEL set, the queue need not
be named; with BATCHKV_ADAPTERS neither need those of the adapters. RQ imports this module and reads
only its names in capitals.
"""

from __future__ import annotations

import os
import sys

from batchkv_producer.errors import UsageError
from batchkv_producer.progress import printable
from batchkv_producer.server import connection
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import parse_adapters, served_name


def _url() -> str | None:
    url = connection.resolve_url(None)
    if url and not url.startswith(connection.SCHEMES):
        schemes = ", ".join(connection.SCHEMES)
        raise UsageError(f"Redis URL {connection.masked(url)} must begin with one of {schemes}")
    return url


try:
    if (_found := _url()) is not None:
        REDIS_URL = _found
except UsageError as fault:
    # RQ cannot report an error of its configuration, so print it here and end the process.
    sys.stderr.write(f"batchkv: {printable(str(fault))}\n")
    raise SystemExit(fault.exit_code) from fault


def _queues(model: str) -> list[str]:
    """The queues of the model alone and of the model with each adapter."""
    adapters = parse_adapters(os.environ.get("BATCHKV_ADAPTERS", ""))
    served = [model, *(served_name(model, adapter.name) for adapter in adapters)]
    return [redis_keys.queue_name(name) for name in served]


if _model := os.environ.get("BATCHKV_MODEL", "").strip():
    try:
        QUEUES = _queues(_model)
    except UsageError as fault:
        sys.stderr.write(f"batchkv: BATCHKV_ADAPTERS: {printable(str(fault))}\n")
        raise SystemExit(fault.exit_code) from fault

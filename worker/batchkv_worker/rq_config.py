"""RQ's configuration module: ``rq worker -c batchkv_worker.rq_config -w ...``.

The URL comes from BATCHKV_REDIS_URL or from the file that BATCHKV_REDIS_URL_FILE names, so that no
process list shows a password. ``--url`` overrides both. With BATCHKV_MODEL set, the queue need not
be named. RQ imports this module and reads only its names in capitals.
"""

from __future__ import annotations

import os
import sys

from batchkv_producer.errors import UsageError
from batchkv_producer.progress import printable
from batchkv_producer.server import connection
from batchkv_producer.wire import redis_keys


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

if _model := os.environ.get("BATCHKV_MODEL", "").strip():
    QUEUES = [redis_keys.queue_name(_model)]

"""Drains and resumes workers, also those of this machine that the server keeps from us.

Whoever may write into the home folder of a worker may stop its process anyway. So a file there
drains it, too, if the user of the server has no right to.
"""

from __future__ import annotations

from redis import Redis

from batchkv_producer.errors import BatchkvError, RefusedError
from batchkv_producer.local.presence import drain_file, own_record_files
from batchkv_producer.manage import drain as orders


def drain(connection: Redis, name: str) -> None:
    """Let a worker take no more rows. Raises NotFoundError or RefusedError."""
    try:
        orders.drain(connection, name)
    except RefusedError as fault:
        try:
            files = own_record_files(connection, name)
        except (OSError, BatchkvError):
            raise fault from None
        if not files:
            raise
        for file in files:
            drain_file(file).touch(mode=0o600)


def resume(connection: Redis, name: str) -> None:
    """Let a drained worker take rows again. Raises NotFoundError or RefusedError."""
    try:
        files = [drain_file(file) for file in own_record_files(connection, name)]
    except (OSError, BatchkvError):
        files = []
    was_drained_here = False
    for file in files:
        was_drained_here |= file.exists()
        file.unlink(missing_ok=True)
    try:
        orders.resume(connection, name)
    except RefusedError:
        if not was_drained_here or orders.is_ordered(connection, name):
            raise

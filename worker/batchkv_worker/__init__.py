"""The worker: a group of jobs from the queue, one engine, results as they end.

``batchkv_worker.BatchWorker`` is the class for ``rq worker -w``. It is loaded on first use, so that
importing this package is cheap; MLX is loaded later still, on the engine's own thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchkv_worker.queue.rq_worker import BatchWorker

__all__ = ["BatchWorker"]


def __getattr__(name: str) -> Any:
    if name == "BatchWorker":
        from batchkv_worker.queue.rq_worker import BatchWorker

        return BatchWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

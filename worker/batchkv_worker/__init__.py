"""The worker: it takes jobs from the queue, computes them in one engine, and stores the results.

``batchkv_worker.BatchWorker`` is the class for ``rq worker -w``. It is loaded on first use, so that
the import of this package is quick. MLX is loaded even later, on the engine's thread.
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

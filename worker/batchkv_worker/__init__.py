"""The worker: it takes jobs from the queue, computes them in one engine, and stores the results.

``batchkv_worker.BatchWorker`` is the class for ``rq worker -w``. It is loaded on first use, so that
the import of this package is quick. MLX is loaded even later, on the engine's thread.

On CUDA, MLX launches without graphs here, unless the environment has ``MLX_USE_CUDA_GRAPHS``. MLX
records each product of matrices to make it part of a graph, and that takes the host longer than to
launch it: see ``docs/benchmarks.md``.

MLX counts, for each thread, how often it had to plan attention or a convolution for a shape that it
did not know. After some hundreds, each further one is an error there. A worker's prompts have more
shapes than that, so MLX does not count here, and keeps twice as many plans of attention.

MLX reads each variable once, when it first needs it. Those of the environment stay as they are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchkv_worker.queue.rq_worker import BatchWorker

__all__ = ["BatchWorker"]

for _name, _value in (
    ("MLX_USE_CUDA_GRAPHS", "0"),
    ("MLX_ENABLE_CACHE_THRASHING_CHECK", "0"),
    ("MLX_CUDA_SDPA_CACHE_SIZE", "512"),
):
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    if name == "BatchWorker":
        from batchkv_worker.queue.rq_worker import BatchWorker

        return BatchWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

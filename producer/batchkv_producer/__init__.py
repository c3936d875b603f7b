"""batchkv's producer side: submit, follow, and read back batches. Never imports MLX.

The names below are imported when they are first asked for: so little happens before the command
can heed a Ctrl-C (``entry``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchkv_producer.client import Client
    from batchkv_producer.connecting import connect
    from batchkv_producer.errors import (
        BatchkvError,
        ExpiredError,
        InputFileError,
        NotFoundError,
        ServerError,
        UsageError,
        WireError,
    )
    from batchkv_producer.formats import RowError
    from batchkv_producer.job import ErrorCode, Result, SamplingParams, TokenLogprob, Usage
    from batchkv_producer.one_job import JobInfo
    from batchkv_producer.prompting import Prompting
    from batchkv_producer.source import Inputs
    from batchkv_producer.status import BatchStatus
    from batchkv_producer.stored import StoredRow
    from batchkv_producer.submission import Checked, Submitted
    from batchkv_producer.terms import Deadline, Terms
    from batchkv_producer.workers import WorkerInfo

__all__ = [
    "BatchStatus",
    "BatchkvError",
    "Checked",
    "Client",
    "Deadline",
    "ErrorCode",
    "ExpiredError",
    "InputFileError",
    "Inputs",
    "JobInfo",
    "NotFoundError",
    "Prompting",
    "Result",
    "RowError",
    "SamplingParams",
    "ServerError",
    "StoredRow",
    "Submitted",
    "Terms",
    "TokenLogprob",
    "Usage",
    "UsageError",
    "WireError",
    "WorkerInfo",
    "connect",
]

_HOMES = {
    "client": ("Client",),
    "connecting": ("connect",),
    "errors": (
        "BatchkvError",
        "ExpiredError",
        "InputFileError",
        "NotFoundError",
        "ServerError",
        "UsageError",
        "WireError",
    ),
    "formats": ("RowError",),
    "job": (
        "ErrorCode",
        "Result",
        "SamplingParams",
        "TokenLogprob",
        "Usage",
    ),
    "one_job": ("JobInfo",),
    "prompting": ("Prompting",),
    "source": ("Inputs",),
    "status": ("BatchStatus",),
    "stored": ("StoredRow",),
    "submission": (
        "Checked",
        "Submitted",
    ),
    "terms": (
        "Deadline",
        "Terms",
    ),
    "workers": ("WorkerInfo",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

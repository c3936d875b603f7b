"""batchkv's producer side: submit batches, follow them, read results. Never imports MLX.

A name below is imported at its first use. So commands start quickly, and Ctrl-C works at once
(``entry``).
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
    from batchkv_producer.intake.formats import RowError
    from batchkv_producer.intake.prompting import Prompting
    from batchkv_producer.intake.source import Inputs
    from batchkv_producer.interface import BatchClient
    from batchkv_producer.monitor.one_job import JobInfo
    from batchkv_producer.monitor.status import BatchStatus
    from batchkv_producer.monitor.workers import WorkerInfo
    from batchkv_producer.results.stored_rows import StoredRow
    from batchkv_producer.submit.submission import Checked, Submitted
    from batchkv_producer.wire.batch_options import BatchOptions, Deadline, Terms
    from batchkv_producer.wire.choice import Choice, ToolCall
    from batchkv_producer.wire.job import ErrorCode, Result, SamplingParams, TokenLogprob, Usage

__all__ = [
    "BatchClient",
    "BatchOptions",
    "BatchStatus",
    "BatchkvError",
    "Checked",
    "Choice",
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
    "ToolCall",
    "Usage",
    "UsageError",
    "WireError",
    "WorkerInfo",
    "connect",
]

_HOMES = {
    "client": ("Client",),
    "connecting": ("connect",),
    "interface": ("BatchClient",),
    "errors": (
        "BatchkvError",
        "ExpiredError",
        "InputFileError",
        "NotFoundError",
        "ServerError",
        "UsageError",
        "WireError",
    ),
    "intake.formats": ("RowError",),
    "wire.job": (
        "ErrorCode",
        "Result",
        "SamplingParams",
        "TokenLogprob",
        "Usage",
    ),
    "wire.choice": ("Choice", "ToolCall"),
    "monitor.one_job": ("JobInfo",),
    "intake.prompting": ("Prompting",),
    "intake.source": ("Inputs",),
    "monitor.status": ("BatchStatus",),
    "results.stored_rows": ("StoredRow",),
    "submit.submission": (
        "Checked",
        "Submitted",
    ),
    "wire.batch_options": (
        "BatchOptions",
        "Deadline",
        "Terms",
    ),
    "monitor.workers": ("WorkerInfo",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""batchkv's producer side: submit, follow, and read back batches. Never imports MLX."""

from batchkv_producer.client import Client
from batchkv_producer.errors import (
    BatchkvError,
    InputFileError,
    NotFoundError,
    ServerError,
    UsageError,
    WireError,
)
from batchkv_producer.formats import RowError
from batchkv_producer.job import ErrorCode, Result, SamplingParams, TokenLogprob, Usage
from batchkv_producer.status import BatchStatus, JobInfo
from batchkv_producer.stored import StoredRow
from batchkv_producer.submission import Checked, Submitted
from batchkv_producer.workers import WorkerInfo

__all__ = [
    "BatchStatus",
    "BatchkvError",
    "Checked",
    "Client",
    "ErrorCode",
    "InputFileError",
    "JobInfo",
    "NotFoundError",
    "Result",
    "RowError",
    "SamplingParams",
    "ServerError",
    "StoredRow",
    "Submitted",
    "TokenLogprob",
    "Usage",
    "UsageError",
    "WireError",
    "WorkerInfo",
]

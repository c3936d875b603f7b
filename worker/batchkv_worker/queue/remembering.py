"""Which answers this worker remembers for later batches (``batchkv submit --reuse``)."""

from __future__ import annotations

from pathlib import Path

from batchkv_producer.submit.fingerprint import locate
from batchkv_producer.wire.transition_types import NOTHING_REMEMBERED, ReuseLimits
from batchkv_worker.settings import WorkerSettings

# Of the files that a fingerprint covers, those with chat templates.
_TEMPLATES = (
    *("chat_template*", "*.jinja", "additional_chat_templates/*.jinja"),
    *("tokenizer_config.json", "*processor_config.json"),
)
_DATE = b"strftime_now"  # the function by which a template writes the present time


def limits_of(settings: WorkerSettings) -> ReuseLimits:
    """The settings' limits, or nothing if this worker's answers depend on more than the request.

    That is so with blocks of another scheme (``kv_adopt_float``), and if the chat template writes
    the date into the prompt. Call it when the model's files are there.
    """
    if settings.kv_adopt_float or _writes_date(settings.model):
        return NOTHING_REMEMBERED
    return ReuseLimits(settings.reuse_seconds, settings.reuse_answers, settings.reuse_bytes)


def _writes_date(model: str) -> bool:
    folder = locate(model)
    files = [file for name in _TEMPLATES for file in folder.glob(name)] if folder else []
    return any(map(_has_date, files))


def _has_date(file: Path) -> bool:
    """Whether a file names the function. One that cannot be read may do so."""
    try:
        return _DATE in file.read_bytes()
    except OSError:
        return True

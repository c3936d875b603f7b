"""The first lines that ``batchkv run`` prints, and the options of its own workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from batchkv_producer.client import Submitted
from batchkv_producer.errors import OLD_INSTALLATION, UsageError
from batchkv_producer.interface import BatchClient
from batchkv_producer.local.mended import make_room
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.progress import rows
from batchkv_producer.results import target
from batchkv_producer.settings_table import BY_NAME, ValueType
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.wire.batch_options import BatchOptions, moment_text
from batchkv_producer.wire.maker import Maker

DEFAULT_SCHEME = BY_NAME["kv_scheme"].default
_DTYPES = {"float32": "float32", "bfloat16": "half", "float16": "half"}


def with_own_workers(
    options: BatchOptions, arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> BatchOptions:
    """The options of a batch whose own workers are started with these arguments."""
    flag, variable = BY_NAME["kv_scheme"].flag, BY_NAME["kv_scheme"].variable
    given = arguments[arguments.index(flag) + 1] if flag in arguments else ""
    text = given or environ.get(variable, "").strip() or DEFAULT_SCHEME
    try:
        scheme = canonical(text)
    except ValueError as fault:
        raise UsageError(f"{flag if given else variable} {text}: {fault}") from fault
    given_dtype = environ.get(BY_NAME["dtype"].variable, "").strip()
    dtype = _DTYPES.get(given_dtype, "")  # "auto": the device decides
    return replace(options, maker=replace(options.maker, scheme=scheme, dtype=dtype))


def is_polite(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether workers started with these arguments pause on battery.

    A value that cannot be is left to the worker, which refuses it.
    """
    setting = BY_NAME["polite"]
    text = "on" if setting.flag in arguments else environ.get(setting.variable, "").strip()
    try:
        return bool(text) and any(check(setting.name, text) for check in _checks("setting"))
    except ValueError:
        return False


def canonical(scheme: str) -> str:
    """The canonical name of a KV scheme. ValueError if there is none of that name.

    Only the worker's package has the schemes. This package may not import it, so the check is found
    by its entry point.
    """
    for check in _checks("kv-scheme"):
        return str(check(scheme))
    return scheme


def checked_setting(name: str, text: str) -> str:
    """The canonical text of a worker's setting. ValueError if the value is invalid."""
    if BY_NAME[name].value_type is ValueType.SCHEME:
        return canonical(text)
    for check in _checks("setting"):
        check(name, text)
    return text


def _checks(name: str) -> Iterator[Callable[..., object]]:
    """The worker's checks of that name. UsageError if the installation is older than the code."""
    for found in entry_points(group="batchkv.checks", name=name):
        try:
            yield found.load()
        except ModuleNotFoundError as fault:
            raise UsageError(OLD_INSTALLATION) from fault


def first_line(client: BatchClient, submitted: Submitted, where: str) -> str:
    """The batch's id, whether it starts, goes on or is finished, and its answers from before."""
    batch_id, before = submitted.batch_id, ""
    name = generation_words(submitted) if submitted.generation > 1 else f"batch {batch_id}"
    if not submitted.joined:
        return f"{name} starts: {rows(submitted.total)}, results in {where}"
    status = client.status(batch_id)
    if num_before := status.ok:
        whole = f"all {num_before:,}" if num_before == submitted.total else f"{num_before:,}"
        before = f"; {whole} answered before{_last_answer(client, status)}, --fresh computes anew"
    state = "is finished, nothing is computed" if status.is_done else "goes on"
    return f"{name} {state}: {rows(submitted.total)}, results in {where}{before}"


def generation_words(submitted: Submitted) -> str:
    """The sentence for a later generation of a batch, with the reason."""
    why = f" (the one before has {submitted.why})" if submitted.why else ""
    number = f"generation {submitted.generation} of {submitted.base}"
    return f"batch {submitted.batch_id}, {number}{why}"


def _last_answer(client: BatchClient, status: BatchStatus) -> str:
    """The time, worker, weights and scheme of the last answer, in brackets."""
    newest = client.results(status.batch_id, after=max(0, status.num_ended - 1))
    last = next((row.result for row in newest if row.result.outcome == "ok"), None)
    if last is None:
        return ""
    made = Maker(last.fingerprint, last.scheme).words() or "its weights and scheme are not known"
    return f" (the last {moment_text(last.created)} by {last.worker}; {made})"


def note_what_stays(
    client: BatchClient,
    submitted: Submitted,
    earlier: EarlierBatch | None,
    out: Path,
    job_timeout_seconds: int | None,
    note: Callable[[str], None],
) -> None:
    """Print where an existing batch differs from this command's flags, and make room in OUT."""
    for text in filter(None, (submitted.model_note, submitted.style_note, submitted.reuse_note)):
        note(text)
    for text in submitted.notes:
        note(f"the batch existed before: {text}")
    batch = client.status(submitted.batch_id)
    make_room(earlier, batch, submitted, out, note)
    if out == target.STDOUT and batch.num_ended > submitted.num_bad:
        them = "it is" if batch.num_ended == 1 else "they are"
        note(f"{rows(batch.num_ended)} ended before; {them} printed again")
    there = batch.job_timeout_seconds
    if job_timeout_seconds and there not in (0, job_timeout_seconds):
        note(
            f"the rows of this batch keep their timeout of {there} s; for those that failed "
            f"`batchkv retry {submitted.batch_id} --job-timeout {job_timeout_seconds}` sets another"
        )

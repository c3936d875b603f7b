"""The first lines that ``batchkv run`` prints, and the options of its own workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from batchkv_producer.client import Client, Submitted
from batchkv_producer.errors import OLD_INSTALLATION, UsageError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.progress import rows
from batchkv_producer.results import aside
from batchkv_producer.settings_table import BY_NAME, ValueType
from batchkv_producer.wire.batch_options import BatchOptions, moment_text
from batchkv_producer.wire.maker import Maker

DEFAULT_SCHEME = BY_NAME["kv_scheme"].default
_DTYPES = {"float32": "float32", "bfloat16": "half", "float16": "half"}


def with_own_workers(
    options: BatchOptions, arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> BatchOptions:
    """The options of a batch whose own workers are started with these arguments."""
    flag, variable = BY_NAME["kv_scheme"].flag, BY_NAME["kv_scheme"].variable
    said = arguments[arguments.index(flag) + 1] if flag in arguments else ""
    text = said or environ.get(variable, "").strip() or DEFAULT_SCHEME
    try:
        scheme = canonical(text)
    except ValueError as fault:
        raise UsageError(f"{flag if said else variable} {text}: {fault}") from fault
    said_dtype = environ.get(BY_NAME["dtype"].variable, "").strip()
    dtype = _DTYPES.get(said_dtype, "")  # "auto": the device decides
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


def first_words(client: Client, submitted: Submitted, where: str) -> str:
    """Which batch this is, and what of it is not computed now."""
    batch_id, before = submitted.batch_id, ""
    name = generation_words(submitted) if submitted.generation > 1 else f"batch {batch_id}"
    if not submitted.joined:
        return f"{name} starts: {rows(submitted.total)}, results in {where}"
    status = client.status(batch_id)
    if num_before := status.ok:
        whole = f"all {num_before:,}" if num_before == submitted.total else f"{num_before:,}"
        before = f"; {whole} answered before{_last_answer(client, status)}, --fresh computes anew"
    return f"{name} goes on: {rows(submitted.total)}, results in {where}{before}"


def generation_words(submitted: Submitted) -> str:
    """The sentence for a later generation of a batch, with the reason."""
    why = f" (the one before has {submitted.why})" if submitted.why else ""
    number = f"generation {submitted.generation} of {submitted.base}"
    return f"batch {submitted.batch_id}, {number}{why}"


def put_aside(
    status: BatchStatus, submitted: Submitted, out: Path, note: Callable[[str], None]
) -> None:
    """Move an OUT that holds answers of another generation aside, and print a note."""
    if aside.holds_other(out, submitted.batch_id, submitted.relatives, maker_of(status)):
        moved = aside.set_aside(out)
        note(f"{out} held answers of another generation of this batch: they are in {moved} now")


def maker_of(status: BatchStatus) -> Maker:
    """The weights, scheme and dtype of a batch's answers, as far as they are known."""
    if status.is_mixed:
        return Maker(status.fingerprint)
    return Maker(status.fingerprint, status.scheme, status.dtype)


def _last_answer(client: Client, status: BatchStatus) -> str:
    """The time, worker, weights and scheme of the last answer, in brackets."""
    newest = client.results(status.batch_id, after=max(0, status.num_ended - 1))
    last = next((row.result for row in newest if row.result.outcome == "ok"), None)
    if last is None:
        return ""
    made = Maker(last.fingerprint, last.scheme).words() or "its weights and scheme are not known"
    return f" (the last {moment_text(last.created)} by {last.worker}; {made})"

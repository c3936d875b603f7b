"""Shows batches, jobs and workers: as tables that fit the screen, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from batchkv_producer.batch_facts import (
    BatchFacts,
    Left,
    counts_pauses,
    facts_of,
    listed_fields,
    serving_workers,
    times_left,
    worker_dicts,
)
from batchkv_producer.cli.shared import print_json
from batchkv_producer.client import BatchStatus
from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.mismatch import find_mismatch
from batchkv_producer.monitor.remaining import share_done
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.progress import duration, printable, rows
from batchkv_producer.remote.rows import is_openai_id
from batchkv_producer.server.memory_use import MemoryUse, size_text
from batchkv_producer.tables import (
    CUT,
    Column,
    print_fields,
    shorten_models,
    shorten_names,
    table_lines,
    width,
)
from batchkv_producer.wire.maker import Maker

NO_BATCHES = "no batches: `batchkv run FILE -m MODEL` computes the rows of a file"
MIN_PART_CHARS = 16  # of a part that is cut; a shorter one is left out


def show_overview(
    client: BatchClient,
    read_memory_use: Callable[[], MemoryUse | None],
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the newest batches, all workers and the server's memory."""
    found = client.workers()
    if as_json:
        listed = listed_fields(client, found, limit)
        print_json({"batches": listed, "workers": worker_dicts(found), "server": read_memory_use()})
        return
    batches, num_older = newest(client, limit)
    left, room = times_left(client, batches, found), read_memory_use()
    _print_batches(_overview_columns(batches, left))
    _print_older(num_older)
    click.echo("")
    show_workers(found)
    for batch in batches:
        if mismatch := find_mismatch(batch, serving_workers(client, batch, found)):
            click.echo("")
            print_fields([(batch.batch_id, mismatch.note)])
    if room is not None:
        click.echo("")
        print_fields([("server's memory:", str(room))])


def _overview_columns(batches: Sequence[BatchStatus], left: Left) -> list[Column]:
    return [
        Column("BATCH", [b.batch_id for b in batches]),
        Column("STATE", [state_of(b) for b in batches]),
        Column("DONE", [share_done(b) for b in batches]),
        Column("LEFT", [_left(b, left) for b in batches], drop=4, if_any=True),
        Column("ROWS", [b.total for b in batches]),
        Column("OK", [b.ok for b in batches]),
        Column("FAILED", [b.failed for b in batches], if_any=True),
        Column("CANCELED", [b.canceled for b in batches], drop=1, if_any=True),
        Column("HELD", [b.running for b in batches], drop=3),
        Column("QUEUED", [b.queued for b in batches], drop=2),
        Column("MODEL", [b.model for b in batches], shorten_models, drop=5),
    ]


def show_list(client: BatchClient, limit: int | None) -> None:
    """Print one line for each batch, with its name and its flags."""
    batches, num_older = newest(client, limit)
    left = times_left(client, batches, client.workers())
    columns = [
        Column("BATCH", [b.batch_id for b in batches]),
        Column("CREATED", [_short_moment(b.created) for b in batches], drop=3),
        Column("STATE", [state_of(b) for b in batches]),
        Column("DONE", [share_done(b) for b in batches]),
        Column("LEFT", [_left(b, left) for b in batches], drop=2, if_any=True),
        Column("ROWS", [b.total for b in batches]),
        Column("FAILED", [b.failed for b in batches], if_any=True),
        Column("PRIORITY", [_priority(b) for b in batches], if_any=True, drop=6),
        Column("EXPIRES", [_deadline(b) for b in batches], if_any=True, drop=7),
        Column("MODEL", [b.model for b in batches], shorten_models, drop=5),
        Column("NAME", [b.name for b in batches], shorten_names, drop=4),
    ]  # fmt: skip
    _print_batches(columns)
    _print_older(num_older)


def _priority(batch: BatchStatus) -> str:
    return "" if batch.priority == "normal" else batch.priority


def _print_batches(columns: list[Column]) -> None:
    title, *lines = table_lines(columns)
    click.echo("\n".join([title, *lines]) if lines else NO_BATCHES)


def newest(client: BatchClient, limit: int | None) -> tuple[list[BatchStatus], int]:
    """The newest batches, and the number of older ones."""
    found = client.list_batches(limit)
    is_cut = limit is not None and len(found) == limit
    return found, max(0, client.count_batches() - len(found)) if is_cut else 0


def _print_older(count: int) -> None:
    if count:
        noun = "1 older batch is" if count == 1 else f"{count:,} older batches are"
        click.echo(f"{noun} not shown: --limit N shows the newest N, --limit 0 all")


def show_batch(client: BatchClient, batch_id: str, *, as_json: bool) -> bool:
    """Print one batch in full. Returns whether it is done."""
    batch = client.status(batch_id)
    facts = facts_of(client, batch)
    if as_json:
        print_json(facts.as_fields(batch))
        return batch.is_done
    rate, passing = facts.tokens_per_second, facts.passed_by
    soon = "" if facts.seconds_left is None else duration(facts.seconds_left)
    print_fields(
        [
            ("batch", batch.batch_id),
            ("name", batch.name),
            ("state", state_of(batch) + _why_not_queued(batch)),
            ("done", share_done(batch) + (f", about {soon} left" if soon else "")),
            ("model", batch.model),
            ("queue", batch.queue),
            ("created", moment(batch.created)),
            ("rows", batch.total),
            ("ok", batch.ok),
            ("failed", batch.failed),
            ("canceled", batch.canceled),
            ("held", batch.running),
            ("queued", batch.queued),
            ("sum", batch.whole_sum()),
            ("computed with", batch.maker.words() or None),
            ("generation", f"{batch.generation} of {batch.base}" if batch.base else None),
            ("priority", batch.priority),
            ("expires", moment(batch.expires) if batch.expires else None),
            ("copied", f"{batch.copied:,} rows were duplicates" if batch.is_deduped else None),
            ("reused", rows(batch.reused) if batch.is_reusing else None),
            ("kept", _kept(batch)),
            ("prompt tokens", _prompt_tokens(batch)),
            ("generated", f"{batch.completion_tokens:,} tokens"),
            ("speed", None if rate is None else f"{rate:,.0f} tok/s{_of_which_time(batch)}"),
            ("served by", _serving(batch, facts)),
            ("passed by", [f"{name} ({why})" for name, why in passing.items()] or None),
            ("waits for", facts.waits_for),
            ("set apart", _apart(facts.num_apart)),
        ]
    )
    return batch.is_done


def _of_which_time(batch: BatchStatus) -> str:
    """What its speed is the mean of."""
    so_far = "" if batch.is_done else " so far"
    return f"{so_far}, {'pauses included' if counts_pauses(batch) else 'while rows were computed'}"


def show_job(client: BatchClient, job_id: str, *, as_json: bool) -> bool:
    """Print one job. Returns whether it has ended."""
    job = client.job(job_id)
    if as_json:
        print_json(job)
    else:
        fields = asdict(job)
        error = printable(fields.pop("error")) or None
        reused = "yes" if fields.pop("reused") else None
        fields["num_deaths"] = fields["num_deaths"] or None
        if job.status == "running":
            fields["status"] = "held"
        print_fields([*fields.items(), ("reused", reused), ("error", error)])
    return job.status not in ("queued", "running")


def show_workers(found: Sequence[WorkerInfo]) -> None:
    """Print two lines for each worker: its work now, and its model and versions."""
    if not found:
        click.echo("no workers: `batchkv worker -m MODEL` starts one on this machine")
        return
    columns = [
        Column("WORKER", [w.name for w in found], shorten_names, min_width=16),
        Column("STATE", [w.shown_state for w in found], shorten_names, min_width=21),
        Column("ROWS", [w.num_running for w in found]),
        Column("TOK/S", [w.tokens_per_second for w in found]),
        Column("MEMORY", [_size(w.memory_bytes) for w in found], if_any=True),
        Column("SEEN", [f"{w.silent_seconds:.0f}s ago" for w in found], drop=1),
        Column("MODEL", [w.model or ", ".join(w.models or w.queues) for w in found], shorten_models,
               min_width=10),
    ]  # fmt: skip
    title, *lines = table_lines(columns)
    click.echo(title)
    for line, worker in zip(lines, found, strict=True):
        click.echo(line)
        click.echo(f"  {_about(worker, width() - 2)}")


def _about(worker: WorkerInfo, limit: int) -> str:
    """A worker's scheme, version, counts and process, as many of them as fit."""
    parts = [
        Maker(worker.fingerprint, worker.scheme).words(),
        f"adapters {', '.join(worker.adapters)}" if worker.adapters else "",
        f"holds {', '.join(f'{m} in {w}' for m, w in worker.held)}" if worker.held else "",
        f"batchkv {worker.version}" if worker.version else "",
    ]
    if not worker.is_host:
        parts += [f"{worker.num_successful:,} ok, {worker.num_failed:,} failed"]
    parts += [f"pid {worker.pid} on {worker.hostname}"]
    text = ""
    for part in filter(None, parts):
        longer = f"{text}, {printable(part)}" if text else printable(part)
        if len(longer) > limit and limit - len(text) < MIN_PART_CHARS:
            break
        text = longer
    return text if len(text) <= limit else text[: limit - len(CUT)] + CUT


def _size(num_bytes: int | None) -> str:
    return size_text(num_bytes) if num_bytes else ""


def _deadline(batch: BatchStatus) -> str:
    """When rows that have not started expire; nothing once all have ended."""
    return _short_moment(batch.expires) if batch.expires and not batch.is_done else ""


def _left(batch: BatchStatus, left: Left) -> str:
    return duration(left[batch.batch_id]) if batch.batch_id in left else ""


def _serving(batch: BatchStatus, facts: BatchFacts) -> list[str] | str | None:
    """The workers that may compute its rows now, if there are rows to compute."""
    if batch.is_done:
        return None
    return list(facts.serving) or ("none" if facts.passed_by else _nobody(batch))


def _apart(count: int) -> str | None:
    if not count:
        return None
    return f"{rows(count)} of its queue: a worker died with {'it' if count == 1 else 'them'}"


def _nobody(batch: BatchStatus) -> str:
    if not batch.is_untouched:
        return f"none: `{batch.worker_command}` computes the rest"
    return (
        f"none, and none has ever taken a row of this batch: `{batch.worker_command}` "
        f"serves it, `batchkv forget {batch.batch_id}` deletes it"
    )


def _kept(batch: BatchStatus) -> str | None:
    """How long the results stay, or None if they stay for ever."""
    if batch.kept_until:
        return f"until {moment(batch.kept_until)}"
    return f"{duration(batch.keep_seconds)} after the end" if batch.keep_seconds else None


def _prompt_tokens(batch: BatchStatus) -> str:
    """The number of prompt tokens, of cached ones, and the time that these saved."""
    saved = f", which saved {batch.saved_ms / 1000:,.1f} s" if batch.saved_ms else ""
    return f"{batch.prompt_tokens:,} ({batch.cached_tokens:,} cached{saved})"


def _why_not_queued(batch: BatchStatus) -> str:
    """Where the reasons stand, for a batch of OpenAI's API whose file is wrong."""
    if not _is_not_queued(batch):
        return ""
    return f": if its file is wrong, `batchkv wait {batch.batch_id}` says why"


def _is_not_queued(batch: BatchStatus) -> bool:
    """Whether a batch of OpenAI's API has ended before any row of it was queued."""
    return batch.is_done and not batch.total and is_openai_id(batch.batch_id)


def state_of(batch: BatchStatus) -> str:
    """The state of a batch, in a word or two."""
    if batch.is_forgotten:
        return "being forgotten"
    if batch.is_done:
        return "not queued" if _is_not_queued(batch) else "done"
    if not batch.is_submitted:
        return "being submitted"
    return "running" if batch.running else "waiting"


def moment(seconds: float) -> str:
    """Seconds since 1970 as local date and time."""
    return _timed("%Y-%m-%d %H:%M:%S", seconds)


def _short_moment(seconds: float) -> str:
    return _timed("%m-%d %H:%M", seconds)


def _timed(pattern: str, seconds: float) -> str:
    try:
        return time.strftime(pattern, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"

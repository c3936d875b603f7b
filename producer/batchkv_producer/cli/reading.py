"""The commands that tell how things stand: status, wait, list, workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import click

from batchkv_producer.cli.outcome import say_canceled, say_failures
from batchkv_producer.cli.shared import (
    json_option,
    print_fields,
    print_json,
    print_table,
    say,
    session,
    url_option,
)
from batchkv_producer.cli.terms_options import exit_code, on_done_option
from batchkv_producer.client import BatchStatus, Client, StoredRow
from batchkv_producer.delays import Delays
from batchkv_producer.following import snapshot_of
from batchkv_producer.job import Result
from batchkv_producer.progress import duration, reporter
from batchkv_producer.room import Room, read_room

MAX_BAD_ROWS_SKIPPED = 200  # to find the first row that was really run


@click.command()
@click.argument("target", metavar="[ID]", required=False)
@url_option
@json_option
def status(target: str | None, url: str | None, as_json: bool) -> None:
    """Tell how everything stands, or one batch, or one job.

    \b
    Examples:
      batchkv status
      batchkv status 3f2a9c51d07be684
      batchkv status 3f2a9c51d07be684-17
      batchkv status 3f2a9c51d07be684 --json | jq .ok
    """
    with session(url) as opened:
        if target is None:
            _print_overview(opened.client, read_room(opened.connection), as_json)
        elif "-" in target:
            _print_job(opened.client, target, as_json)
        else:
            _print_batch(opened.client, target, as_json)


@click.command(name="list")
@url_option
@json_option
def list_batches(url: str | None, as_json: bool) -> None:
    """List all batches, the newest first.

    \b
    Examples:
      batchkv list
      batchkv list --json | jq -r '.[] | select(.is_done) | .batch_id'
    """
    with session(url) as opened:
        batches = opened.client.list_batches()
        if as_json:
            print_json([_batch_fields(batch) for batch in batches])
            return
        rows = [(b.batch_id, _moment(b.created), b.total, _state(b), b.priority,
                 _moment(b.expires) if b.expires else "", b.model, b.name)
                for b in batches]  # fmt: skip
        titles = ("BATCH", "CREATED", "ROWS", "STATE", "PRIORITY", "EXPIRES", "MODEL", "NAME")
        print_table(titles, rows)


@click.command()
@url_option
@json_option
def workers(url: str | None, as_json: bool) -> None:
    """List the workers that are alive, on all machines.

    \b
    Examples:
      batchkv workers
      batchkv workers --json
    """
    with session(url) as opened:
        found = opened.client.workers()
        if as_json:
            print_json(found)
        else:
            _print_workers(found)


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait no longer.")
@on_done_option
@url_option
@json_option
@click.pass_context
def wait(
    ctx: click.Context,
    batch_id: str,
    timeout: float | None,
    on_done: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Wait until a batch is done. Exit code 1 if some row failed, 6 if the time is over.

    With --on-done the exit code is 5 if that command failed; it is not run when the time is over.

    \b
    Examples:
      batchkv wait 3f2a9c51d07be684
      batchkv wait 3f2a9c51d07be684 --timeout 3600 && echo done
      batchkv wait 3f2a9c51d07be684 --on-done 'say "$BATCHKV_OK of $BATCHKV_TOTAL"'
    """
    with session(url) as opened:
        with reporter() as progress:
            delays = Delays(
                opened.client.serving, progress.note, count_apart=opened.client.count_apart
            )

            def look(now: BatchStatus) -> None:
                progress.update(snapshot_of(now, delays.look(now)))

            last = opened.client.wait(batch_id, timeout_seconds=timeout, on_progress=look)
        failures = opened.client.failures(last)
        say_failures(failures, last.failed)
        if as_json:
            print_json({**_batch_fields(last), "failures": failures})
        else:
            click.echo(last.reconciliation())
    if not last.is_done:
        say(f"batch {last.batch_id} is not done yet")
    say_canceled(last)
    ctx.exit(exit_code(last, on_done))


def _print_overview(client: Client, room: Room | None, as_json: bool) -> None:
    batches = client.list_batches()
    found = client.workers()
    if as_json:
        shown = {"batches": [_batch_fields(b) for b in batches], "workers": found}
        print_json({**shown, "server": room})
        return
    rows = [
        (b.batch_id, b.total, b.ok, b.failed, b.canceled, b.running, b.queued, b.num_workers,
         b.model, b.queue)
        for b in batches
    ]  # fmt: skip
    titles = ("BATCH", "ROWS", "OK", "FAILED", "CANCELED", "RUNNING", "QUEUED", "WORKERS", "MODEL",
              "QUEUE")  # fmt: skip
    print_table(titles, rows)
    click.echo("")
    _print_workers(found)
    if room is not None:
        click.echo(f"\nserver's memory: {room}")


def _print_batch(client: Client, batch_id: str, as_json: bool) -> None:
    batch = client.status(batch_id)
    rate = tokens_per_second(client, batch)
    serving = [worker.name for worker in client.workers() if batch.queue in worker.queues]
    if as_json:
        print_json({**_batch_fields(batch), "tokens_per_second": rate, "workers": serving})
        return
    print_fields(
        [
            ("batch", batch.batch_id),
            ("name", batch.name),
            ("state", _state(batch)),
            ("model", batch.model),
            ("queue", batch.queue),
            ("created", _moment(batch.created)),
            ("rows", batch.total),
            ("ok", batch.ok),
            ("failed", batch.failed),
            ("canceled", batch.canceled),
            ("running", batch.running),
            ("queued", batch.queued),
            ("sum", batch.whole_sum()),
            ("priority", batch.priority),
            ("expires", _moment(batch.expires) if batch.expires else None),
            ("copied", f"{batch.copied:,} rows asked for the same" if batch.is_deduped else None),
            ("kept", _kept(batch)),
            ("prompt tokens", _prompt_tokens(batch)),
            ("generated", f"{batch.completion_tokens:,} tokens"),
            ("speed", None if rate is None else f"{rate:,.0f} tok/s so far"),
            ("workers", serving or _nobody(batch)),
        ]
    )


def _nobody(batch: BatchStatus) -> str:
    if not batch.is_untouched:
        return "none"
    return (
        f"none, and none has ever taken a row of this batch: `batchkv worker -m {batch.model}` "
        f"serves it, `batchkv forget {batch.batch_id}` takes it back"
    )


def _kept(batch: BatchStatus) -> str | None:
    """How long the results stay, where that has an end."""
    if batch.kept_until:
        return f"until {_moment(batch.kept_until)}"
    return f"{duration(batch.keep_seconds)} after the end" if batch.keep_seconds else None


def _prompt_tokens(batch: BatchStatus) -> str:
    """How many, how many of them were cached, and what that saved."""
    saved = f", which saved {batch.saved_ms / 1000:,.1f} s" if batch.saved_ms else ""
    return f"{batch.prompt_tokens:,} ({batch.cached_tokens:,} cached{saved})"


def _print_job(client: Client, job_id: str, as_json: bool) -> None:
    job = client.job(job_id)
    if as_json:
        print_json(job)
    else:
        print_fields(list(asdict(job).items()))


def _print_workers(found: Iterable[Any]) -> None:
    rows = [
        (w.name, w.hostname, str(w.pid), w.shown_state, w.num_running, w.num_successful,
         w.num_failed, f"{w.silent_seconds:.0f} s ago", w.queues)
        for w in found
    ]  # fmt: skip
    titles = ("WORKER", "HOST", "PID", "STATE", "RUNNING", "OK", "FAILED", "SEEN", "QUEUES")
    print_table(titles, rows)


def _batch_fields(batch: BatchStatus) -> dict[str, Any]:
    return {
        **asdict(batch),
        "queued": batch.queued,
        "num_ended": batch.num_ended,
        "is_done": batch.is_done,
        "is_reconciled": batch.num_results == batch.num_ended,
    }


def _state(batch: BatchStatus) -> str:
    if batch.is_forgotten:
        return "being forgotten"
    if batch.is_done:
        return "done"
    if not batch.is_submitted:
        return "being submitted"
    return "running" if batch.running else "waiting"


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def tokens_per_second(client: Client, batch: BatchStatus) -> float | None:
    """Generated tokens a second from the first row's start to the last row's end (or to now).

    None when nothing was generated yet.
    """
    if not batch.completion_tokens:
        return None
    first = next(_rows_run(client.results(batch.batch_id)), None)
    if first is None:
        return None
    start = first.created - first.busy_ms / 1000
    end = _last_end(client, batch) if batch.is_done else time.time()
    return batch.completion_tokens / max(end - start, first.busy_ms / 1000, 0.001)


def _rows_run(rows: Iterator[StoredRow]) -> Iterator[Result]:
    for row in itertools.islice(rows, MAX_BAD_ROWS_SKIPPED):
        if row.result.busy_ms:
            yield row.result


def _last_end(client: Client, batch: BatchStatus) -> float:
    ends: Callable[[StoredRow], float] = lambda row: row.result.created  # noqa: E731
    after = max(0, batch.num_ended - 1)
    return max(map(ends, client.results(batch.batch_id, after=after)), default=time.time())

"""``batchkv results`` and ``batchkv result``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import click

from batchkv_producer.cli.shared import (
    Session,
    delays_of,
    json_option,
    out_option,
    say,
    session,
    url_option,
)
from batchkv_producer.client import StoredRow
from batchkv_producer.errors import UsageError
from batchkv_producer.local.follow import Follower, snapshot_of, stale_rows
from batchkv_producer.local.run import TURN_SECONDS
from batchkv_producer.progress import printable, reporter
from batchkv_producer.progress import rows as rows_text
from batchkv_producer.results import outfile, output
from batchkv_producer.retry import read_with_retry
from batchkv_producer.wire.job import Result

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["openai", "text"]),
    default="openai",
    show_default=True,
    help="openai: lines of an OpenAI Batch output file; text: the answers alone, one a line.",
)


@click.command()
@click.argument("batch_id", metavar="BATCH")
@out_option(
    "FILE",
    "Append to FILE and FILE.errors.jsonl what they lack, as `batchkv run` does; without it all "
    "rows go to standard output.",
)
@click.option("--follow", is_flag=True, help="Go on, in the order in which rows end, to the end.")
@click.option(
    "--ordered", is_flag=True, help="In the order of the input (both files are written anew)."
)
@click.option("--errors", "only_errors", is_flag=True, help="Only rows that have no answer.")
@format_option
@url_option
@json_option
def results(
    batch_id: str,
    out: Path | None,
    follow: bool,
    ordered: bool,
    only_errors: bool,
    form: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Print or save the results of a batch: those there are now, or all with --follow.

    FILE gets the answers, FILE.errors.jsonl the rows without one. Each row is in one of the two.

    \b
    Examples:
      batchkv results 3f2a9c51d07be684 -o out.jsonl
      batchkv results 3f2a9c51d07be684 --ordered --format text
      batchkv results 3f2a9c51d07be684 --errors --format text
      batchkv results 3f2a9c51d07be684 --follow | jq -r .response.body.choices[0].message.content
    """  # fmt: skip
    if follow and ordered:
        raise UsageError("--follow gives rows as they end, --ordered as they stood: choose one")
    is_printed = out is None or str(out) == "-"
    if only_errors and not is_printed:
        raise UsageError("--errors is for standard output: FILE.errors.jsonl has these rows anyway")
    _check_format(form, as_json)
    with session(url) as opened:
        batch_id = opened.client.status(batch_id).batch_id
        order: Literal["finish", "input"] = "input" if ordered else "finish"
        if out is None or is_printed:
            rows = opened.client.results(batch_id, order=order, follow=follow)
            shown = (row for row in rows if not (only_errors and row.result.outcome == "ok"))
            _print_rows(shown, form, is_flushed=follow)
        elif form == "openai" and order == "finish":
            _append(opened, batch_id, out, follow=follow)
        else:
            rows = opened.client.results(batch_id, order=order, follow=follow)
            if form == "text":
                _write_text(out, rows)
            else:
                _write_in_order(out, batch_id, rows)


@click.command()
@click.argument("job_id", metavar="JOB_ID")
@click.option(
    "--wait",
    "wait_seconds",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Wait so long for it.",
)
@format_option
@url_option
@json_option
@click.pass_context
def result(
    ctx: click.Context,
    job_id: str,
    wait_seconds: float,
    form: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Print the result of one job. Exit code 1 if it failed, or has none yet.

    \b
    Examples:
      batchkv result 3f2a9c51d07be684-17
      batchkv result 3f2a9c51d07be684-17 --wait 60 --format text
    """  # fmt: skip
    _check_format(form, as_json)
    with session(url) as opened:
        found = opened.client.result(job_id, wait_seconds=wait_seconds)
        if found is None:
            say(f"no result yet: job {job_id} is {opened.client.job(job_id).status}")
            ctx.exit(1)
        _write_line(_formatted(job_id, found, form))
    ctx.exit(0 if found.outcome == "ok" else 1)


def _check_format(form: str, as_json: bool) -> None:
    if as_json and form == "text":
        raise UsageError("--json and --format text exclude each other")


# ---- results ----


def _formatted(job_id: str, found: Result, form: str) -> str:
    return output.text_line(found) if form == "text" else output.output_line(job_id, found)


def _print_rows(rows: Iterable[StoredRow], form: str, *, is_flushed: bool) -> None:
    for row in rows:
        _write_line(_formatted(row.job_id, row.result, form))
        if is_flushed:
            sys.stdout.buffer.flush()


def _write_line(line: str) -> None:
    """To standard output, always as UTF-8; a terminal gets no control characters."""
    stream = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    stream.write(outfile.encoded(printable(line) if is_terminal else line))


def _append(opened: Session, batch_id: str, out: Path, *, follow: bool) -> None:
    outfile.check_target(out)
    stale = stale_rows(opened.connection, batch_id)
    with outfile.open_results(out, batch_id, stale) as target, reporter() as progress:
        follower = Follower(opened.client, batch_id, target)
        delays = delays_of(opened, progress.note)
        while True:
            now = read_with_retry(partial(opened.client.status, batch_id))
            progress.update(snapshot_of(now, delays.look(now) if follow else ""))
            num_new = read_with_retry(follower.collect)
            if now.is_done or not follow:
                break
            time.sleep(TURN_SECONDS if num_new == 0 else 0)
        follower.refresh(stale)
    missing = now.total - target.num_rows
    later = f"; {missing:,} have not ended yet" if missing else ""
    say(f"{target.num_rows:,} of {rows_text(now.total)}: {_places(target)}{later}")


def _write_in_order(out: Path, batch_id: str, rows: Iterator[StoredRow]) -> None:
    outfile.check_target(out)
    with outfile.open_results(out, batch_id) as target:
        target.replace(
            (row.line, output.output_line(row.job_id, row.result), row.result.outcome != "ok")
            for row in rows
        )
    say(f"{rows_text(target.num_rows)}: {_places(target)}")


def _write_text(out: Path, rows: Iterator[StoredRow]) -> None:
    """A file of texts, which has no ids to go on from."""
    outfile.check_target(out)
    num_rows = outfile.write_new(
        out, (outfile.encoded(output.text_line(row.result)) for row in rows)
    )
    say(f"{rows_text(num_rows)} in {out}")


def _places(target: outfile.ResultsFile) -> str:
    """How many rows are where."""
    failed = f", {target.num_failed:,} in {outfile.errors_path(target.path)}"
    return f"{target.num_ok:,} in {target.path}{failed if target.num_failed else ''}"

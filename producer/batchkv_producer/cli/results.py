"""``batchkv results`` and ``batchkv result``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import click

from batchkv_producer.cli.outage import outages_told
from batchkv_producer.cli.shared import (
    Opened,
    delays_of,
    either,
    json_option,
    out_option,
    print_json,
    say,
    url_option,
)
from batchkv_producer.client import BatchStatus, StoredRow
from batchkv_producer.errors import UsageError
from batchkv_producer.local.follow import Follower, snapshot_of, stale_rows
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
    help="openai: lines of an OpenAI Batch output file. text: the answers alone, one a line; rows "
    "without an answer go to standard error, with their custom_id.",
)
results_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON array of the rows, not lines of JSON; with -o, print how many rows are in "
    "which file.",
)


@click.command()
@click.argument("batch_id", metavar="BATCH")
@out_option(
    "FILE",
    "Append to FILE and FILE.errors.jsonl what they lack, as `batchkv run` does; without it all "
    "rows go to standard output.",
)
@click.option("--follow", is_flag=True, help="Go on until the batch is done, as rows end.")
@click.option(
    "--ordered", is_flag=True, help="In the order of the input (both files are written anew)."
)
@click.option("--errors", "only_errors", is_flag=True, help="Print only rows without an answer.")
@format_option
@url_option
@results_json_option
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
    """Print or save the results of a batch.

    Without --follow these are the results that are there now. FILE gets the answers,
    FILE.errors.jsonl the rows without one. Each row is in one of the two.

    \b
    Examples:
      batchkv results 3f2a9c51d07be684 -o out.jsonl
      batchkv results 3f2a9c51d07be684 --ordered --format text
      batchkv results 3f2a9c51d07be684 --errors --format text
      batchkv results 3f2a9c51d07be684 --follow | jq -r .response.body.choices[0]
    """  # fmt: skip
    if follow and ordered:
        raise UsageError(
            "--follow prints rows as they end, --ordered in the order of the input: choose one"
        )
    is_printed = out is None or str(out) == "-"
    if only_errors and not is_printed:
        raise UsageError("--errors is for standard output: FILE.errors.jsonl has these rows anyway")
    _check_format(form, as_json)
    with either(url) as opened, outages_told(say):
        status = opened.client.status(batch_id)
        batch_id = status.batch_id
        order: Literal["finish", "input"] = "input" if ordered else "finish"
        if out is None or is_printed:
            printed = _Printed(_rows_of(opened, batch_id, order, follow=follow))
            if as_json:
                print_json(json.loads(line) for line in printed.lines("openai", only_errors))
            else:
                _print_lines(printed.lines(form, only_errors), is_flushed=follow)
            printed.say_what_lacks(status.total, only_errors=only_errors)
        elif form == "text":
            rows = _rows_of(opened, batch_id, order, follow=follow)
            _write_text(out, rows, status.total)
        elif ordered:
            rows = opened.client.results(batch_id, order=order)
            _say_places(_write_in_order(out, batch_id, rows), status, as_json=as_json)
        else:
            _say_places(*_append(opened, batch_id, out, follow=follow), as_json=as_json)


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
    with either(url) as opened:
        found = opened.client.result(job_id, wait_seconds=wait_seconds)
        if found is None:
            say(f"no result yet: job {job_id} is {opened.client.job(job_id).status}")
            ctx.exit(1)
        if form == "text" and found.outcome != "ok":
            say(output.failed_text_line(found))
        else:
            _write_line(_formatted(job_id, found, form))
    ctx.exit(0 if found.outcome == "ok" else 1)


def _check_format(form: str, as_json: bool) -> None:
    if as_json and form == "text":
        raise UsageError("--json and --format text exclude each other")


# ---- results ----


def _formatted(job_id: str, found: Result, form: str) -> str:
    return output.text_line(found) if form == "text" else output.output_line(job_id, found)


def _rows_of(
    opened: Opened, batch_id: str, order: Literal["finish", "input"], *, follow: bool
) -> Iterator[StoredRow]:
    """Each row once; those that are followed as they end.

    Standard error says what helps if these wait for a worker. A gateway sends them as one answer,
    beside which nothing is asked: it is said at the start alone.
    """
    if not follow:
        return opened.client.results(batch_id, order=order)
    delays = delays_of(opened, say)
    if opened.session is not None:
        return opened.session.client.results(batch_id, follow=True, on_status=delays.look)
    delays.look(opened.client.status(batch_id))
    return opened.client.results(batch_id, follow=True)


class _Printed:
    """The rows that go to standard output, and their numbers."""

    def __init__(self, rows: Iterable[StoredRow]) -> None:
        self._rows = rows
        self._num_ended = self._num_failed = 0

    def lines(self, form: str, only_errors: bool) -> Iterator[str]:
        """The lines for standard output. In text form, failed rows go to standard error, unless
        only they are wanted."""
        for row in self._rows:
            is_failed = row.result.outcome != "ok"
            self._num_ended += 1
            self._num_failed += is_failed
            if form == "text" and is_failed:
                line = output.failed_text_line(row.result)
                if only_errors:
                    yield line
                else:
                    say(line)
            elif is_failed or not only_errors:
                yield _formatted(row.job_id, row.result, form)

    def say_what_lacks(self, total: int, *, only_errors: bool) -> None:
        """Say that rows have not ended, or that no row failed: else no output looks like none."""
        if self._num_ended < total:
            verb = "has" if total == 1 else "have"
            say(f"{self._num_ended:,} of {rows_text(total)} {verb} ended")
        if only_errors and self._num_ended and not self._num_failed:
            say("all rows that have ended have an answer")


def _print_lines(lines: Iterable[str], *, is_flushed: bool) -> None:
    for line in lines:
        _write_line(line)
        if is_flushed:
            sys.stdout.buffer.flush()


def _write_line(line: str) -> None:
    """To standard output, always as UTF-8; a terminal gets no control characters."""
    stream = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    stream.write(outfile.encoded(printable(line) if is_terminal else line))


def _append(
    opened: Opened, batch_id: str, out: Path, *, follow: bool
) -> tuple[outfile.ResultsFile, BatchStatus]:
    outfile.check_target(out)
    stale = stale_rows(opened.client, batch_id)
    with outfile.open_results(out, batch_id, stale) as target, reporter() as progress:
        follower = Follower(opened.client, batch_id, target)
        delays = delays_of(opened, progress.note)
        while True:
            with outages_told(progress.note):
                now = read_with_retry(partial(opened.client.status, batch_id))
                progress.update(snapshot_of(now, delays.look(now) if follow else ""))
                num_new = read_with_retry(follower.collect)
            if now.is_done or not follow:
                break
            time.sleep(opened.client.poll_seconds if num_new == 0 else 0)
        follower.refresh(stale)
    return target, now


def _write_in_order(out: Path, batch_id: str, rows: Iterator[StoredRow]) -> outfile.ResultsFile:
    outfile.check_target(out)
    with outfile.open_results(out, batch_id) as target:
        target.replace(
            (row.line, output.output_line(row.job_id, row.result), row.result.outcome != "ok")
            for row in rows
        )
    return target


def _write_text(out: Path, rows: Iterator[StoredRow], total: int) -> None:
    """Write a new file of answers alone. It has no ids, so it cannot be appended to later."""
    outfile.check_target(out)
    printed = _Printed(rows)
    num_rows = outfile.write_new(
        out, (outfile.encoded(line) for line in printed.lines("text", only_errors=False))
    )
    say(f"{rows_text(num_rows)} in {out}")
    printed.say_what_lacks(total, only_errors=False)


def _say_places(target: outfile.ResultsFile, status: BatchStatus, *, as_json: bool) -> None:
    """Say how many rows are in which file, on standard error or as JSON on standard output."""
    errors, missing = outfile.errors_path(target.path), status.total - target.num_rows
    if as_json:
        print_json(
            {
                "batch_id": status.batch_id,
                "total": status.total,
                "not_ended": missing,
                "out": {"path": target.path, "rows": target.num_ok},
                "errors": {"path": errors, "rows": target.num_failed},
            }
        )
        return
    failed = f", {target.num_failed:,} in {errors}" if target.num_failed else ""
    verb = "has" if missing == 1 else "have"
    later = f"; {missing:,} {verb} not ended yet" if missing else ""
    say(
        f"{target.num_rows:,} of {rows_text(status.total)}: {target.num_ok:,} in {target.path}"
        f"{failed}{later}"
    )

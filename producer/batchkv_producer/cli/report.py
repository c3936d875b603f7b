"""The command that writes the report of a batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from batchkv_producer.batch_facts import batch_fields
from batchkv_producer.cli.input_options import Given, from_file_option, read_as_option
from batchkv_producer.cli.shared import (
    Opened,
    either,
    is_by_gateway,
    json_option,
    print_json,
    say,
    url_option,
)
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.source import ReadAs
from batchkv_producer.report.document import document
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.reading import read_facts
from batchkv_producer.report.texts import Excerpts, section, stored_requests
from batchkv_producer.submit.restore import requests_of

STDOUT = Path("-")
PROGRESS_SECONDS = 5.0


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    metavar="FILE",
    help="The file for the report; - prints it.  [default: BATCH.report.html]",
)
@click.option(
    "--with-text",
    is_flag=True,
    help="Show the answers and errors of the first 200 rows, and the prompts that the server has.",
)
@from_file_option(
    "With --with-text: the file that was submitted. It has the prompts of rows that are ok."
)
@read_as_option("Only with --from: read every line as JSON, or as a prompt.")
@url_option
@json_option
def report(
    batch_id: str,
    out: Path | None,
    with_text: bool,
    files: tuple[Path, ...],
    read_as: ReadAs | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Write what happened to a batch into one HTML file.

    It has the sums, failures by code, each worker's part, tokens over time, the times of rows, the
    cached share by tier, and the settings. The file opens without a network, and has no script. It
    has no prompts and no answers, except with --with-text. A batch under way is shown as it is now.

    The report is made of the results on the server, so make it before `batchkv forget`.

    \b
    Examples:
      batchkv report 3f2a9c51d07be684
      batchkv report 3f2a9c51d07be684 -o monday.html
      batchkv report 3f2a9c51d07be684 --with-text --from prompts.jsonl
      batchkv report 3f2a9c51d07be684 --json | jq .workers
    """
    if (files or read_as) and not with_text:
        raise UsageError("--from and --as are for report --with-text only")
    if as_json and (out or with_text):
        raise UsageError("--json prints only the facts: leave out -o and --with-text")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}")
    if read_as and not files:
        raise UsageError("--as is for report --from FILE only")
    if with_text and is_by_gateway(url):
        raise UsageError("--with-text needs the Redis URL: a gateway's page shows rows and answers")
    with ExitStack() as stack:
        source = stack.enter_context(Given(files, read_as).opened()) if files else None
        opened = stack.enter_context(either(url))
        excerpts, texts = Excerpts(), ""
        facts = _read(opened, batch_id, excerpts if with_text else None)
        if as_json:
            print_json({**asdict(facts), "status": batch_fields(facts.status)})
            return
        if opened.session is not None and with_text:
            connection, lines = opened.session.connection, excerpts.lines
            requests = stored_requests(connection, facts.status.batch_id, lines)
            if source is not None:
                requests |= requests_of(connection, facts.status, source, set(lines))
            texts = section(excerpts, requests)
    _write(document(facts, _own_version(), texts), out, facts)


def _read(opened: Opened, batch_id: str, excerpts: Excerpts | None) -> Facts:
    """The facts of a batch. Rows past its deadline are ended first, as by ``status``."""
    if opened.remote is not None:
        return opened.remote.facts(batch_id)
    assert opened.session is not None
    connection, full_id = opened.session.connection, opened.client.status(batch_id).batch_id
    if excerpts is None:
        return read_facts(connection, full_id, on_progress=_progress())
    return read_facts(connection, full_id, on_row=excerpts.add, on_progress=_progress())


def _progress() -> Callable[[int, int], None]:
    """Prints how far reading is, every few seconds."""
    said_at = time.monotonic()

    def look(num_read: int, num_all: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PROGRESS_SECONDS:
            said_at = time.monotonic()
            say(f"read {num_read:,} of {num_all:,} rows")

    return look


def _write(text: str, out: Path | None, facts: Facts) -> None:
    """Print the report, or write the file at once: nobody sees half of it."""
    data = text.encode("utf-8")
    if out == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    path = out or Path(f"{facts.status.batch_id}.report.html")
    part = path.with_name(f".{path.name}.tmp")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as fault:
        with suppress(OSError):
            part.unlink()
        raise OSError(fault.errno, fault.strerror, str(path)) from fault
    open_rows = facts.status.total - facts.status.num_ended
    note = f": the batch is under way, {open_rows:,} rows are open" if open_rows else ""
    say(f"wrote {path}{note}")


def _own_version() -> str:
    try:
        return version("batchkv")
    except PackageNotFoundError:
        return ""

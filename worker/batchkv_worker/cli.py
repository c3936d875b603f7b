"""The worker's commands: ``batchkv worker``, which is the worker of ``rq worker -w
batchkv_worker.BatchWorker`` with flags, ``batchkv kv-report`` and ``batchkv bench``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchkv_cache_store.opening import parse_tiers, queue_conflict
from batchkv_producer.errors import BatchkvError
from batchkv_producer.server import connection
from batchkv_producer.settings_table import DTYPES, TABLE
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.tune.options import one_model_option

if TYPE_CHECKING:
    from batchkv_worker.queue.models.start import Asked

EPILOG = """\b
Examples:
  batchkv worker -m demo                          serve the embedded server
  batchkv worker -m MODEL --url redis://studio.local:6379
  batchkv worker -m MODEL --adapter support=adapters/support
  batchkv worker -m MODEL -m OTHER                whichever has rows
  batchkv worker -m demo --burst                  end when the queue is empty

\b
Each of these settings also has a variable, like BATCHKV_SLOTS for --slots.
Exit codes: 0 done or stopped, 2 wrong configuration, 3 error of Redis,
70 the engine died, 71 it hung, 72 the model's files have changed since they
were loaded: start it again, 74 the GPU failed twice within a minute, or at
start: start it again.
"""


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each setting of the table that has a name; values are keyword arguments."""
    for setting in reversed(TABLE):
        if setting.name:
            is_model = setting.name == "model"
            flags = ("-m", setting.flag) if is_model else (setting.flag,)
            kind = setting.option() | ({"multiple": True} if is_model else {})
            option = click.option(*flags, setting.name, help=setting.flag_help(), **kind)
            command = option(command)
    return command


@click.command("worker", epilog=EPILOG)
@settings_options
@click.option("--url", help="Redis URL. Default: BATCHKV_REDIS_URL, else the embedded server.")
@click.option("--name", help="Name shown by RQ's tools. Default: host and a random suffix.")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--max-jobs", type=click.IntRange(min=1), help="End after this many jobs.")
@click.option("--max-idle-time", type=click.IntRange(min=1),
              help="End after this many seconds without a job.")  # fmt: skip
@click.option("--exit-with-parent", is_flag=True, help="End when standard input ends.")
@click.option("-q", "--quiet", is_flag=True, help="Log only warnings.")
@click.option("-v", "--verbose", is_flag=True, help="Log RQ's debug messages, too.")
def worker_command(
    url: str | None,
    name: str | None,
    burst: bool,
    max_jobs: int | None,
    max_idle_time: int | None,
    exit_with_parent: bool,
    quiet: bool,
    verbose: bool,
    model: tuple[str, ...],
    **flags: Any,
) -> None:
    """Serve the queue of one model on this machine.

    With --adapter it also serves the queue of each adapter, one at a time.

    With several -m it holds as many of the models as fit into memory together. It ends the rows of
    a model before it changes to another one whose rows wait. Nothing but these models is loaded.
    """
    # Imported here, because RQ takes a tenth of a second, and other commands do not need it.
    from batchkv_worker.queue.rq_worker import BatchWorker
    from batchkv_worker.queue.startup import default_name, exit_with

    try:
        first = model[0] if model else None
        settings = WorkerSettings.from_env(os.environ, model=first, **flags)
        if len(model) <= 1 and flags["stay_seconds"] is not None:
            raise SettingsError(
                "--stay-seconds: with one model there is no change. Give several -m"
            )
        address = connection.url_in_use(url)
        check_cache(settings, address)
        if len(model) > 1:
            from batchkv_worker.queue.models.start import Asked, check_several

            names = check_several(model, settings, max_jobs)
            name = name or default_name()
            asked = Asked(names, name, address, flags, burst, max_idle_time, quiet, verbose)
            serve_several(asked, settings, exit_with_parent=exit_with_parent)
            return
        with connection.server_errors(address):
            worker = BatchWorker(
                list(settings.queues),
                name=name,
                settings=settings,
                connection=connection.connect(
                    address, warn=logging.getLogger("batchkv.worker").warning
                ),
            )
            worker.work(
                burst=burst,
                logging_level="DEBUG" if verbose else "WARNING" if quiet else "INFO",
                max_jobs=max_jobs,
                max_idle_time=max_idle_time,
                exit_with_parent=exit_with_parent,
            )
    except BatchkvError as fault:
        exit_with(fault)


def serve_several(asked: Asked, settings: WorkerSettings, *, exit_with_parent: bool) -> None:
    """Serve several models; ends with SystemExit for an exit code other than 0."""
    from batchkv_worker.queue.models.run import run_host

    with connection.server_errors(asked.url):
        if code := run_host(asked, settings, exit_with_parent=exit_with_parent):
            raise SystemExit(code)


def check_cache(settings: WorkerSettings, queue_url: str) -> None:
    """Raise SettingsError if the cache would share its database with the queue."""
    specs = parse_tiers(settings.cache) if settings.cache else ()
    if conflict := queue_conflict(specs, queue_url):
        raise SettingsError(conflict)


dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="The dtype in which the model computes.",
)
REPORT_SCHEMES = "affine8,mxfp8,k8v4,affine4,turbo4,turbo3"
REPORT_EPILOG = """\b
Examples:
  batchkv kv-report -m demo
  batchkv kv-report -m mlx-community/Qwen3-4B-4bit --schemes affine8,turbo3.5
  batchkv kv-report -m MODEL --schemes "affine4,last=float" --text a.txt

\b
The tables show k8v4 as affine8+affine4, and turbo3.5 as turbo4+turbo3.

\b
Every number is measured, against float on the same device:
  bytes        of the arrays that a row's tokens fill, for each kind of layer
  error        of the output of attention, on the model's own inputs: the mean
               and the worst layer
  perplexity   of the text with packed values, and how often float predicts
               the same token
  cost         of a decode step and of the caches' part of it, measured in
               turns with float
"""


@click.command("kv-report", epilog=REPORT_EPILOG)
@one_model_option
@click.option(
    "--schemes",
    metavar="A,B,C",
    default=REPORT_SCHEMES,
    show_default=True,
    help="KV schemes to compare with float.",
)
@click.option(
    "--text",
    "text_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="UTF-8 text to measure with.  [built in]",
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(min=32),
    default=2048,
    show_default=True,
    help="Use at most this many tokens of the text.",
)
@click.option(
    "--rows",
    metavar="N",
    type=click.IntRange(1, 4096),
    default=8,
    show_default=True,
    help="Number of rows in decode.",
)
@click.option(
    "--row-tokens",
    metavar="N",
    type=click.IntRange(min=32),
    default=1024,
    show_default=True,
    help="Tokens of each of these rows.",
)
@dtype_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kv_report_command(
    model: str,
    schemes: str,
    text_file: Path | None,
    tokens: int,
    rows: int,
    row_tokens: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure the costs and savings of KV schemes on this device."""
    from batchkv_worker.engine import open_files
    from batchkv_worker.kv.backends import blas
    from batchkv_worker.queue.startup import exit_with

    def note(text: str) -> None:
        click.echo(f"batchkv: {text}", err=True)

    try:
        names = scheme_names(schemes)
        blas.load()  # before MLX: a BLAS can only be exchanged then
        open_files.import_mlx_lm()
        from batchkv_worker.report.kv_report import Extent, report
        from batchkv_worker.report.show import show

        extent = Extent(tokens, rows, row_tokens)
        found = report(model, names, text_file, dtype, extent, note)
    except BatchkvError as fault:
        exit_with(fault)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        show(found)


def scheme_names(text: str) -> list[str]:
    """Canonical names of comma-separated schemes; ``last=float`` belongs to the one before.

    Raises SettingsError.
    """
    found: list[str] = []
    for item in text.split(","):
        if "=" in item and found:
            found[-1] += f",{item}"
        else:
            found.append(item)
    try:
        return [str(SchemeSpec.parse(name)) for name in found]
    except ValueError as fault:
        raise SettingsError(f"--schemes {text}: {fault}") from fault


BENCH_EPILOG = """\b
Examples:
  batchkv bench -m demo --quick
  batchkv bench -m mlx-community/Qwen3-4B-4bit > bench.md
  batchkv bench -m MODEL --schemes affine8,float --parts passes,decode --json

\b
The tables are Markdown, to paste into an issue. They name the chip, and no
person or host. The bound of a figure follows from this machine's bandwidth
and rate of products, which are measured first. It takes some minutes. With
--quick few rows are measured once: that shows that it works, not how fast.
"""


@click.command("bench", epilog=BENCH_EPILOG)
@one_model_option
@click.option(
    "--schemes",
    metavar="A,B,C",
    default="affine8,float,affine4",
    show_default=True,
    help="KV schemes of decode steps. Batches use the first.",
)
@click.option(
    "--parts",
    metavar="A,B,C",
    default="passes,prefill,decode,batches,product",
    show_default=True,
    help="What to measure.",
)
@click.option(
    "--slots",
    metavar="N",
    type=click.IntRange(1, 4096),
    help="Rows that decode at once. Default: as a worker chooses.",
)
@click.option(
    "--rows",
    metavar="N",
    type=click.IntRange(1, 100_000),
    help="Rows of each batch.  [default: 64; --quick: 8]",
)
@dtype_option
@click.option("--quick", is_flag=True, help="A few rows, once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_command(
    model: str,
    schemes: str,
    parts: str,
    slots: int | None,
    rows: int | None,
    dtype: str,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure how fast this machine serves a model.

    Each table also shows the bound of each figure: what the machine could do at most.
    """
    from batchkv_worker.engine import open_files
    from batchkv_worker.kv.backends import blas
    from batchkv_worker.queue.startup import exit_with

    try:
        names = tuple(dict.fromkeys(scheme_names(schemes)))
        blas.load()  # before MLX: a BLAS can only be exchanged then
        open_files.import_mlx_lm()
        from batchkv_worker.bench.extent import QUICK, Extent, parts_of
        from batchkv_worker.bench.run import Bench
        from batchkv_worker.bench.show import Tables

        extent = replace(QUICK if quick else Extent(), parts=parts_of(parts))
        if rows:
            extent = replace(extent, rows=rows, least_rows=rows)
        bench = Bench(
            *(model, names, slots, dtype, extent),
            lambda text: click.echo(f"batchkv: {text}", err=True),
        )
        found, tables = bench.report, Tables(click.echo)
        if not as_json:
            tables.begin(found)
        for figure in bench.figures():
            found = found.with_figure(figure)
            if not as_json:
                tables.add(figure)
    except BatchkvError as fault:
        exit_with(fault)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))

"""``batchkv run`` and ``batchkv submit``."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from batchkv_producer.cli.batch_options import (
    add_batch_options,
    allow_bad_option,
    from_batch_option,
    on_done_option,
)
from batchkv_producer.cli.end_codes import exit_code, input_code
from batchkv_producer.cli.input_options import (
    Given,
    again_from,
    check_input,
    input_options,
    out_of,
    say_wrong,
)
from batchkv_producer.cli.outcome import say_after_submit, say_end
from batchkv_producer.cli.shared import (
    Opened,
    default_model,
    either,
    generation_options,
    is_by_gateway,
    json_option,
    model_option,
    out_option,
    say,
    trace_option,
    url_option,
)
from batchkv_producer.cli.worker_options import worker_options
from batchkv_producer.client import BatchStatus, Submitted
from batchkv_producer.errors import UsageError
from batchkv_producer.local import run as running
from batchkv_producer.local.awake import kept_awake
from batchkv_producer.local.beginning import generation_words, is_polite
from batchkv_producer.local.remote_run import run_remotely
from batchkv_producer.local.worker_checks import folder_note
from batchkv_producer.progress import Reporter, Snapshot, reporter, rows
from batchkv_producer.results.target import STDOUT
from batchkv_producer.server.embedded import ensure_running
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import SamplingParams

timeout_option = click.option(
    "--job-timeout",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="A row that takes longer than this, from its start on a worker, fails (timeout). Rows "
    f"that are queued already keep their timeout.  [default: {DEFAULT_JOB_TIMEOUT_SECONDS}]",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Read and check the file, and count its rows. Change nothing."
)


@click.command()
@input_options
@model_option
@out_option(
    "OUT", "The file for results; - prints them.  [default: FILE.results.jsonl, - for a pipe]"
)
@worker_options
@trace_option
@generation_options
@timeout_option
@add_batch_options
@on_done_option
@dry_run_option
@allow_bad_option
@url_option
@click.pass_context
def run(
    ctx: click.Context,
    given: Given,
    model: str | None,
    out: Path | None,
    num_workers: int,
    worker_arguments: tuple[str, ...],
    trace: Path | None,
    defaults: SamplingParams,
    job_timeout: int | None,
    batch_options: BatchOptions,
    on_done: str | None,
    dry_run: bool,
    allow_bad: bool,
    url: str | None,
) -> None:
    """Run a file of prompts to its end and save the results.

    It starts workers of its own; with the URL of a gateway it starts none. FILE has the lines that
    submit reads. Several files are one batch. - is standard input. The results of a pipe are
    printed, unless -o names OUT; -o - prints those of a file, too.

    Answers are appended to OUT as rows end, and rows without an answer to OUT.errors.jsonl. Each
    row is in one of the two. After an interruption or a crash the same command goes on. The file's
    content, the model, the generation flags, --raw and --system identify the batch. With another
    --kv-scheme, or other files of the model, it is computed again. After you have corrected the
    file, rows with the same request keep their answers. Exit code 1 if a row failed or was wrong,
    5 if the command of --on-done failed.

    \b
    Examples:
      batchkv run prompts.jsonl -m mlx-community/Qwen3-4B-4bit
      batchkv run prompts.jsonl -m demo --temperature 0 --max-tokens 64
      batchkv run prompts.jsonl -m ~/models/mine --kv-scheme affine4 --slots 64
      batchkv run prompts.jsonl -m MODEL --adapter support=adapters/support
      batchkv run part-*.jsonl -m demo -o out.jsonl
      generate-prompts | batchkv run - -m demo | jq .response.body.choices[0].text
      batchkv run prompts.jsonl --dry-run
    """  # fmt: skip
    with ExitStack() as stack:
        inputs = stack.enter_context(given.opened())
        if dry_run:
            arguments = (inputs, given, model, defaults)
            checked = check_input(*arguments, options=batch_options, as_json=False)
            ctx.exit(input_code(checked.num_bad, allow_bad))
        options = running.RunOptions(
            source=inputs,
            out=out_of(inputs, out),
            model=model,
            default_model=default_model(),
            defaults=defaults,
            num_workers=num_workers,
            worker_arguments=worker_arguments,
            trace=trace,
            job_timeout_seconds=job_timeout,
            batch_options=batch_options,
            prompting=given.prompting,
        )
        stack.enter_context(_awake_for(options, url))
        opened, progress = stack.enter_context(either(url)), stack.enter_context(reporter())
        report = _run(opened, options, progress)
        failures = opened.client.failures(report.status)
        has_gone = opened.client.is_any_gone(report.status.batch_id, failures)
    say_end(report, failures, again_from(given) if has_gone else "")
    kept = report.out if report.out != STDOUT else None
    num_allowed = report.num_wrong if allow_bad else 0
    ctx.exit(exit_code(report.status, on_done, kept, num_allowed=num_allowed))


def _awake_for(options: running.RunOptions, url: str | None) -> AbstractContextManager[object]:
    """Keep this Mac awake while its workers run. A gateway needs no worker of this machine.

    Polite workers do it themselves, since they let the Mac sleep on battery.
    """
    if is_by_gateway(url) or is_polite(options.worker_arguments):
        return nullcontext()
    return kept_awake()


def _run(opened: Opened, options: running.RunOptions, progress: Reporter) -> running.RunReport:
    """Run by a gateway, or with workers of this machine."""
    if opened.remote is not None:
        _refuse_worker_flags(options)
        return run_remotely(opened.remote, options, progress)
    assert opened.session is not None
    found = opened.session
    revive = partial(ensure_running, home_from_environment()) if found.is_embedded else None
    return running.run(found.client, found.connection, found.url, options, progress, revive=revive)


def _refuse_worker_flags(options: running.RunOptions) -> None:
    """Refuse flags for workers of this machine. Variables may be set for other commands."""
    source = click.get_current_context().get_parameter_source
    given = [word for word in options.worker_arguments if word.startswith("--")]
    given += ["--trace"] if source("trace") is ParameterSource.COMMANDLINE else []
    if options.num_workers and source("num_workers") is ParameterSource.COMMANDLINE:
        given.append("--workers")
    if given:
        raise UsageError(
            f"{' and '.join(given)} would do nothing: with a gateway this machine starts no "
            "worker. Give it to `batchkv worker`"
        )


def _refuse_on_done(_context: object, _option: object, command: str | None) -> None:
    if command is not None:
        raise UsageError("submit does not wait: give --on-done to `batchkv wait` or `batchkv run`")


@click.command()
@input_options
@model_option
@click.option("--ids", is_flag=True, help="Print the ids of the jobs, not the id of the batch.")
@click.option("--name", metavar="TEXT", help="A name for people.  [default: the file's name]")
@from_batch_option
@generation_options
@timeout_option
@add_batch_options
@click.option("--on-done", hidden=True, expose_value=False, callback=_refuse_on_done)
@dry_run_option
@allow_bad_option
@url_option
@json_option
@click.pass_context
def submit(
    ctx: click.Context,
    given: Given,
    model: str | None,
    ids: bool,
    name: str | None,
    source_batch: str | None,
    defaults: SamplingParams,
    job_timeout: int | None,
    batch_options: BatchOptions,
    dry_run: bool,
    allow_bad: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Queue a file of prompts and print the batch's id. The same file again joins its batch.

    FILE holds OpenAI Batch lines, {"prompt": ..} or {"messages": [..]} lines, an array of such
    objects, or (.txt) one prompt a line. - is standard input. Several FILEs are one batch, whose
    rows without an id are called FILE:LINE. A wrong row is reported. The others are queued and the
    id is printed, with exit code 1 (0 with --allow-bad).

    \b
    Examples:
      batchkv submit prompts.jsonl -m mlx-community/Qwen3-4B-4bit
      batchkv submit prompts.jsonl --dry-run
      batchkv submit prompts.txt -m demo --max-tokens 64 --stop END --ids
      batchkv submit prompts.jsonl -m demo --priority high --expires 8h --keep 7d
      batchkv submit mended.jsonl -m demo --from 3f2a9c51d07be684
      generate-prompts | batchkv submit - -m demo
    """  # fmt: skip
    _check_together(as_json, dry_run, source_batch)
    with ExitStack() as stack:
        inputs = stack.enter_context(given.opened())
        if dry_run:
            arguments = (inputs, given, model, defaults)
            checked = check_input(*arguments, options=batch_options, as_json=as_json)
            ctx.exit(input_code(checked.num_bad, allow_bad))
        opened = stack.enter_context(either(url))
        earlier = opened.client.earlier_named(source_batch)
        with reporter() as progress:
            submitted = opened.client.submit(
                inputs,
                model=model,
                default_model=default_model(),
                defaults=defaults,
                job_timeout_seconds=job_timeout or DEFAULT_JOB_TIMEOUT_SECONDS,
                name=name,
                options=batch_options,
                prompting=given.prompting,
                earlier=earlier,
                on_progress=lambda done, total: progress.update(Snapshot(total, ok=done)),
            )
        _say_submitted(submitted)
        say_after_submit(opened.client, submitted, earlier, again_from(given))
        batch_id = submitted.batch_id
        _say_of_folder(opened.client.status(batch_id))
        for shown in opened.client.job_ids(batch_id) if ids else (batch_id,):
            click.echo(shown)
    ctx.exit(input_code(submitted.num_bad, allow_bad))


def _check_together(as_json: bool, dry_run: bool, source_batch: str | None) -> None:
    if as_json and not dry_run:
        raise UsageError("--json needs --dry-run: without it submit prints ids")
    if source_batch and dry_run:
        raise UsageError("--dry-run uses no server, and --from BATCH needs one: choose one of them")


def _say_of_folder(found: BatchStatus) -> None:
    if note := folder_note(found.model.removesuffix(f"@{found.adapter}")):
        say(note)


def _say_submitted(submitted: Submitted) -> None:
    say_wrong(submitted)
    total, bad, num = submitted.total, submitted.num_bad, submitted.num_duplicates
    duplicates = f", {num:,} of them {'a duplicate' if num == 1 else 'duplicates'}" if num else ""
    if submitted.joined:
        what = f"joined a batch of {rows(total)}" + (f", {bad:,} of them wrong" if bad else "")
    else:
        what = f"queued {total - bad:,} of {rows(total)}" if bad else f"queued {rows(total)}"
    say(f"{what}{duplicates}, in queue {submitted.queue}")
    if submitted.joined:
        say(f"it was submitted before: `batchkv status {submitted.batch_id}` shows how far it is")
    if submitted.generation > 1:
        say(generation_words(submitted))
    for note in filter(None, (submitted.model_note, submitted.style_note, submitted.reuse_note)):
        say(note)
    for note in submitted.notes:
        say(f"batch {submitted.batch_id} was there already: {note}")

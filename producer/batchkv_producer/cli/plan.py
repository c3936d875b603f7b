"""``batchkv plan``: shows how submit would group the rows of a file."""

from __future__ import annotations

import click

from batchkv_producer.agreed import BLOCK_TOKENS
from batchkv_producer.cli.end_codes import input_code
from batchkv_producer.cli.input_options import Given, checked_line, input_options, say_wrong
from batchkv_producer.cli.shared import (
    default_model,
    generation_options,
    json_option,
    model_option,
    print_json,
)
from batchkv_producer.order.prefix_estimate import PrefixEstimate
from batchkv_producer.progress import rows
from batchkv_producer.submit import submission
from batchkv_producer.tables import print_table
from batchkv_producer.wire.job import SamplingParams


@click.command()
@input_options
@model_option
@click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="The number of workers that will share the queue.",
)
@generation_options
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    given: Given,
    model: str | None,
    num_workers: int,
    defaults: SamplingParams,
    as_json: bool,
) -> None:
    """Show which rows have a common prefix, and expected cache hits.

    It reads and checks the file as submit does. It needs no server and changes nothing. It has no
    tokenizer, so it counts 4 bytes of text as a token.

    \b
    Examples:
      batchkv plan prompts.jsonl
      batchkv plan prompts.jsonl --workers 3 --json
    """  # fmt: skip
    with given.opened() as inputs:
        checked, estimate = submission.survey(
            inputs,
            model=model,
            defaults=defaults,
            default_model=default_model(),
            num_workers=num_workers,
            prompting=given.prompting,
        )
    if as_json:
        print_json({"checked": checked, "outlook": estimate})
    else:
        say_wrong(checked)
        click.echo(checked_line(checked))
        _print_groups(estimate)
        _print_hits(estimate)
    ctx.exit(input_code(checked.num_bad, False))


def _print_groups(estimate: PrefixEstimate) -> None:
    if not estimate.num_groups:
        click.echo(f"no rows share a prefix of {BLOCK_TOKENS} tokens or more (estimated)")
        return
    noun = "group" if estimate.num_groups == 1 else "groups"
    click.echo(
        f"{rows(estimate.num_grouped)} in {estimate.num_groups:,} {noun} with a common prefix; "
        "tokens are estimates, 4 bytes each"
    )
    titles = ("rows", "shared bytes", "shared tokens", "cached tokens", "first line")
    print_table(
        titles,
        [
            (g.num_rows, g.shared_bytes, g.shared_tokens, g.cached_tokens, g.first_line)
            for g in estimate.groups
        ],
    )
    num_more = estimate.num_groups - len(estimate.groups)
    if num_more:
        click.echo(f"and {num_more:,} smaller groups")


def _print_hits(estimate: PrefixEstimate) -> None:
    line = f"expected hit rate: {estimate.hit_rate_one:.1%} of prompt tokens with one worker"
    if estimate.num_workers > 1:
        line += f", {estimate.hit_rate:.1%} with {estimate.num_workers} that share no cache"
    click.echo(line)

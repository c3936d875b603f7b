"""``batchkv failed``."""

from __future__ import annotations

import sys

import click

from batchkv_producer.cli.shared import say, session, url_option
from batchkv_producer.manage.input_lines import MissingLines, failed_lines
from batchkv_producer.progress import printable, rows
from batchkv_producer.results import outfile


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option("--canceled", is_flag=True, help="The canceled rows too.")
@url_option
@click.pass_context
def failed(ctx: click.Context, batch_id: str, canceled: bool, url: str | None) -> None:
    """Print the failed rows of a batch as input lines, to correct and submit as a file.

    They are OpenAI Batch lines with the rows' own custom_ids, the batch's model and its defaults.
    Plain prompts stay lines without a url. Exit code 1 if a row cannot be printed: a row that was
    wrong in the input is in your file only. So is a row whose job is no longer in Redis, which
    keeps jobs of failed rows for 7 days.

    \b
    Examples:
      batchkv failed 3f2a9c51d07be684 > bad.jsonl
      batchkv failed 3f2a9c51d07be684 --canceled | jq -r .custom_id
    """
    lacking, num_lines = MissingLines(), 0
    is_terminal = sys.stdout.isatty()
    with session(url) as opened:
        status = opened.client.status(batch_id)
        for line in failed_lines(opened.connection, status, lacking, canceled=canceled):
            sys.stdout.buffer.write(outfile.encoded(printable(line) if is_terminal else line))
            num_lines += 1
    sys.stdout.buffer.flush()
    say(f"{rows(num_lines)} of batch {status.batch_id}")
    if lacking.num_wrong:
        say(f"{rows(lacking.num_wrong)} wrong in the input: mend the file ({status.name})")
    if lacking.num_gone:
        say(
            f"{rows(lacking.num_gone)} no longer in Redis but for their errors: `batchkv retry "
            f"{status.batch_id} --from FILE` runs them again, FILE being what was submitted"
        )
    ctx.exit(1 if lacking.num_wrong or lacking.num_gone else 0)

"""The ``batchkv`` command. This room has the commands; the other rooms do their work.

Results and ids go to standard output, everything else to standard error. Exit codes: 0 success, 1 a
row failed, was wrong or has no answer, 2 wrong arguments or wrong input, 3 an error of Redis, 4 the
work cannot go on (disk full, workers that keep dying), 5 the command of --on-done failed, 6 the
time of --timeout is over, 130 interrupted (128 + the signal).

``exit_codes`` has the exit codes, and chooses the one of a command that waited for a batch.
``group.guarded`` ends with the ``exit_code`` of an error (``errors``).
"""

from __future__ import annotations

import click

from batchkv_producer.cli.ask import ask
from batchkv_producer.cli.group import Cli
from batchkv_producer.cli.manage import cancel, failed, forget, retry
from batchkv_producer.cli.monitor import list_batches, status, wait
from batchkv_producer.cli.plan import plan
from batchkv_producer.cli.report import report
from batchkv_producer.cli.results import result, results
from batchkv_producer.cli.run_submit import run, submit
from batchkv_producer.cli.server import server
from batchkv_producer.cli.workers import top, workers
from batchkv_producer.doctor.command import doctor
from batchkv_producer.service.command import service


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="batchkv", prog_name="batchkv")
def cli() -> None:
    """Batch inference for people who own a few Macs.

    \b
    On one machine, from prompts to results:
      batchkv run prompts.jsonl -m mlx-community/Qwen3-4B-4bit -o out.jsonl
    \b
    One question:
      batchkv ask -m mlx-community/Qwen3-4B-4bit "What is a prefix cache?"
    \b
    With workers on several machines:
      export BATCHKV_REDIS_URL=redis://:PASSWORD@studio.local:6379/0
      batchkv worker -m mlx-community/Qwen3-4B-4bit      # on each
      id=$(batchkv submit prompts.jsonl -m mlx-community/Qwen3-4B-4bit)
      batchkv wait $id && batchkv results $id -o out.jsonl
    \b
    Without --url, BATCHKV_REDIS_URL and BATCHKV_REDIS_URL_FILE, batchkv starts
    a server of its own when a command needs one (batchkv server status).
    \b
    Exit codes: 0 success, 1 some row failed or was wrong, 2 wrong use or input,
    3 an error of Redis or of a gateway, 4 the work could not go on (disk full,
    workers that keep dying), 5 the command of --on-done failed, 6 the time of
    wait --timeout is over, 130 interrupted.
    """


for _command in (run, submit, ask, plan, status, wait, results, result):
    cli.add_command(_command)
for _command in (report, failed, cancel, retry, forget):
    cli.add_command(_command)
cli.add_command(list_batches)
cli.add_command(workers)
cli.add_command(top)
cli.add_command(server)
cli.add_command(service)
cli.add_command(doctor)


def main() -> None:
    """Entry point of the ``batchkv`` script."""
    cli(prog_name="batchkv")

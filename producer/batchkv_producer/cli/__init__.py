"""The ``batchkv`` command. This room has the commands; the other rooms do their work.

Results and ids go to standard output, everything else to standard error. Exit codes: 0 success, 1 a
row failed, was wrong or has no answer, 2 wrong arguments or wrong input, 3 an error of Redis, 4 the
work cannot go on (disk full, workers that keep dying), 5 the command of --on-done failed, 6 the
time of --timeout is over, 130 interrupted (128 + the signal).

``exit_codes`` has the exit codes, and ``end_codes`` chooses the one of a command that waited for a
batch. ``group.guarded`` ends with the ``exit_code`` of an error (``errors``).
"""

from __future__ import annotations

import click

from batchkv_producer.cli.group import Cli

# Where each command is. Only the one that is called is imported, for that takes most of its time.
PLACES = {
    "run": "batchkv_producer.cli.run_submit:run",
    "submit": "batchkv_producer.cli.run_submit:submit",
    "ask": "batchkv_producer.cli.ask:ask",
    "plan": "batchkv_producer.cli.plan:plan",
    "status": "batchkv_producer.cli.monitor:status",
    "wait": "batchkv_producer.cli.monitor:wait",
    "results": "batchkv_producer.cli.results:results",
    "result": "batchkv_producer.cli.results:result",
    "report": "batchkv_producer.cli.report:report",
    "failed": "batchkv_producer.cli.manage:failed",
    "cancel": "batchkv_producer.cli.manage:cancel",
    "retry": "batchkv_producer.cli.manage:retry",
    "forget": "batchkv_producer.cli.manage:forget",
    "list": "batchkv_producer.cli.monitor:list_batches",
    "workers": "batchkv_producer.cli.workers:workers",
    "top": "batchkv_producer.cli.workers:top",
    "server": "batchkv_producer.cli.server:server",
    "service": "batchkv_producer.service.command:service",
    "doctor": "batchkv_producer.doctor.command:doctor",
}


@click.group(cls=Cli, places=PLACES, context_settings={"help_option_names": ["-h", "--help"]})
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
      export BATCHKV_REDIS_URL_FILE=~/.batchkv/queue.url  # from the hub
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


def main() -> None:
    """Entry point of the ``batchkv`` script."""
    cli(prog_name="batchkv")

"""``batchkv worker``: the worker of ``rq worker -w batchkv_worker.BatchWorker``, with flags."""

from __future__ import annotations

import logging
import os
from typing import Any

import click

from batchkv_producer import connection, redis_keys
from batchkv_producer.errors import BatchkvError
from batchkv_worker.settings import DTYPES, KV_SCHEMES, WorkerSettings

EPILOG = """\b
Examples:
  batchkv worker -m demo                          serve the embedded server
  batchkv worker -m mlx-community/Qwen3-4B-4bit --url redis://studio.local:6379
  batchkv worker -m demo --burst                  until the queue is empty

\b
Every flag that sets how the worker runs has a variable: --slots is BATCHKV_SLOTS, and so on.
Exit codes: 0 done or stopped, 2 configuration, 3 Redis, 70 the engine died, 71 it hung.
"""


@click.command("worker", epilog=EPILOG)
@click.option("-m", "--model", help="Model to serve: 'demo', a folder, or a Hugging Face name.")
@click.option("--url", help="Redis URL. Default: BATCHKV_REDIS_URL, else the embedded server.")
@click.option("--name", help="Name shown by RQ's tools. Default: host and a random suffix.")
@click.option("--kv-scheme", metavar="|".join(KV_SCHEMES), help="How keys and values are kept.")
@click.option("--slots", metavar="N", help="Rows that decode at once.  [32]")
@click.option("--prefetch", metavar="N", help="Rows that wait in the engine beside them.  [8]")
@click.option("--memory", "memory_bytes", metavar="SIZE", help="KV memory, like 4GB.  [device's]")
@click.option("--prefill-chunk", metavar="TOKENS", help="Prompt tokens computed at once.  [512]")
@click.option("--dtype", metavar="|".join(DTYPES), help="What the model computes in.  [auto]")
@click.option("--wired-limit", metavar="on|off", help="Let MLX wire memory (macOS).  [off]")
@click.option("--drain-seconds", metavar="S", help="How long a stop lets rows finish.  [30]")
@click.option("--lease-seconds", metavar="S", help="How long a lost worker keeps its jobs.  [60]")
@click.option("--heartbeat-seconds", metavar="S", help="How often leases are renewed.  [15]")
@click.option("--maintenance-seconds", metavar="S", help="How often to clean the queue.  [30]")
@click.option(
    "--engine-timeout",
    "engine_timeout_seconds",
    metavar="S",
    help="A step that takes longer is a hang.  [600]",
)
@click.option(
    "--load-timeout",
    "load_timeout_seconds",
    metavar="S",
    help="The same for loading the model.  [7200]",
)
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--max-jobs", type=click.IntRange(min=1), help="End after so many jobs.")
@click.option("--max-idle-time", type=click.IntRange(min=1), help="End when idle for so many s.")
@click.option("--exit-with-parent", is_flag=True, help="End when standard input does.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings.")
@click.option("-v", "--verbose", is_flag=True, help="RQ's debug messages too.")
def worker_command(
    url: str | None,
    name: str | None,
    burst: bool,
    max_jobs: int | None,
    max_idle_time: int | None,
    exit_with_parent: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Serve the queue of one model on this machine."""
    # RQ takes a tenth of a second to import: not for every batchkv command.
    from batchkv_worker.rq_worker import BatchWorker
    from batchkv_worker.startup import exit_with

    try:
        settings = WorkerSettings.from_env(os.environ, **flags)
        address = connection.url_in_use(url)
        with connection.server_errors(address):
            worker = BatchWorker(
                [redis_keys.queue_name(settings.model)],
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

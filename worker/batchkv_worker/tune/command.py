"""The command ``batchkv tune``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import click

from batchkv_producer.errors import BatchkvError
from batchkv_producer.settings_table import DTYPES, WEIGHTS
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.tune.options import one_model_option

EPILOG = """\b
Examples:
  batchkv tune -m demo
  batchkv tune -m mlx-community/Qwen3-4B-4bit --kv-scheme affine4 --slots 64
  batchkv tune -m MODEL --json

\b
A worker measures at its first start, and keeps the results in its home
folder. Measure anew if the machine was busy then. Let nothing else compute
meanwhile. Workers that run already keep what they have chosen. An error is a
share of the largest number; a path whose error is too large is never used.
"""


@click.command("tune", epilog=EPILOG)
@one_model_option
@click.option("--kv-scheme", metavar="SCHEME", help="The same as for `batchkv worker`.")
@click.option("--slots", metavar="N", help="The same as for `batchkv worker`.")
@click.option("--dtype", type=click.Choice(DTYPES), help="The same as for `batchkv worker`.")
@click.option("--weights", type=click.Choice(WEIGHTS), help="The same as for `batchkv worker`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune_command(
    model: str,
    kv_scheme: str | None,
    slots: str | None,
    dtype: str | None,
    weights: str | None,
    as_json: bool,
) -> None:
    """Measure anew what workers of a model choose on this device."""
    from batchkv_worker.engine.factory import build_engine
    from batchkv_worker.queue.startup import exit_with

    try:
        settings = WorkerSettings.from_env(
            os.environ,
            model=model,
            kv_scheme=kv_scheme,
            slots=slots,
            dtype=dtype,
            weights=weights,
        )
        if sys.stderr.isatty():
            click.echo("batchkv: loading the model; then measuring", err=True)
        # A store is not needed; and chunks are measured whatever size is set.
        alone = replace(settings, cache=None, cache_audit=0.0, prefill_chunk=None)
        engine = build_engine(replace(alone, kv_adopt_float=False), measures_anew=True)
        from batchkv_worker.tune.show import as_text
        from batchkv_worker.tune.tuning import tuning_of

        found = tuning_of(engine)
        engine.close()
    except BatchkvError as fault:
        exit_with(fault)
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else as_text(found), nl=as_json)

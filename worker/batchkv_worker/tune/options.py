"""``-m`` of the commands that measure one model."""

from __future__ import annotations

import click

from batchkv_producer.errors import UsageError


def _alone(_context: object, _option: object, named: tuple[str, ...]) -> str:
    if len(set(named)) > 1:
        raise UsageError(
            f"-m {' -m '.join(named)}: this command measures one model. Run it once for each"
        )
    return named[0]


one_model_option = click.option(
    "-m",
    "--model",
    required=True,
    multiple=True,
    callback=_alone,
    help="'demo', a folder, or a Hugging Face name.",
)

"""The group of commands imports the command that is called, and no other."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from batchkv_producer.cli import PLACES, cli

SHOWN = """
import sys
from batchkv_producer.cli import cli
try:
    cli(["server", "stop", "--help"], prog_name="batchkv")
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("batchkv_producer.")))
"""


@pytest.mark.parametrize("name", PLACES)
def test_each_command_is_where_it_is_said_to_be(name: str) -> None:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, click.Command) and found.name == name and found.help


def test_other_commands_are_not_imported() -> None:
    """Importing takes most of the time of a small command."""
    run = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    imported = set(run.stdout.splitlines()[-1].split())
    modules = {place.partition(":")[0] for place in PLACES.values()}
    assert modules & imported == {"batchkv_producer.cli.server"}

"""Runs commands one after the other in one process, on whatever terminal it was given."""

from __future__ import annotations

import json
import sys

from batchkv_producer.cli import cli
from batchkv_producer.cli.group import guarded

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        guarded(lambda: cli.main(arguments, standalone_mode=False))  # noqa: B023 - run at once

"""Where the ``batchkv`` script begins: before anything that takes time to import."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command. A Ctrl-C so early that nothing has begun ends it without a word."""
    try:
        from batchkv_producer.cli import main as begin
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    begin()

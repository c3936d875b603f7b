"""The exit code of a command that waited for a batch, or read an input."""

from __future__ import annotations

from pathlib import Path

from batchkv_producer.cli.exit_codes import EXIT_SOME_FAILED, EXIT_TIME_OVER
from batchkv_producer.cli.shared import say
from batchkv_producer.client import BatchStatus
from batchkv_producer.local.on_done import EXIT_ON_DONE, run_on_done


def exit_code(
    status: BatchStatus, on_done: str | None, out: Path | None = None, *, num_allowed: int = 0
) -> int:
    """Run the command of ``--on-done``. Returns the exit code of a command that waited for a batch.

    The code is 0 although up to ``num_allowed`` rows have no answer.
    """
    if not status.is_done:
        return EXIT_TIME_OVER
    code = 0 if status.ok + num_allowed >= status.total else EXIT_SOME_FAILED
    if on_done is None:
        return code
    fault = run_on_done(on_done, status, out)
    if fault:
        say(fault)
    return EXIT_ON_DONE if fault else code


def input_code(num_bad: int, allow_bad: bool) -> int:
    """The exit code of a command that read an input."""
    return EXIT_SOME_FAILED if num_bad and not allow_bad else 0

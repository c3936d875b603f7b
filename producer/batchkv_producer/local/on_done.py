"""``--on-done``: runs the user's command once, when the batch that this process waited for is done.

The command is kept in the memory of this process only. It gets the batch's id and counts as
environment variables, and nothing that stands in a row.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from batchkv_producer.monitor.status import BatchStatus

SHELL = "/bin/sh"
STDERR = 2  # the process's own, wherever Python's may lead
EXIT_ON_DONE = 5  # the batch is done, but the command failed


def variables(status: BatchStatus, out: Path | None = None) -> dict[str, str]:
    """What the command finds in its environment beside what is there."""
    told = {
        "BATCHKV_BATCH": status.batch_id,
        "BATCHKV_TOTAL": str(status.total),
        "BATCHKV_OK": str(status.ok),
        "BATCHKV_FAILED": str(status.failed),
        "BATCHKV_CANCELED": str(status.canceled),
    }
    return told | ({"BATCHKV_OUT": str(out)} if out else {})


def run_on_done(command: str, status: BatchStatus, out: Path | None = None) -> str:
    """Run the command with the shell and wait for it; what went wrong, or an empty text.

    Its output goes to standard error, so that ours can be read by programs; it reads nothing.
    """
    environ = {**os.environ, **variables(status, out)}
    try:
        done = subprocess.run(
            [SHELL, "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            check=False,
        )
    except (OSError, ValueError) as fault:
        return f"the command of --on-done could not be run: {fault}"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"the command of --on-done was ended by {name}"
    if done.returncode:
        return f"the command of --on-done ended with exit code {done.returncode}"
    return ""

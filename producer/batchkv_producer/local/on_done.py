"""``--on-done``: runs the user's command once, when the batch of this process is done.

The command is stored nowhere but in the memory of this process. Its environment has the batch's id
and counts, and no text of any row.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from batchkv_producer.monitor.status import BatchStatus

SHELL = "/bin/sh"
STDERR = 2  # the file descriptor of the process; sys.stderr may be another stream
EXIT_ON_DONE = 5  # the batch is done, but the command failed


def variables(status: BatchStatus, out: Path | None = None) -> dict[str, str]:
    """The environment variables that the command gets besides those of this process."""
    values = {
        "BATCHKV_BATCH": status.batch_id,
        "BATCHKV_TOTAL": str(status.total),
        "BATCHKV_OK": str(status.ok),
        "BATCHKV_FAILED": str(status.failed),
        "BATCHKV_CANCELED": str(status.canceled),
    }
    return values | ({"BATCHKV_OUT": str(out)} if out else {})


def run_on_done(command: str, status: BatchStatus, out: Path | None = None) -> str:
    """Run the command with the shell and wait for it. Returns a sentence if it failed, else "".

    Its output goes to standard error, because standard output is for the results. Its standard
    input is empty.
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

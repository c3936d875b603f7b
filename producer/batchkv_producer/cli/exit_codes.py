"""The exit codes of commands. docs/cli.md and the help list the same codes.

Errors have their codes in ``errors.py``: 2 for use and input, 3 for Redis, 4 for a full disk. A
failed command of ``--on-done`` has its own in ``local.on_done``. This module imports nothing, since
every command needs it.
"""

from __future__ import annotations

EXIT_SOME_FAILED = 1  # a row failed, or is wrong in the input
EXIT_USAGE = 2
EXIT_OUTPUT = 4
EXIT_TIME_OVER = 6  # the batch is not done, and --timeout is over
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as if the signal had ended the process

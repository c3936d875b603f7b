"""Keeps a Mac awake while a command works: `caffeinate`, which ends with the process it watches.

The assertion is the one against idle sleep (`-i`). The display may sleep. Closing the lid of a
laptop still lets it sleep.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("batchkv.worker")

PROGRAM = "caffeinate"
END_SECONDS = 2.0


class Awake:
    """The assertion of this process. On other systems than macOS, its methods do nothing."""

    def __init__(self, platform: str = sys.platform) -> None:
        self._is_mac = platform == "darwin"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Whether caffeinate runs."""
        return self._process is not None and self._process.poll() is None

    def hold(self) -> None:
        """Keep the machine awake from now on. A machine without caffeinate is left as it is."""
        if not self._is_mac or self.is_held:
            return
        try:
            self._process = subprocess.Popen(
                [PROGRAM, "-i", "-w", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us, and we may go on for a while
            )
        except OSError as fault:
            log.warning("this Mac may sleep when it is idle: %s: %s", PROGRAM, fault.strerror)
            self._is_mac = False

    def release(self) -> None:
        """Let the machine sleep again."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def kept_awake(platform: str = sys.platform) -> Iterator[Awake]:
    """Inside, the machine does not sleep when it is idle, unless the block releases it."""
    awake = Awake(platform)
    awake.hold()
    try:
        yield awake
    finally:
        awake.release()

"""The machine that is examined: its commands, files and environment, each with a bound.

Tests give ``Machine`` another runner, home or root, and so what another machine would answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_SECONDS = 5.0
MAX_OUTPUT_CHARS = 200_000
MAX_FILE_BYTES = 200_000
# Where macOS and Linux keep their tools. A worker under launchd may have a shorter PATH.
_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed. ``code`` is None if it is not there or did not end in time."""

    code: int | None
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


Runner = Callable[[Sequence[str], float], Output]


def run_command(command: Sequence[str], seconds: float) -> Output:
    """Run a command, without input, for at most so many seconds. Never raises."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_SYSTEM_PATH}"
    try:
        ended = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "PATH": path},
            timeout=seconds,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return Output(None)
    return Output(ended.returncode, ended.stdout.decode("utf-8", "replace")[:MAX_OUTPUT_CHARS])


@dataclass(frozen=True, slots=True)
class Machine:
    """``system`` is as ``sys.platform`` names it. ``root`` is where system files are read."""

    system: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    user_home: Path = field(default_factory=lambda: Path(os.path.expanduser("~")))
    root: Path = Path("/")
    runner: Runner = run_command
    uid: int = field(default_factory=os.getuid)

    @property
    def is_mac(self) -> bool:
        """Whether this is macOS."""
        return self.system == "darwin"

    def run(self, *command: str, seconds: float = COMMAND_SECONDS) -> Output:
        """What a command prints. Never raises."""
        return self.runner(command, seconds)

    def read(self, path: str) -> str | None:
        """The beginning of a system's file, given by its full path; None if it cannot be read."""
        return read_text(self.root / path.lstrip("/"))

    def shown(self, path: Path | str) -> str:
        """A path as people may see it: the home folder is ~."""
        text, home = str(path), str(self.user_home)
        if home != "/" and (text == home or text.startswith(f"{home}/")):
            return f"~{text[len(home) :]}"
        return text


def read_text(path: Path) -> str | None:
    """The beginning of a file as text; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None

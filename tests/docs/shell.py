"""A reader's machine: an empty home, the commands on PATH, and one shell for each page.

``git clone`` and ``make`` are small scripts here: the first copies links to the files of this
repository, the second runs what the Makefile's target does, without installing anything. The model
that the pages download is a folder of that name, with the demo model's files.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from docs.pages import README, REPOSITORY, Block
from support.homes import new_home, shared_folder

MODEL = "mlx-community/Qwen3-4B-4bit"
DEMO = REPOSITORY / "worker" / "batchkv_worker" / "demo" / "model"
LIMIT_SECONDS = 500  # on a busy machine a page takes a minute
GIT = """#!/bin/sh
[ "$1 $2" = "clone REPOSITORY" ] && cp -RP "$CLONE" "$3"
"""
MAKE = """#!/bin/sh
[ "$1" = demo ] && exec sh tools/demo.sh "${0%/*}/batchkv-in-a-new-home"
"""
# The demo makes a home of its own, which gets the measurements that all homes of tests have.
IN_A_NEW_HOME = """#!/bin/sh
[ -e "$BATCHKV_HOME/measured" ] || ln -s "$MEASURED" "$BATCHKV_HOME/measured"
exec batchkv "$@"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a block printed, and how it ended."""

    block: Block
    code: int
    output: str
    errors: str

    def check(self) -> None:
        """AssertionError unless it ended well and printed at its end what the page says."""
        assert self.code == 0, f"{self.block.place}: exit code {self.code}: {self.errors}"
        if self.block.expected:
            wanted = pattern(self.block.expected)
            assert wanted.search(self.output), f"{self.block.place} prints:\n{self.output}"


def pattern(expected: str) -> re.Pattern[str]:
    """What a text block stands for: ``...`` is any text, alone on a line it is any lines."""
    lines = [".*?" if line == "..." else _line(line) for line in expected.splitlines()]
    text = r"\n".join(lines)
    return re.compile(rf"(?:^|\n){text}\s*\Z", re.DOTALL)


def _line(line: str) -> str:
    return r"[^\n]*".join(re.escape(part) for part in line.split("..."))


class Machine:
    """The home of a reader, whose embedded server lives until ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self._commands = folder / "bin"
        self._commands.mkdir(parents=True)
        named = {"git": GIT, "make": MAKE, "batchkv-in-a-new-home": IN_A_NEW_HOME}
        for name, text in named.items():
            (self._commands / name).write_text(text)
            (self._commands / name).chmod(0o755)
        self._clone = folder / "clone"
        shutil.copytree(DEMO, self._clone / MODEL)
        for path in REPOSITORY.iterdir():
            if not path.name.startswith("."):
                (self._clone / path.name).symlink_to(path)
        state = new_home(folder / ".batchkv")
        self.url = f"unix://{state}/redis.sock"
        (state / "queue.url").write_text(self.url)
        (state / "queue.url").chmod(0o600)
        self.environment = {
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PATH": f"{self._commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CLONE": str(self._clone),
            "MEASURED": str(shared_folder()),
        }
        for name in ("OPENBLAS_NUM_THREADS", "PYTHONPATH"):  # of the tests' own processes
            if name in os.environ:
                self.environment[name] = os.environ[name]

    def read(self, blocks: Sequence[Block]) -> list[Ran]:
        """Run the blocks of one page in order, in one shell, in a clone of their own."""
        folder = self.home / blocks[0].page.stem
        if blocks[0].page == README:
            folder.mkdir()  # it makes its clone itself
        else:
            shutil.copytree(self._clone, folder, symlinks=True)
        script = folder / "page.sh"
        script.write_text(_script(blocks))
        shell = subprocess.Popen(
            ["bash", script],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            shell.wait(LIMIT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
        return [_ran(folder, number, block) for number, block in enumerate(blocks)]

    def stop(self) -> None:
        """End the server."""
        command = [Path(sys.executable).parent / "batchkv", "server", "stop"]
        subprocess.run(command, env=self.environment, capture_output=True, timeout=LIMIT_SECONDS)


def _script(blocks: Sequence[Block]) -> str:
    """Each block writes N.out, N.err and, when it has ended, N.code, in the page's folder."""
    lines = ['folder=$PWD; trap "kill \\$(jobs -p) 2>/dev/null; wait" EXIT; set -e']
    for number, block in enumerate(blocks):
        place = f'"$folder"/{number}'
        first, _, last = block.text.rstrip("\n").rpartition("\n")
        text = f"{first}\n{last} &" if block.note == "background" else block.text
        lines += ["{", text, f"}} >{place}.out 2>{place}.err", f"echo $? >{place}.code"]
    return "\n".join(lines) + "\n"


def _ran(folder: Path, number: int, block: Block) -> Ran:
    def text(kind: str) -> str:
        file = folder / f"{number}.{kind}"
        return file.read_text("utf-8") if file.exists() else ""

    return Ran(block, int(text("code") or 1), text("out"), text("err"))

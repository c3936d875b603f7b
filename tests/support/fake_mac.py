"""Programs of macOS for a PATH: `pmset` prints a planted file, `caffeinate` watches its process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# What `pmset -g batt` prints: the source that is drawn from, then a line for each battery or UPS.
# The form is that of outputs quoted in threads about `pmset -g batt`, with other ids.
ON_MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=6094947)\t100%; charged; 0:00 remaining present: true
"""
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=6094947)\t87%; discharging; 6:12 remaining present: true
"""
WITHOUT_BATTERY = "Now drawing from 'AC Power'\n"
ON_UPS = """Now drawing from 'UPS Power'
 -Back-UPS ES 700G FW:871.O3 .I USB FW:O3  (id=58720256)\t100%; discharging; 0:31 remaining
"""

PMSET = """#!/bin/sh
[ "$*" = "-g batt" ] && exec cat '{folder}/power'
"""
# As the real one, it ends when the process that it watches has ended.
CAFFEINATE = """#!/bin/sh
echo "$$ $*" >>'{folder}/caffeinate.log'
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
"""


@dataclass(frozen=True, slots=True)
class FakeMac:
    """A folder with these programs; it runs on mains at first."""

    folder: Path

    def install(self) -> FakeMac:
        """Write the programs."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(parents=True)
        for name, text in (("pmset", PMSET), ("caffeinate", CAFFEINATE)):
            (bin_folder / name).write_text(text.format(folder=self.folder))
            (bin_folder / name).chmod(0o755)
        self.plant(ON_MAINS)
        return self

    @property
    def path(self) -> str:
        """A PATH with the programs first."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def plant(self, text: str) -> None:
        """From now on pmset prints this."""
        (self.folder / "power.new").write_text(text)
        (self.folder / "power.new").replace(self.folder / "power")

    @property
    def awake(self) -> list[tuple[int, str]]:
        """(process id, arguments) of each start of caffeinate that still runs."""
        log = self.folder / "caffeinate.log"
        lines = log.read_text().splitlines() if log.exists() else []
        pairs = [line.split(" ", 1) for line in lines]
        return [(int(pid), arguments) for pid, arguments in pairs if _lives(int(pid))]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self").exists()
    return state != "Z"

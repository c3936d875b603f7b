"""The page of settings is what the table of settings says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from batchkv_producer.settings_table import TABLE

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tools" / "settings_page.py"


def test_the_page_is_what_the_table_says() -> None:
    """``python tools/settings_page.py`` has been run since the table was changed."""
    command = [sys.executable, str(TOOL), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_setting_is_explained() -> None:
    """Each has a sentence for the page, and each flag one for the help; names stand once."""
    for setting in TABLE:
        assert setting.about and setting.variables
        assert setting.help or not setting.name
    for names in ([v for s in TABLE for v in s.variables], [s.flag for s in TABLE if s.flag]):
        assert len(names) == len(set(names))

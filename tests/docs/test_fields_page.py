"""The tables of the page on input are what the table of fields says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tools" / "fields_page.py"


def test_the_tables_are_what_the_table_of_fields_says() -> None:
    """``python tools/fields_page.py`` has been run since the table was changed."""
    command = [sys.executable, str(TOOL), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr

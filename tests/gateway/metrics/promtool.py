"""Prometheus's own checks of metrics and rules, where ``promtool`` is installed."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def promtool(*arguments: str, text: str = "") -> str:
    """What ``promtool`` says. Skips the test without it; fails it if it finds a fault."""
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: `apt install prometheus` has it; or set PROMTOOL")
    ended = subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    return said

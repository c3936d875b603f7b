"""A laptop that reaches a gateway alone: the short form of `make namespaces`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import namespaces


@pytest.mark.skipif(not namespaces.is_allowed(), reason="no namespaces for users here")
def test_a_laptop_without_a_route_to_redis_gets_its_rows() -> None:
    """One worker is killed and the laptop's link is cut for a second: OUT has each row once."""
    done = subprocess.run(
        [sys.executable, namespaces.__file__, "--cut", "1", "--rows", "40"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 rows, each once" in done.stdout

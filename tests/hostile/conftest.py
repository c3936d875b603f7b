"""A trap around every test: whatever is sent in, nothing of it is called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.traps import Trap, trap


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine's counts here."""
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def sentinel(tmp_path: Path) -> Iterator[Trap]:
    """Fails the test when a payload was called; ``mark`` is the path that payloads try to make."""
    with trap(tmp_path) as here:
        yield here

"""Files that workers keep: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from batchkv_worker.kept_files import write_whole


def test_what_cannot_take_its_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of before stays as it was."""
    file = tmp_path / "kept"
    write_whole(file, b"before")

    def refuse(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no room"):
        write_whole(file, b"after")
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    assert file.read_bytes() == b"before"

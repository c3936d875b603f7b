"""The facts on which measurements depend."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.kernels import body
from batchkv_worker.kv.start.machine import machine_facts


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels' sources, which takes their place."""
    folder = tmp_path / "source"
    shutil.copytree(body._FOLDER, folder)
    monkeypatch.setattr(body, "_FOLDER", folder)
    forget()
    yield folder
    monkeypatch.undo()
    forget()


def forget() -> None:
    body.source_text.cache_clear()
    body.sources_digest.cache_clear()


def kernels() -> str | None:
    forget()
    found: str | None = machine_facts("none").get("kernels")
    return found


def test_a_gpu_is_measured_again_when_a_kernel_changes(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was checked is one of the kernels of then; a comment changes no kernel."""
    monkeypatch.setattr(device, "kind", lambda: "metal")
    before = kernels()
    file = sources / "merge.h"
    file.write_text("// one more sentence\n" + file.read_text("utf-8"), "utf-8")
    assert kernels() == before is not None
    text = file.read_text("utf-8")
    file.write_text(text.replace("SPLIT - 1", "SPLIT - 2"), "utf-8")
    assert kernels() != before
    file.write_text(text, "utf-8")
    assert kernels() == before
    (sources.parent / "variant.py").write_text("SIMDS = 3\n", "utf-8")
    assert kernels() != before


def test_a_cpu_is_not(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: "cpu")
    assert kernels() is None

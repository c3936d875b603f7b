"""Tables of ``batchkv cache`` fit the output: 80 columns without a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.blocks.manifests import encode_manifest
from batchkv_cache_store.blocks.names import block_name, manifest_name
from batchkv_cache_store.cli import group
from batchkv_cache_store.cli.table import Column, first_digits, table_lines, without_middle
from batchkv_cache_store.cli.text import Size
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_producer.cli import cli
from cache_store.blocks import PLAIN, chain_of, encoded

MIB = 2**20
MANIFEST = {"format": 1, "model": "test"}  # of blocks.NAMESPACE
COLUMNS = (
    Column("KEY", ["0123456789abcdef"], first_digits, min_width=6),
    Column("SIZE", [Size(4_200_000)]),
    Column("LESS", [12], drop=1),
    Column("LEAST", [None], drop=2),
    Column("ZERO", [0], if_any=True),
    Column("PATH", ["disk:/a/long/folder"], without_middle, min_width=8),
)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "0123456789abcdef  4.2 MB    12  -      disk:/a/long/folder"),
        (50, "0123456789ab  4.2 MB    12  -      disk:/a..folder"),
        (40, "0123456  4.2 MB    12  -      disk..lder"),
        (30, "012345678  4.2 MB  disk:..lder"),
        (10, "012345  4.2 MB  dis..der"),
    ],
)
def test_texts_are_shortened_before_columns_are_left_out(width: int, line: str) -> None:
    """Texts shrink to their least width; then columns go by ``drop``; the others always stay."""
    titles, row = table_lines(COLUMNS, width)
    assert row == line and len(titles) <= max(width, len(line))
    assert ("LESS" in titles, "LEAST" in titles) == (width >= 40, width >= 40)
    assert "ZERO" not in titles


def test_a_table_without_rows_is_its_titles() -> None:
    """Without rows only titles are printed, without those of ``if_any`` columns."""
    empty = [dataclasses.replace(column, values=[]) for column in COLUMNS]
    assert table_lines(empty, 80) == ["KEY  SIZE  LESS  LEAST  PATH"]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DiskTier:
    """A disk tier at a long path, with a value for each column."""
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    root = tmp_path / ("folder-of-blocks-" * 8) / "cache"
    root.parent.mkdir()
    monkeypatch.setenv("BATCHKV_CACHE", f"disk:{root}?max=4MiB")
    disk = DiskTier(root, 4 * MIB)
    blocks = chain_of(range(24), num_bytes=40_000)
    blocks += [dataclasses.replace(block, kind=kind) for block in blocks for kind in Kind]
    names = [block_name(block.key, block.kind) for block in blocks]
    for name, block in zip(names, blocks, strict=True):
        disk.put(name, [encoded(block, PLAIN)])
    digest, text = encode_manifest({**MANIFEST, **{f"field {n}": "x" * 30 for n in range(9)}})
    disk.put(manifest_name(digest), [text])
    disk.put(f"{7:064x}.kv", [b"x"])
    disk.set_aside(names[5])
    disk.pin(names[:2])
    (root / "photo.jpg").write_bytes(b"x")
    (root / "usage").write_bytes(b"%020d\n%020d" % (disk.stats().num_bytes or 0, 1234))
    return disk


@pytest.mark.parametrize(
    "command", ["stats", "stats --by-namespace", "ls", "verify", "gc --dry-run", "clear --yes"]
)
def test_every_table_fits_80_columns(crowded: DiskTier, command: str) -> None:
    """With a long path and a value in each column, no line is wider; counts are not cut."""
    shown = CliRunner().invoke(cli, ["cache", *command.split()]).stdout
    assert shown and max(map(len, shown.splitlines())) <= 80
    if command.startswith("stats"):
        found = CliRunner().invoke(cli, ["cache", *command.split(), "--json"]).stdout
        (tier,) = json.loads(found)["tiers"]
        titles, row = (line.split() for line in shown.splitlines()[:2])
        assert titles[1:4] == ["KV", "WINDOW", "STATE"]
        assert row[1:4] == [str(tier["counts"][kind]) for kind in ("kv", "window", "state")]
        assert titles[-3:] == ["EVICTED", "ASIDE", "PINNED"] and row[-3:] == ["1,234", "1", "2"]
    if command == "ls":
        assert "(truncated)" in shown and shown.count(" yes\n") == 2


def test_every_help_fits_80_columns() -> None:
    """The help of the group and of its commands is as wide, and no command's summary is cut."""
    helps = {"": CliRunner().invoke(cli, ["cache", "--help"]).stdout}
    for name in group.cache.commands:
        helps[name] = CliRunner().invoke(cli, ["cache", name, "--help"]).stdout
    for text in helps.values():
        assert text and max(map(len, text.splitlines())) <= 80
    listed = helps[""].partition("Commands:")[2]
    assert listed and not [line for line in listed.splitlines() if line.endswith("...")]

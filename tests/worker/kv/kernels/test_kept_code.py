"""Machine code that is kept: read again, sealed, and never a reason to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from batchkv_worker.kv.kernels import kept_code
from batchkv_worker.kv.kernels.kept_code import KeptCode

CODE = bytes(range(256)) * 8


def of(kept: KeptCode, digest: str = "a" * 32, code: bytes = CODE) -> tuple[bytes, bool]:
    """The code of a digest, and whether it was compiled for this."""
    asked: list[int] = []
    return kept.of(digest, lambda: asked.append(1) or code), bool(asked)


def test_code_is_compiled_once(tmp_path: Path) -> None:
    """In a folder that is made for it, by its digest alone."""
    kept = KeptCode(tmp_path / "home" / "kernels")
    assert of(kept) == (CODE, True)
    assert of(kept) == of(KeptCode(kept.folder)) == (CODE, False)
    assert of(kept, "b" * 32, b"other") == (b"other", True)
    assert not [*kept.folder.glob(".*")]


@pytest.mark.parametrize("spoil", [
    lambda found: found[:-1],
    lambda found: found[:40] + bytes([found[40] ^ 1]) + found[41:],
    lambda found: found[:32],
    lambda found: b"",
])  # fmt: skip
def test_a_spoilt_file_is_compiled_again(spoil: object, tmp_path: Path) -> None:
    kept = KeptCode(tmp_path)
    of(kept)
    (file,) = tmp_path.glob("*.cubin")
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    assert of(kept) == (CODE, True)
    assert of(kept) == (CODE, False)


def test_code_of_another_digest_is_no_code(tmp_path: Path) -> None:
    """A file that got another's name."""
    kept = KeptCode(tmp_path)
    of(kept, "b" * 32, b"other")
    (tmp_path / f"{'b' * 32}.cubin").rename(tmp_path / f"{'a' * 32}.cubin")
    assert of(kept) == (CODE, True)


@pytest.mark.parametrize("what", ["folder", "file", "link", "linked folder", "owner"])
def test_what_others_may_have_written_is_not_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run on the device. Folders are made for this user alone."""
    kept = KeptCode(tmp_path / "home" / "kernels")
    assert kept.folder is not None
    of(kept)
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    (file,) = kept.folder.glob("*.cubin")
    if what == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    elif what == "folder":
        kept.folder.chmod(0o770)
    elif what == "file":
        file.chmod(0o602)
    elif what == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        kept.folder.rename(tmp_path / "elsewhere")
        kept.folder.symlink_to(tmp_path / "elsewhere")
    assert of(kept) == (CODE, True)


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Those that are a day old: others may still be written."""
    for name, age in ((".old.tmp", kept_code.LOST_SECONDS + 60), (".new.tmp", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    of(KeptCode(tmp_path))
    assert sorted(one.name for one in tmp_path.glob(".*.tmp")) == [".new.tmp"]


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    """There is a file in its place; and without any folder nothing is kept."""
    (tmp_path / "kernels").write_text("no folder")
    for kept in (KeptCode(tmp_path / "kernels"), KeptCode()):
        assert of(kept) == of(kept) == (CODE, True)


def test_the_oldest_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "MAX_FILES", 3)
    kept = KeptCode(tmp_path)
    for number in range(5):
        of(kept, f"{number}")
        os.utime(tmp_path / f"{number}.cubin", (number, number))
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["2", "3", "4"]

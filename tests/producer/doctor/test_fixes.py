"""``--fix`` changes what batchkv made and nobody stored, and nothing else."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from batchkv_producer.doctor.contract import Level
from batchkv_producer.doctor.fixes import apply_fixes, find_fixes, judge_own, own_facts
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.local.presence import Record

OLD = time.time() - 8 * 86_400


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home folder with what users stored in it, and a temporary folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = Path(tempfile.mkdtemp(prefix="bkv-", dir="/tmp"))
    for name in ("data", "logs", "workers", "measured", "blocks"):
        (folder / name).mkdir(mode=0o700)
    for name in ("data/appendonly.aof", "logs/server.log", "blocks/one.kv", "queue.url"):
        old(folder / name, "stored by a user")
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def old(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, (OLD, OLD))


def machine(home: Path) -> Machine:
    return Machine("linux", {"BATCHKV_HOME": str(home)}, home.parent)


def mend(home: Path) -> list[str]:
    """What was done; every change must succeed."""
    done = list(apply_fixes(find_fixes(machine(home))))
    assert not [why for _, why in done if why]
    return [what for what, _ in done]


def test_a_good_home_is_left_alone(home: Path) -> None:
    """There is nothing to mend, and what users stored stays byte for byte."""
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert own_facts(machine(home)) == ()
    assert judge_own(()).level is Level.OK
    assert mend(home) == []
    after = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert after == before


LEFTOVERS = (".fingerprints.json.x7", ".doctor.ab", ".room.4711", "workers/77-ab.part",
             "measured/.new.json")  # fmt: skip


@pytest.mark.parametrize("name", LEFTOVERS)
def test_leftovers_of_dead_commands_go(home: Path, name: str) -> None:
    """An old temporary file is removed; one that may still be written stays."""
    (home / name).write_text("half")
    assert own_facts(machine(home)) == ()
    os.utime(home / name, (OLD, OLD))
    verdict = judge_own(own_facts(machine(home)))
    assert verdict.level is Level.WARN and "--fix" in verdict.todo
    assert (home / name).exists()
    assert len(mend(home)) == 1
    assert not (home / name).exists()


@pytest.mark.parametrize("broken", ['{"facts": {}, "resu', "[]", '{"facts": 7}', ""])
@pytest.mark.parametrize("name", ["fingerprints.json", "measured/abc.json"])
def test_broken_measurements_go_and_whole_ones_stay(home: Path, name: str, broken: str) -> None:
    """What is no JSON, or has no results, is measured again anyway."""
    (home / name).write_text('{"facts": {}, "results": {}}')
    (home / "measured" / "lock").touch()
    assert own_facts(machine(home)) == ()
    if (name, broken) == ("fingerprints.json", '{"facts": 7}'):
        return  # any object is a file of digests
    (home / name).write_text(broken)
    assert len(mend(home)) == 1
    assert not (home / name).exists()


def test_open_folders_are_closed(home: Path) -> None:
    """The home folder and those in it are closed to other users; their files stay."""
    home.chmod(0o755)
    (home / "logs").chmod(0o770)
    done = mend(home)
    assert len(done) == 2 and "755" in done[0]
    assert [(home / name).stat().st_mode & 0o777 for name in (".", "logs")] == [0o700, 0o700]
    assert mend(home) == []


def test_links_are_not_followed(home: Path, tmp_path: Path) -> None:
    """A link in the place of a leftover stays, and so does what it leads to."""
    old(tmp_path / "elsewhere", "somebody's")
    (home / ".room.1").symlink_to(tmp_path / "elsewhere")
    assert mend(home) == []
    assert (tmp_path / "elsewhere").read_text() == "somebody's"


def test_the_socket_of_a_dead_server_goes(home: Path) -> None:
    """A socket that nobody holds any more is removed."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "redis.sock"))
    os.utime(home / "redis.sock", (OLD, OLD))
    assert len(mend(home)) == 1


def test_files_of_workers_bring_rows_back_and_stay(home: Path) -> None:
    """Only a file of over a week ago goes, and not that of a process that may live."""
    record = Record("w", "q", "s", 15.0, "an earlier boot", "", 1, "then")
    path = home / "workers" / "1-ab.json"
    path.write_text(json.dumps(asdict(record)))
    assert mend(home) == []
    os.utime(path, (OLD, OLD))
    assert len(mend(home)) == 1


def test_folders_of_a_doctor_that_died_go(home: Path, tmp_path: Path) -> None:
    """What was left in the temporary folder is removed when it is old."""
    folder = tmp_path / "tmp" / "batchkv-doctor-x"
    folder.mkdir()
    (folder / "reached").write_text("{}")
    assert mend(home) == []
    os.utime(folder, (OLD, OLD))
    assert len(mend(home)) == 1
    assert not folder.exists()


def test_a_change_that_cannot_be_made_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stands beside it, and the other changes are made."""
    old(home / ".room.1", "half")
    old(home / ".doctor.1", "half")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == ".room.1":
            raise PermissionError(1, "Operation not permitted")
        os.remove(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    done = dict(apply_fixes(find_fixes(machine(home))))
    monkeypatch.undo()
    assert sorted(done.values()) == ["", "Operation not permitted"]

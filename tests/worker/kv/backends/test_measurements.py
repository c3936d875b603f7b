"""Results of measurements are kept, and a later start uses them."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchkv_worker.kv.backends import measurements
from batchkv_worker.kv.backends.measurements import (
    FOLDER,
    LOCK,
    TEXT,
    WHOLE,
    YES_OR_NO,
    Measurements,
    broken_files,
)

FACTS = {"chip": "M4", "slots": 32}


def of_home(home: Path, facts: Any = FACTS, **how: bool) -> Measurements:
    return Measurements.in_home(home, facts, **how)


def never() -> Any:
    pytest.fail("measured")


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    """It has the results of the first, in their types."""
    first = of_home(tmp_path)
    assert first.of("cells", lambda: 700, WHOLE) == 700
    assert first.of("faster", lambda: True, YES_OR_NO) is True
    assert first.has_measured
    second = of_home(tmp_path)
    assert second.of("cells", never, WHOLE) == 700
    assert second.of("faster", never, YES_OR_NO) is True
    assert not second.has_measured
    assert second.results() == first.results() == {"cells": 700, "faster": True}


def test_one_start_measures_a_thing_once(tmp_path: Path) -> None:
    """Also where the file is removed meanwhile; without a file all is measured each time."""
    one = of_home(tmp_path)
    assert one.of("cells", lambda: 1, WHOLE) == 1
    assert one.file is not None
    one.file.unlink()
    assert one.of("cells", never, WHOLE) == 1
    unkept = Measurements()
    assert [unkept.of("cells", lambda n=n: n, WHOLE) for n in (3, 4)] == [3, 4]


@pytest.mark.parametrize("name", ["chip", "slots", "new"])
def test_other_facts_have_results_of_their_own(name: str, tmp_path: Path) -> None:
    """A fact that differs, or is new."""
    of_home(tmp_path).of("cells", lambda: 1, WHOLE)
    assert of_home(tmp_path, {**FACTS, name: "other"}).of("cells", lambda: 2, WHOLE) == 2
    assert of_home(tmp_path).of("cells", never, WHOLE) == 1


def test_another_version_of_the_measuring_code_measures_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_home(tmp_path).of("cells", lambda: 1, WHOLE)
    monkeypatch.setattr(measurements, "VERSION", measurements.VERSION + 1)
    assert of_home(tmp_path).of("cells", lambda: 2, WHOLE) == 2


def test_anew_replaces_what_was_kept(tmp_path: Path) -> None:
    """Name by name; what is not measured again stays."""
    first = of_home(tmp_path)
    first.of("cells", lambda: 1, WHOLE)
    first.of("digest", lambda: "d", TEXT)
    anew = of_home(tmp_path, is_anew=True)
    assert [anew.of("cells", lambda: 2, WHOLE), anew.of("cells", never, WHOLE)] == [2, 2]
    later = of_home(tmp_path)
    assert [later.of("cells", never, WHOLE), later.of("digest", never, TEXT)] == [2, "d"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"facts": {}}',
        b'{"facts": {"chip": "M1"}, "results": {"cells": 9}}',
        b'{"results": {"cells": 9}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_measured_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log once, and is right afterwards."""
    one = of_home(tmp_path)
    assert one.file is not None
    one.of("cells", lambda: 1, WHOLE)
    one.file.write_bytes(content)
    again = of_home(tmp_path)
    assert again.of("cells", lambda: 2, WHOLE) == 2
    assert again.of("faster", lambda: False, YES_OR_NO) is False
    assert [str(one.file) in line for line in caplog.messages] == [True]
    assert of_home(tmp_path).of("cells", never, WHOLE) == 2
    assert broken_files(tmp_path) == []


@pytest.mark.parametrize("value", ["7", True, 7.0, None, [], {}])
def test_what_is_no_result_is_measured_anew(value: Any, tmp_path: Path) -> None:
    """The others of the file are used."""
    one = of_home(tmp_path)
    assert one.file is not None
    one.of("cells", lambda: 1, WHOLE)
    one.of("more", lambda: 2, WHOLE)
    content = json.loads(one.file.read_text())
    content["results"]["cells"] = value
    one.file.write_text(json.dumps(content))
    again = of_home(tmp_path)
    assert again.of("cells", lambda: 3, WHOLE) == 3
    assert again.of("more", never, WHOLE) == 2


def test_a_home_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start goes on without; the log says it once."""
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    one = of_home(tmp_path)
    assert [one.of("cells", lambda: 1, WHOLE), one.of("more", lambda: 2, WHOLE)] == [1, 2]
    assert one.of("cells", never, WHOLE) == 1
    assert len(caplog.messages) == 1 and "measured" in caplog.messages[0]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    one = of_home(tmp_path)
    one.of("cells", lambda: 1, WHOLE)
    assert one.file is not None
    assert one.file.stat().st_mode & 0o77 == 0
    assert one.file.parent.stat().st_mode & 0o77 == 0
    assert {file.name for file in one.file.parent.iterdir()} == {one.file.name, LOCK}


def test_a_measurement_may_have_parts(tmp_path: Path) -> None:
    """One that asks for another does not wait for itself."""
    one = of_home(tmp_path)
    begun = time.monotonic()
    whole = one.of("whole", lambda: 1 + one.of("part", lambda: 1, WHOLE), WHOLE)
    assert whole == 2
    assert time.monotonic() - begun < measurements.LOCK_SECONDS
    assert of_home(tmp_path).of("part", never, WHOLE) == 1


START = """
import os, sys, time
from pathlib import Path
from batchkv_worker.kv.backends.measurements import WHOLE, Measurements
home, go = map(Path, sys.argv[1:])
def measure():
    (home / f"measured-by-{os.getpid()}").touch()
    time.sleep(0.2)
    return os.getpid()
while not go.exists():
    time.sleep(0.01)
print(Measurements.in_home(home, {}).of("cells", measure, WHOLE))
"""


def test_workers_that_start_at_once_choose_the_same(tmp_path: Path) -> None:
    """One of them measures, and the others wait for it."""
    go = tmp_path / "go"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(tmp_path), str(go)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    go.touch()
    found = {process.communicate(timeout=60)[0] for process in started}
    assert len(found) == 1
    assert len(list(tmp_path.glob("measured-by-*"))) == 1


def test_a_worker_that_measures_for_ever_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while one measures without the lock; what the other kept meanwhile still counts."""
    monkeypatch.setattr(measurements, "LOCK_SECONDS", 0.1)
    (tmp_path / FOLDER).mkdir()
    with (tmp_path / FOLDER / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert of_home(tmp_path).of("cells", lambda: 1, WHOLE) == 1
        assert "not waiting" in caplog.text

        def measure() -> int:  # and meanwhile the other is done
            other = of_home(tmp_path)
            assert other.file is not None
            content = json.loads(other.file.read_text())
            content["results"]["more"] = 5
            other.file.write_text(json.dumps(content))
            return 6

        assert of_home(tmp_path).of("more", measure, WHOLE) == 5


def test_a_killed_worker_leaves_no_lock(tmp_path: Path) -> None:
    """The system drops it with the process."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_while_measuring, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert of_home(tmp_path).of("cells", lambda: 1, WHOLE) == 1


def _die_while_measuring(home: Path) -> None:
    of_home(home).of("cells", lambda: os._exit(7), WHOLE)  # type: ignore[arg-type, return-value]


def test_the_oldest_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of versions and models that nobody starts any more."""
    monkeypatch.setattr(measurements, "MAX_FILES", 3)
    files = []
    for number in range(5):
        one = of_home(tmp_path, {"number": number})
        one.of("cells", lambda: 1, WHOLE)
        assert one.file is not None
        files.append(one.file)
        os.utime(one.file, (number, number))
    assert [file.exists() for file in files] == [False, False, True, True, True]


def test_broken_files_are_named(tmp_path: Path) -> None:
    """And what an interrupted write left; sound files are not."""
    assert broken_files(tmp_path) == []
    of_home(tmp_path).of("cells", lambda: 1, WHOLE)
    bad, left = tmp_path / FOLDER / "bad.json", tmp_path / FOLDER / ".x.tmp"
    bad.write_text("{")
    left.write_text("")
    assert broken_files(tmp_path) == [bad, left]

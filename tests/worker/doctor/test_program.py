"""The process of the worker's checks: lines of JSON, and nothing else, whatever happens."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from batchkv_producer.doctor.contract import Level, Verdict, ok
from batchkv_worker.doctor import device, program
from batchkv_worker.errors import ModelError


def lines(request: dict[str, object]) -> list[dict[str, object]]:
    out = io.StringIO()
    program.run(request, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_each_check_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when it begins, so that a crash has a name, and one with the verdict."""
    monkeypatch.setattr(device, "steps", lambda: iter([("one", lambda: ok("fine")),
                                                       ("two", lambda: None)]))  # fmt: skip
    first, second, third = lines({"part": "device"})
    assert first == {"begin": "one"} and third == {"begin": "two"}
    assert (second["name"], second["level"], second["found"]) == ("one", "ok", "fine")


def refuse(fault: Exception) -> Callable[[], NoReturn]:
    def make() -> NoReturn:
        raise fault

    return make


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        (ModelError("the model is of no kind"), Level.FAIL, "of no kind"),
        (MemoryError(), Level.FAIL, "memory ran out"),
        (RuntimeError("[metal::malloc] failed"), Level.WARN, "RuntimeError: [metal::malloc]"),
    ],
)
def test_a_check_that_raises_is_a_verdict(fault: Exception, level: Level, words: str) -> None:
    """Our own errors keep their sentence; others are said with their kind."""
    verdict = program.made(refuse(fault))
    assert verdict is not None and verdict.level is level and words in verdict.found


def test_without_mlx_there_are_no_checks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that submits has nothing to check; a model asked for is a failure."""
    monkeypatch.setattr(program, "has_mlx", lambda: False)
    assert lines({"part": "device"}) == []
    _, said = lines({"part": "model", "model": "demo"})
    assert said["level"] == "fail" and "make venv" in str(said["todo"])


def test_the_process_ends_with_doctor() -> None:
    """Whoever kills doctor alone leaves no load behind: the closed input ends the process."""
    code = (
        "import sys, time; from batchkv_worker.doctor.program import end_with_parent\n"
        "end_with_parent(sys.stdin); print('ready', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL


def test_verdicts_are_what_the_parent_reads() -> None:
    """The levels are the three words that both sides know."""
    assert [str(level) for level in Level] == ["ok", "warn", "fail"]
    assert Verdict(Level("warn"), "f", "t").level is Level.WARN

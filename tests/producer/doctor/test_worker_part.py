"""The process that makes the worker's checks: whatever it does, doctor ends and says so."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from batchkv_producer.doctor.contract import Finding, Level
from batchkv_producer.doctor.worker_part import Request, run_part

SAY = """import json, sys, time, os
asked = json.loads(sys.stdin.readline())
def say(**values): print(json.dumps(values), flush=True)
"""
GOOD = 'say(begin="one")\nsay(name="one", level="ok", found="fine", todo="", seconds=0.1)\n'


def run(tmp_path: Path, text: str, seconds: float = 30.0) -> list[Finding]:
    """The findings of a program instead of the worker's."""
    script = tmp_path / "part.py"
    script.write_text(SAY + text)
    request = Request(seconds, {"part": "device"})
    return list(run_part("", request, os.environ, [sys.executable, str(script)]))


def test_findings_are_passed_on(tmp_path: Path) -> None:
    """Each with its level and sentences; other lines of output are passed over."""
    text = 'print("a library says hello")\nprint("[1]")\n' + GOOD
    (found,) = run(tmp_path, text)
    assert (found.name, found.verdict.level, found.verdict.found) == ("one", Level.OK, "fine")


def test_the_request_is_on_standard_input(tmp_path: Path) -> None:
    """It may hold passwords, which no command line may."""
    text = 'say(name=asked["part"], level="ok", found="", todo="", seconds=0)\n'
    assert [each.name for each in run(tmp_path, text)] == ["device"]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("sys.stderr.write('no kernel image\\n'); sys.exit(7)", "no kernel image"),
        ("raise RuntimeError('[METAL] no device')", "[METAL] no device"),
    ],
)
def test_a_crash_names_the_check_that_began(tmp_path: Path, ending: str, words: str) -> None:
    """What was found before stays, and the check that was being made is a failure."""
    first, second = run(tmp_path, f'{GOOD}say(begin="matrix products")\n{ending}\n')
    assert first.name == "one"
    assert second.name == "matrix products" and second.verdict.level is Level.FAIL
    assert words in second.verdict.found


def test_the_request_stays_open_until_the_end(tmp_path: Path) -> None:
    """So the process can tell that doctor is gone: it must not read the end before."""
    text = f"""
import threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(9)), daemon=True).start()
time.sleep(0.3)
{GOOD}"""
    assert [each.verdict.level for each in run(tmp_path, text)] == [Level.OK]


def test_a_hang_is_given_up(tmp_path: Path) -> None:
    """After its time the process is ended, and the check that hangs is named."""
    script = tmp_path / "part.sh"  # a shell, which starts at once also on a busy machine
    script.write_text('echo \'{"begin": "attention"}\'\nsleep 600\n')
    command = ["sh", str(script)]
    for may_be_late, level in ((False, Level.FAIL), (True, Level.WARN)):
        request = Request(1.0, {}, may_be_late)
        (found,) = run_part("", request, os.environ, command)
        assert (found.name, found.verdict.level) == ("attention", level)
        assert "did not end in time" in found.verdict.found


def test_a_process_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    """Nothing was begun, and the reason is said."""
    script = tmp_path / "part.py"
    script.write_text("import no_such_module_at_all\n")
    (found,) = run_part("", Request(30.0, {}), os.environ, [sys.executable, str(script)])
    assert found.verdict.level is Level.FAIL
    assert "no_such_module_at_all" in found.verdict.found


@pytest.mark.parametrize("line", ['{"name": "x"}', '{"name": "x", "level": "bad"}', "{", "null"])
def test_lines_that_are_no_findings_are_passed_over(tmp_path: Path, line: str) -> None:
    """A line that is cut or of another shape ends nothing."""
    assert [each.name for each in run(tmp_path, f"print({line!r})\n{GOOD}")] == ["one"]


def test_levels_survive_the_way(tmp_path: Path) -> None:
    """Warnings and failures arrive as such."""
    lines = [{"name": level, "level": level, "found": "f", "todo": "t", "seconds": 1.5}
             for level in ("ok", "warn", "fail")]  # fmt: skip
    text = "".join(f"print({json.dumps(each)!r})\n" for each in lines)
    assert [each.verdict.level for each in run(tmp_path, text)] == list(Level)

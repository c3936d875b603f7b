"""``make test``: what fails beside other tests has to pass alone, every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "run_tests.py"
TWO = ("-n", "2", "--dist", "loadfile")  # processes, as ``make test`` has them
# A test that fails in the runs that stand in FAILS; a file counts them.
COUNTED = """
from pathlib import Path

FAILS = {fails}


def test_{name}():
    runs = Path(__file__).with_suffix(".runs")
    number = int(runs.read_text()) if runs.exists() else 0
    runs.write_text(str(number + 1))
    assert number not in FAILS
"""


def ran(folder: Path, *options: str, **fails: tuple[int, ...]) -> tuple[int, str, dict[str, int]]:
    """Exit code, output, and how many times each test ran, of tests that fail in some runs."""
    for name, numbers in fails.items():
        (folder / f"test_{name}.py").write_text(COUNTED.format(name=name, fails=set(numbers)))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra -p xdist.plugin\n")
    command = [sys.executable, str(TOOL), *options]
    # The tool under test starts workers of its own.
    others = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    others["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take a second of each run
    done = subprocess.run(
        command, cwd=folder, env=others, capture_output=True, text=True, check=False
    )
    counts = {
        name: int((folder / f"test_{name}.runs").read_text())
        for name in fails
        if (folder / f"test_{name}.runs").exists()
    }
    return done.returncode, done.stdout + done.stderr, counts


def test_a_failure_that_does_not_come_again_is_named(tmp_path: Path) -> None:
    """It failed once and passes three times alone: the run passes, and says what to mend."""
    code, output, counts = ran(tmp_path, *TWO, good=(), shaky=(0,))
    assert code == 0, output
    assert "or on load: test_shaky.py::test_shaky\n" in output
    assert "assert 0 not in {0}" in output  # the first failure can be read
    assert counts == {"good": 1, "shaky": 5}  # three times alone, and once with its file


@pytest.mark.parametrize("fails", [(0, 1), (0, 3), (0, 4)], ids=str)
def test_a_failure_that_comes_again_fails_the_run(fails: tuple[int, ...], tmp_path: Path) -> None:
    """Once more is enough: in one of three runs alone, or beside the tests of its file."""
    code, output, counts = ran(tmp_path, bad=fails, good=())
    assert (code, counts) == (1, {"bad": fails[1] + 1, "good": 1}), output
    assert "Mend" not in output


def test_many_failures_run_once(tmp_path: Path) -> None:
    """Four are no accident."""
    code, output, counts = ran(tmp_path, one=(0,), two=(0,), three=(0,), four=(0,))
    assert (code, set(counts.values())) == (1, {1}), output


# Whether a file is run for the first time.
FIRST = """
import os
from pathlib import Path

import pytest

RUNS = Path(__file__).with_suffix(".first")
IS_FIRST = not RUNS.exists()
"""
OTHERS = {
    "a file that cannot be read": "import nothing_that_exists\n",
    "a process that dies": (
        "def test_dies():\n    if IS_FIRST:\n        RUNS.touch()\n        os._exit(1)\n"
    ),
    "a fixture": (
        "@pytest.fixture\ndef broken():\n    yield\n    RUNS.touch()\n    assert not IS_FIRST\n\n"
        "def test_it(broken):\n    pass\n"
    ),
    "a test that depends on one before it": (
        "SEEN = []\n\ndef test_one():\n    SEEN.append(1)\n\ndef test_two():\n    assert not SEEN\n"
    ),
    "a test that fails beside other processes": (
        "def test_it():\n    assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    ),
    "a test that is skipped alone": (
        "def test_it():\n    if not IS_FIRST:\n        pytest.skip('alone')\n"
        "    RUNS.touch()\n    assert False\n"
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_accident_fails_the_run(what: str, tmp_path: Path) -> None:
    """Also beside a failure that does not come again."""
    (tmp_path / "test_other.py").write_text(FIRST + OTHERS[what])
    shaky: dict[str, tuple[int, ...]] = {} if what.startswith("a test") else {"shaky": (0,)}
    code, output, counts = ran(tmp_path, *TWO, **shaky)
    assert code != 0 and "Mend" not in output, output
    assert counts == dict.fromkeys(shaky, 1)


def test_modules_are_found_as_by_python_m_pytest(tmp_path: Path) -> None:
    """The folder in which it is started is one where modules are searched."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_it.py").write_text("import beside\n\ndef test_it():\n    pass\n")
    code, output, _ = ran(tmp_path, *TWO, good=())
    assert code == 0 and "2 passed" in output, output


def test_a_part_of_the_suite_runs_once(tmp_path: Path) -> None:
    """Options may be what makes a test fail, or may leave tests out."""
    code, output, counts = ran(tmp_path, "-x", bad=(0,), good=())
    assert (code, counts) == (1, {"bad": 1}), output

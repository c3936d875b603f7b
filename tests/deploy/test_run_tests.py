"""``make test``: what fails beside other tests has to pass alone, every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "run_tests.py"
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
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, str(TOOL), *options]
    # The tool under test starts workers of its own.
    others = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
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
    code, output, counts = ran(tmp_path, "-n", "2", good=(), shaky=(0,))
    assert code == 0, output
    assert "Mend what depends on load: test_shaky.py::test_shaky\n" in output
    assert "assert 0 not in {0}" in output  # the first failure can be read
    assert counts == {"good": 1, "shaky": 4}


@pytest.mark.parametrize("fails", [(0, 1), (0, 3)], ids=str)
def test_a_failure_that_comes_again_fails_the_run(fails: tuple[int, ...], tmp_path: Path) -> None:
    """Once more in one of three runs alone is enough."""
    code, output, counts = ran(tmp_path, bad=fails, good=())
    assert (code, counts) == (1, {"bad": fails[1] + 1, "good": 1}), output
    assert "Mend" not in output


def test_many_failures_run_once(tmp_path: Path) -> None:
    """Four are no accident."""
    code, output, counts = ran(tmp_path, one=(0,), two=(0,), three=(0,), four=(0,))
    assert (code, set(counts.values())) == (1, {1}), output


def test_a_run_that_was_cut_short_is_not_mended(tmp_path: Path) -> None:
    """Tests that had no turn have not passed."""
    code, output, counts = ran(tmp_path, "-x", bad=(0,), good=())
    assert (code, counts) == (1, {"bad": 1}), output


def test_a_file_that_cannot_be_read_fails_the_run(tmp_path: Path) -> None:
    """Its tests are unknown, so none of them can pass."""
    (tmp_path / "test_broken.py").write_text("import nothing_that_exists\n")
    code, output, counts = ran(tmp_path, good=())
    assert (code, counts) == (2, {}), output

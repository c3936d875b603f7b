"""Which cases of a test with many the suite runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.few_cases import choose

FILE = """
import pytest


@pytest.mark.few(3)
@pytest.mark.parametrize("row", [1, 2, 3])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_many(row, kind):
    pass


@pytest.mark.parametrize("row", [1, 2])
def test_all(row):
    pass
"""


def test_few_cases_have_every_value() -> None:
    """Of two parameters, as many cases as the longer one has values."""
    cases = [{"x": x, "y": y} for x, y in itertools.product(range(4), "abc")]
    chosen = choose(cases, 4)
    assert chosen == sorted(chosen) == choose(cases, 4) and len(chosen) == 4
    assert {cases[place]["x"] for place in chosen} == {0, 1, 2, 3}
    assert {cases[place]["y"] for place in chosen} == {"a", "b", "c"}


def test_cases_of_one_parameter_are_spread() -> None:
    """The first and the last one among them."""
    cases = [{"x": number} for number in range(9)]
    assert choose(cases, 3) == [0, 4, 8]
    assert choose(cases, 20) == [*range(9)] and choose([], 2) == []


@pytest.mark.parametrize(
    ("words", "runs_all", "passed"),
    [
        ([], "", "5 passed, 3 deselected"),
        ([], "all", "8 passed"),
        (["-k", "b-1"], "", "8 deselected"),  # not among the few, which are chosen first
        (["-k", "b-1"], "all", "1 passed, 7 deselected"),
        (["test_case.py::test_many[b-2]"], "", "1 passed"),
    ],
)
def test_the_suite_runs_few(words: list[str], runs_all: str, passed: str, tmp_path: Path) -> None:
    """All with the variable, and one that is named itself."""
    (tmp_path / "test_case.py").write_text(FILE)
    tests = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    ini = "[pytest]\nmarkers = few(count): few\n"
    (tmp_path / "pytest.ini").write_text(ini)
    environment = {**os.environ, "BATCHKV_PARITY": runs_all, "PYTHONPATH": str(tests)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take a second of each run
    environment["BKV_TEST_RUN"] = str(tmp_path / "measured")  # the run deletes its own
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"{passed} in" in done.stdout, done.stdout + done.stderr

# ruff: noqa: T201  (a helper that talks to a terminal)
"""Run the whole suite, and run again by itself what failed.

usage: python tools/run_tests.py [pytest's options]

Many tests start real processes, stop them and wait for them, and several such tests share the
cores. Now and then one fails because of what runs beside it. So at most ``MOST`` failed tests run
``TIMES`` times more, each in a process of its own with nothing beside it, and then once with all
tests of their files. If they pass every time, the exit code is 0, and they are named: they depend
on what runs beside them, and need mending. The first failure stays in the output.

In all other cases the exit code is pytest's. That is so for more failures, for a failure outside a
test's own function, for a process that died, for a file that cannot be read, and wherever options
say which tests run or how.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

MOST = 3  # more failures are no accident
TIMES = 3
SLOWEST = "--durations=25"  # tests that are named at the end, for the suite must stay short


class Failures:
    """A plugin that keeps the ids of the tests that failed, and whether anything else did.

    That is a fixture, a process that died, or a file that cannot be read.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.has_others = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.ids.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.has_others = session.testsfailed != len(self.ids)


def passes(test: str, options: list[str], environ: Mapping[str, str]) -> bool:
    """Whether the test passes, and is not skipped, in a run of its own; or all tests of a file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
        command += [f"--junitxml={report}", test]
        code = subprocess.run(command, check=False, env=dict(environ)).returncode
        if code != pytest.ExitCode.OK:
            return False
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        counts = [int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")]
        return "::" not in test or counts == [1, 0, 0, 0]


def main(arguments: list[str]) -> int:
    """Run pytest, then what failed. Returns the exit code."""
    environ, failures = dict(os.environ), Failures()
    sys.path.insert(0, os.getcwd())  # as for ``python -m pytest``
    code = int(pytest.main([*arguments, SLOWEST], plugins=[failures]))  # which adds to its list
    is_whole = arguments == [] or (arguments[0], *arguments[2:]) == ("-n", "--dist", "loadfile")
    if code != pytest.ExitCode.TESTS_FAILED or failures.has_others or not is_whole:
        return code
    if not 0 < len(failures.ids) <= MOST:
        return code
    for test in failures.ids:
        file = test.split("::")[0], ["-n", "1"] if arguments else []
        for what, options in [(test, [])] * TIMES + [file]:
            print(f"\nAgain, by itself: {what}", flush=True)
            if not passes(what, options, environ):
                print("It does not pass.", flush=True)
                return code
    names = ", ".join(failures.ids)
    print(f"Passed by itself each time. Mend what depends on other tests or on load: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

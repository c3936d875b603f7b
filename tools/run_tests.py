# ruff: noqa: T201  (a helper that talks to a terminal)
"""Run the tests. Those that failed run again, alone, and have to pass every time.

usage: python tools/run_tests.py [pytest's options]

Many tests start real processes, stop them and wait for them, and several such tests share the
cores. Now and then one fails because of what runs beside it. So at most ``MOST`` tests that failed
run ``TIMES`` times more, with nothing beside them. If each passes every time, the run passes, and
names them: they depend on load and need mending. The first failure stays in the output.
The exit code is pytest's.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3  # more failures are no accident
TIMES = 3


class Failures:
    """A plugin that keeps the ids of the tests that failed, and whether all had their turn."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.is_cut_short = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.ids:
            self.ids.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.is_cut_short = bool(session.shouldfail or session.shouldstop)


def passes_alone(ids: list[str]) -> bool:
    """Whether the tests pass ``TIMES`` times in a row, in a process of their own."""
    for number in range(TIMES):
        print(f"\nAlone, {number + 1} of {TIMES}: {', '.join(ids)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *ids]
        if subprocess.run(command, check=False).returncode != 0:
            return False
    return True


def main(arguments: list[str]) -> int:
    """Run pytest, then what failed. Returns the exit code."""
    failures = Failures()
    code = int(pytest.main(arguments, plugins=[failures]))
    if code != pytest.ExitCode.TESTS_FAILED or failures.is_cut_short:
        return code
    if not 0 < len(failures.ids) <= MOST:
        return code
    if not passes_alone(failures.ids):
        print("It fails alone, too.", flush=True)
        return code
    print(f"Passed alone {TIMES} times. Mend what depends on load: {', '.join(failures.ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The tables of accuracies stand at the end of a long run, whether it passed or not."""

from __future__ import annotations

import pytest

from recall.through_engine import COUNT, FAULT_COUNT, RUNS_ALL, fault_table, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Accuracy by scheme and family, and by fault, of the run that measures them all."""
    if not RUNS_ALL:
        return
    for count, lines in ((COUNT, table()), (FAULT_COUNT, fault_table())):
        if len(lines) > 2:
            terminalreporter.section(f"answers that are right, of {count} prompts")
            for line in lines:
                terminalreporter.write_line(line)

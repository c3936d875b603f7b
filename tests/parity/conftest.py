"""The count of compared rows stands at the end of every run, whether it passed or not."""

from __future__ import annotations

import pytest

from parity.harness import LEDGER


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many rows were compared, and every step that rounding decided."""
    if not LEDGER.num_rows:
        return
    terminalreporter.section("parity")
    terminalreporter.write_line(
        f"{LEDGER.num_rows} rows compared token for token; in {LEDGER.num_tied} of them rounding "
        "decided between two tokens, and the rest was compared from there on"
    )
    for tie in LEDGER.ties:
        terminalreporter.write_line(
            f"  {tie.where}: token {tie.step} of {tie.count}, lead {tie.margin:.5f}"
        )

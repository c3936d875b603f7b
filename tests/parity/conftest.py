"""What every test of parity has: launched steps leave nothing to compute, and rows are counted.

The count of compared rows stands at the end of every run, whether it passed or not.
"""

from __future__ import annotations

import io
import re
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine import decode_step
from batchkv_worker.engine import engine as engines
from parity.harness import LEDGER

_PRIMITIVE = re.compile(r'\[label ="([^"]*)"')


@pytest.fixture(autouse=True)
def all_buffers_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each step. Its launch names few of them, and what nothing needs would stay a graph,
    which grows with every step."""

    def start(upcoming: Any, landed: Any, slots: Any, launches: Any) -> Any:
        read = decode_step.start(upcoming, landed, slots, launches)
        if upcoming is not None:
            text = io.StringIO()
            mx.export_to_dot(text, *slots.arrays)
            assert _PRIMITIVE.findall(text.getvalue()) == []
        return read

    monkeypatch.setattr(engines, "start", start)


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

"""Rows on their way back from an engine that is in a long step."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_worker.queue import giving_back
from batchkv_worker.queue.giving_back import GivingBack
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.runs.dispatch import View, jobs_to_recall
from batchkv_worker.queue.runs.pace import Crowd, Pace


class Engine:
    """Notes what it is asked for, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def recall(self, job_ids: list[str], count: int) -> None:
        self.asked.append(count)


def test_one_surplus_is_recalled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers between two steps. Looks that come before do not ask for as many again."""
    told = Crowd(Pace(1.0, 30.0), (Pace(1.0, 0.0, free_slots=16),))
    view = View(16, 32, 46, 0, queued=0, num_workers=2, num_waiting=30, told=told)
    surplus = jobs_to_recall(view)
    assert 0 < surplus < 30
    engine: Any = Engine()
    in_flight = InFlight("m", "w")
    now = [100.0]
    monkeypatch.setattr(giving_back.time, "monotonic", lambda: now[0])
    unused: Any = None
    giving = GivingBack(unused, engine, in_flight, unused, lambda count: None)
    for _ in range(6):
        giving.return_surplus(view)
        giving.recall_surplus(view)
        now[0] += 0.25
    assert engine.asked == [surplus]
    in_flight.recall([])  # they had begun meanwhile
    giving.recall_surplus(view)
    assert engine.asked == [surplus, surplus]

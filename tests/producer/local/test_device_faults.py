"""Workers of a run whose GPU fails: they are started again, with pauses and not for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from batchkv_producer.local import local_workers
from batchkv_producer.local.local_workers import LocalWorkers, WorkerError, WorkerPlan

DEADLINE_SECONDS = 30.0
EXIT = ("sh", "-c", "exit 74")


class Run:
    """A run with one worker of that command; ``reclaimed`` says which of its ends were deaths."""

    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self.reclaimed: list[bool] = []
        self.notes: list[str] = []
        plan = WorkerPlan("m", "u", folder, "t", command=command)
        self.workers = LocalWorkers(plan, self._reclaim, self.notes.append)

    def _reclaim(self, name: str, is_death: bool) -> int:
        self.reclaimed.append(is_death)
        return 0

    def supervise_until(self, num_notes: int, num_ended: int = 0) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self.notes) < num_notes:
            assert time.monotonic() < deadline
            self.workers.supervise(num_ended)


def test_a_run_gives_up_after_some_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each restart comes with a note, no end is a death, and the error names the log."""
    monkeypatch.setattr(local_workers, "DEVICE_PAUSE_SECONDS", 0.0)
    run = Run(tmp_path, EXIT)
    with pytest.raises(WorkerError, match="died 5 times in a row"):
        run.supervise_until(num_notes=99)
    assert len(run.notes) == local_workers.MAX_DEVICE_FAULTS
    assert all("Its rows went back to the queue" in note for note in run.notes)
    assert "started again in 0 s" in run.notes[0] and "AGX_RELAX" in run.notes[0]
    assert "not started again" in run.notes[-1]
    assert run.reclaimed and not any(run.reclaimed)


def test_pauses_double_until_a_row_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A display that is on kills the next worker, too; progress starts the count anew."""
    monkeypatch.setattr(local_workers, "DEVICE_PAUSE_SECONDS", 0.001)
    run = Run(tmp_path, EXIT)
    run.supervise_until(num_notes=4)
    for note, pause in zip(run.notes, ("0.001 s", "0.002 s", "0.004 s", "0.008 s"), strict=True):
        assert f"started again in {pause}" in note
    run.supervise_until(num_notes=5, num_ended=1)
    assert "started again in 0.001 s" in run.notes[4]
    run.workers.kill()


def test_no_worker_starts_before_the_pause_is_over(tmp_path: Path) -> None:
    """The next one is not there yet when the first has just ended."""
    run = Run(tmp_path, EXIT)
    run.supervise_until(num_notes=1)
    begun = time.monotonic()
    run.workers.supervise(0)
    assert not run.workers.pids
    assert run.workers._slots[0].restart_at > begun

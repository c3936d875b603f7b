"""The soak in short: the real worker process under mixed load holds no more at the end."""

from __future__ import annotations

from pathlib import Path

from chaos.soak import soak

SECONDS = 6.0
# In seconds a median moves with the rows that happen to be in flight; `make soak` allows 2 %.
STEADY = ("threads", "descriptors")


def test_a_worker_under_mixed_load_stays_as_it_is(tmp_path: Path) -> None:
    """Threads and descriptors are the same to one: two threads that need Redis at once for the
    first time open a connection. Memory of the process and of Redis is the same within a tenth."""
    readings, _ = soak(tmp_path, SECONDS, seed=1)
    drifts = readings.drifts()
    assert all(drifts[name].last - drifts[name].second <= 1 for name in STEADY), drifts
    assert drifts["rss_kb"].share < 0.1
    assert drifts["redis_bytes"].share < 0.1

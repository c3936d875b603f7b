"""A machine that is short of memory: how that is read, and how the engine reacts."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchkv_producer.agreed import SHORT_OF_MEMORY
from batchkv_worker.engine import pressure, relief
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.pressure import (
    CALM_SECONDS,
    SWAP_CRITICAL,
    SWAP_SECONDS,
    SWAP_WARNING,
    Judge,
    Level,
    NoPressure,
    Pressure,
    Reading,
    Watcher,
)
from support import tiny_models
from worker.engine.test_oom import drain, submit
from worker.kv.crowd import model_of

NORMAL, WARNING, CRITICAL = Level.NORMAL, Level.WARNING, Level.CRITICAL
MEMINFO = """\
MemTotal:       16000000 kB
MemFree:          200000 kB
MemAvailable:   {available} kB
HugePages_Total:       0
SwapTotal:       2000000 kB
SwapFree:        1500000 kB
"""


class Planted:
    """A level that a test sets."""

    def __init__(self, level: Level = NORMAL) -> None:
        self.level = level
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def engine(source: Pressure | None = None, family: str = "llama", scheme: str = "float") -> Engine:
    config = EngineConfig(scheme, slots=4, chunk_tokens=256, memory_bytes=2**23, path="fused")
    model = model_of(family)
    measured = tiny_models.with_measured(model, config)
    return Engine(tiny_models.loaded(model), measured, pressure=source)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    """The tokens of each row with enough memory."""
    calm = engine()
    submit(calm)
    return {job_id: event.token_ids for job_id, event in drain(calm).items()}


def tokens_of(running: Engine) -> dict[str, tuple[int, ...]]:
    return {job_id: event.token_ids for job_id, event in drain(running).items()}


def test_no_row_starts_beside_others_while_memory_is_short(
    expected: dict[str, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows wait until those that decode have ended, and then go on: none is lost."""
    source = Planted()
    running = engine(source)
    submit(running)
    with caplog.at_level(logging.INFO, "batchkv.engine"):
        while not running._rows:
            running.step()
        source.level = WARNING
        assert running.trouble() == ""
        running.step()
        begun = {row.job_id for row in running._rows.values()}
        assert running.trouble() == SHORT_OF_MEMORY and running._scheduler.num_waiting
        ended = set[str]()
        while running._rows:
            assert {row.job_id for row in running._rows.values()} <= begun
            assert running._scheduler.group is None
            ended |= {event.job_id for event in running.step()}  # type: ignore[union-attr]
        rest = tokens_of(running)  # still short: the others had their turn all the same
    assert ended | rest.keys() == expected.keys()
    assert rest == {job_id: expected[job_id] for job_id in rest}
    assert running._relief.num_times == 0
    assert caplog.text.count("this machine is short of memory") == 1
    source.level = NORMAL
    with caplog.at_level(logging.INFO, "batchkv.engine"):
        running.rest()
    assert running.trouble() == "" and "has enough memory again" in caplog.text


def test_critical_memory_is_given_back(
    expected: dict[str, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows leave their slots and buffers shrink; the rows come back with the same tokens."""
    source = Planted()
    running = engine(source)
    submit(running)
    whole = running._scheduler.budget.memory_bytes
    while len(running._rows) < 4:
        running.step()
    held, decoding = running.kv_bytes, len(running._rows)
    source.level = CRITICAL
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        running._relief.apply(running._read_in_flight)
    assert running._relief.num_times == 1
    assert running.kv_bytes < held and 1 <= len(running._rows) < decoding
    assert running._scheduler.budget.memory_bytes < whole
    assert len(running.prefixes) == 0
    assert "rows wait to be computed again" in caplog.text
    running.check_integrity()
    low = running._scheduler.budget.memory_bytes
    running._relief.apply(running._read_in_flight)  # macOS has no time to notice yet
    assert running._scheduler.budget.memory_bytes == low
    source.level = NORMAL
    assert tokens_of(running) == expected
    assert running._scheduler.budget.memory_bytes > low


def test_memory_that_stays_critical_stops_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row always goes on, though each step takes from the others. Packed keys, and states."""
    family, scheme = "gear", "affine8"
    calm = engine(None, family, scheme)
    submit(calm)
    monkeypatch.setattr(relief, "SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(relief, "_WORTH", 2**20)
    running = engine(Planted(CRITICAL), family, scheme)
    submit(running)
    assert tokens_of(running) == tokens_of(calm)
    assert running._relief.num_times > 10


def test_an_idle_engine_gives_back_what_it_holds() -> None:
    """Buffers and prefixes, when memory is critical; else only what MLX keeps."""
    source = Planted()
    running = engine(source)
    submit(running, 4)
    drain(running)
    running.rest()
    assert running.kv_bytes > 0
    source.level = CRITICAL
    running.rest()
    assert running.kv_bytes == len(running.prefixes) == 0
    source.level = NORMAL
    submit(running, 2)
    assert drain(running).keys() == {"0", "1"}
    running.close()
    assert source.is_closed


def test_a_watcher_that_reads_on_its_own_thread_drives_an_engine(
    expected: dict[str, tuple[int, ...]],
) -> None:
    """Readings come while the engine computes. They never change the tokens."""
    seen: list[int] = []

    def read() -> Reading:
        seen.append(threading.get_ident())
        return Reading((NORMAL, WARNING, CRITICAL, NORMAL)[len(seen) % 4])

    watcher = Watcher(read, seconds=0.001)
    running = engine(watcher)
    submit(running)
    assert tokens_of(running) == expected
    running.close()
    assert len(seen) > 3 and threading.get_ident() not in seen
    assert watcher.level is NORMAL


# -- reading


def test_a_level_rises_at_once_and_falls_slowly() -> None:
    """A level that flickers each second must not start and stop rows each second."""
    judge = Judge()
    assert judge.add(0, Reading(NORMAL)) is NORMAL
    assert judge.add(1, Reading(WARNING)) is WARNING
    assert judge.add(2, Reading(CRITICAL)) is CRITICAL
    assert judge.add(3, Reading(NORMAL)) is CRITICAL
    assert judge.add(4, Reading(CRITICAL)) is CRITICAL
    assert judge.add(4 + CALM_SECONDS - 0.1, Reading(NORMAL)) is CRITICAL
    assert judge.add(4 + CALM_SECONDS, Reading(NORMAL)) is NORMAL


def test_swap_that_grows_is_a_shortage_whatever_the_level() -> None:
    """A Mac may swap for long before it reports a shortage of memory; old swap does not count."""
    judge = Judge()
    assert judge.add(0, Reading(NORMAL, 9 * SWAP_CRITICAL)) is NORMAL
    assert judge.add(1, Reading(NORMAL, 9 * SWAP_CRITICAL + SWAP_WARNING)) is WARNING
    assert judge.add(2, Reading(NORMAL, 10 * SWAP_CRITICAL)) is CRITICAL
    later = 2 + 2 * SWAP_SECONDS
    assert judge.add(later, Reading(NORMAL, 10 * SWAP_CRITICAL)) is NORMAL
    assert judge.add(later + 1, Reading(NORMAL, 0)) is NORMAL
    assert judge.add(later + 2, Reading(NORMAL, SWAP_WARNING)) is WARNING


@pytest.mark.parametrize(
    ("number", "level"), [(1, NORMAL), (2, WARNING), (4, CRITICAL), (0, NORMAL)]
)
def test_the_kernel_of_macos_says_the_level(number: int, level: Level) -> None:
    """Its numbers are those of dispatch_source_memorypressure_flags_t."""
    usage = struct.pack("<QQQIi", 8, 3, 5, 16384, 1)
    values = {
        "kern.memorystatus_vm_pressure_level": struct.pack("<i", number),
        "vm.swapusage": usage,
    }
    assert pressure.read_macos(values.__getitem__) == Reading(level, 5)


@pytest.mark.parametrize(
    ("available", "level"), [(8_000_000, NORMAL), (400_000, WARNING), (200_000, CRITICAL)]
)
def test_linux_says_what_is_available(available: int, level: Level, tmp_path: Path) -> None:
    """As /proc/meminfo of Linux 6 has it: kilobytes."""
    file = tmp_path / "meminfo"
    file.write_text(MEMINFO.format(available=available))
    assert pressure.read_linux(file) == Reading(level, 500_000 * 1024)


def test_a_kernel_that_does_not_say_is_an_error() -> None:
    """An old Linux, or a container that hides it: the caller then watches nothing."""
    with pytest.raises(ValueError, match="MemAvailable"):
        pressure.reading_of("MemTotal: 5 kB\n")


def test_only_memory_that_is_shared_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Macs, and Linux where keys and values are in the machine's memory; not CUDA."""
    monkeypatch.setattr(pressure, "read_linux", lambda: Reading(NORMAL))
    monkeypatch.setattr(pressure, "read_macos", lambda: Reading(NORMAL))
    found = [pressure.watch("cpu", "linux"), pressure.watch("metal", "darwin")]
    assert all(isinstance(each, Watcher) for each in found)
    for each in found:
        each.close()
    assert isinstance(pressure.watch("cuda", "linux"), NoPressure)
    assert isinstance(pressure.watch("cpu", "win32"), NoPressure)


@pytest.mark.parametrize("fault", [OSError("no such name"), ValueError("too short")])
def test_a_source_that_fails_is_not_watched(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the start nor later does it end the worker or keep rows waiting."""

    def broken() -> Reading:
        raise fault

    monkeypatch.setattr(pressure, "read_macos", broken)
    assert isinstance(pressure.watch("metal", "darwin"), NoPressure)
    readings: list[Callable[[], Reading]] = [broken, lambda: Reading(CRITICAL)]
    watcher = Watcher(lambda: readings.pop()(), seconds=0.001)
    deadline = time.monotonic() + 5
    while watcher._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watcher.level is NORMAL
    watcher.close()

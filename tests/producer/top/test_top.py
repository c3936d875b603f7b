"""``batchkv top``: what a frame shows, and a live one in a real pseudo-terminal."""

from __future__ import annotations

import dataclasses
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.manage import drain as orders
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.top.frame import Screen, draw
from batchkv_producer.top.view import Reader, View, WorkerView
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.worker import WorkerFigures, encode_figures
from batchkv_producer.wire.transitions import iso_now

MODEL = "owner/model-4bit"
FIGURES = WorkerFigures(
    0.0,
    {"tokens.prompt": 1000, "tokens.cached": 250},
    {"rows.decode": 7, "kv_memory": 1e9, "kv_memory_budget": 4e9, "pressure": 4},
)


def batch(number: int, **values: Any) -> BatchStatus:
    base: dict[str, Any] = dict.fromkeys(BatchStatus.__dataclass_fields__, 0)
    base |= {"batch_id": f"{number:016x}", "queue": "q", "model": MODEL, "is_submitted": True}
    return BatchStatus(**{**base, "name": f"prompts-{number}.jsonl", "total": 100, **values})


def worker(name: str, figures: WorkerFigures | None = None, **values: Any) -> WorkerView:
    info = WorkerInfo(name, "h", 1, ("q",), "busy", 0.0, 0, 0, 0)
    return WorkerView(dataclasses.replace(info, **values), figures)


def view(batches: list[BatchStatus], workers: list[WorkerView]) -> View:
    return View(tuple(batches), tuple(workers), {batches[0].batch_id: 90.0} if batches else {},
                {batches[0].batch_id: 123.4} if batches else {}, 0.0, len(batches))  # fmt: skip


def test_a_frame_has_batches_and_workers() -> None:
    """Progress, speed, time left and failures; slots, memory, pressure, hits, version, last seen.
    An older worker has blanks."""
    values: dict[str, Any] = {"num_slots": 32, "memory_bytes": 6 * 10**9, "tokens_per_second": 88}
    values |= {"version": "0.9", "model": MODEL, "silent_seconds": 3.0, "doing": "draining 7 rows"}
    new = worker("new-mac", FIGURES, **values)
    batches = [batch(1, ok=30, failed=4, running=6), batch(2, ok=100)]
    lines = draw(view(batches, [new, worker("old-mac")]), Screen(160, 40)).plain.splitlines()
    shown = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert shown[batches[0].batch_id][1:8] == ["###.......", "34", "%", "123", "1m30s", "30", "4"]
    assert shown[batches[1].batch_id][1:4] == ["##########", "100", "%"]
    assert shown["new-mac"][1:] == [
        *("draining", "7", "rows", "7/32", "88", "6.0", "GB", "25", "%", "critical", "25", "%"),
        *("3s", "ago", MODEL, "0.9"),
    ]
    assert shown["old-mac"] == ["old-mac", "busy", "0s", "ago"]
    assert "2 workers, 88 tok/s; 1 open, 6 rows held, 60 queued" in lines[0]
    host = worker("host", models=(MODEL,))  # takes no rows itself
    first, *_ = draw(view(batches, [new, host]), Screen(160, 40)).plain.splitlines()
    assert "1 worker, 88 tok/s" in first


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_frame_fits_its_terminal(width: int) -> None:
    """Neither wider nor higher than the terminal, with many batches and workers, foreign control
    characters, and the selected worker in sight."""
    batches = [batch(n, name="\x1b[31mred\n\u202e" + "long" * 90) for n in range(80)]
    workers = [worker(f"a-mac-with-a-long-name-{n}", FIGURES, num_slots=9) for n in range(60)]
    for number in (0, 41, 59):
        name = f"a-mac-with-a-long-name-{number}"
        screen = Screen(width, 24, name, message="a message of\nseveral lines " * 9)
        lines = draw(view(batches, workers), screen).plain.split("\n")
        assert max(map(len, lines)) <= width
        assert len(lines) <= 24
        assert sum(line.startswith("> ") for line in lines) == 1
        assert not {"\x1b", "\u202e"} & set("".join(lines))


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_cut_beside_long_ids(width: int) -> None:
    """Ids of a gateway have 38 characters. Columns are left out instead, and failures never."""
    ids = [f"batch_{number:032x}" for number in range(2)]
    batches = [batch(n, batch_id=one, ok=123_456, failed=99) for n, one in enumerate(ids)]
    batches = [dataclasses.replace(one, total=1_000_000, running=64) for one in batches]
    values: dict[str, Any] = {"num_slots": 64, "memory_bytes": 10**11, "tokens_per_second": 10_500}
    workers = [worker("a-mac-with-a-long-name", FIGURES, **values)]
    lines = draw(view(batches, workers), Screen(width, 24)).plain.splitlines()
    assert "…" not in "".join(lines[1:])
    title, *rows = lines[2:5]
    end = title.index("FAILED") + len("FAILED")
    assert [(row.split()[0], row[:end].split()[-1]) for row in rows] == [(one, "99") for one in ids]


def test_a_batch_whose_lines_were_refused_has_no_rows() -> None:
    text = draw(view([batch(1, total=0)], []), Screen(100, 10)).plain
    assert "no rows" in text and "100 %" not in text


def test_nothing_to_show() -> None:
    """A server without batches and workers says how to start one."""
    text = draw(view([], []), Screen(80, 24)).plain
    assert "no batches" in text and "`batchkv worker -m MODEL` starts one" in text


def register(connection: Redis, name: str) -> None:
    """The record of a worker that is not there."""
    queue, key = redis_keys.queue_name(MODEL), redis_keys.worker(name)
    about = {"birth": iso_now(), "queues": queue, "hostname": "h", "pid": 1, "state": "busy",
             "last_heartbeat": iso_now(), "bkv_seen": int(time.time()), "bkv_beat_ms": 60_000,
             "bkv_figures": encode_figures(FIGURES)}  # fmt: skip
    connection.hset(key, mapping=about)  # type: ignore[arg-type]
    for workers in (redis_keys.workers(), redis_keys.workers(queue)):
        connection.sadd(workers, key)


def test_speeds_are_of_the_time_between_two_readings(redis_connection: Redis) -> None:
    """A batch has a speed from the second reading on. Done batches come last, and have none."""
    client = Client(redis_connection)
    done = client.submit([{"prompt": 5}], model=MODEL).batch_id  # a wrong row: it ends at once
    found = client.submit([{"prompt": "x"}], model=MODEL).batch_id
    reader = Reader(client, redis_connection)
    assert reader.read().speeds == {}
    time.sleep(0.05)
    redis_connection.hset(redis_keys.batch(found), "completion_tokens", 1000)
    again = reader.read()
    assert [one.batch_id for one in again.batches] == [found, done]
    assert again.speeds.keys() == {found} and 0 < again.speeds[found] < 1000 / 0.05


def test_piped_output_is_one_frame(redis_connection: Redis, redis_url: str, tmp_path: Path) -> None:
    """Without a terminal it prints one frame without keys and colours, and ends."""
    register(redis_connection, "lonely-mac")
    runner = CliRunner(env={"BATCHKV_REDIS_URL": redis_url, "BATCHKV_HOME": str(tmp_path)})
    found = runner.invoke(cli, ["top"])
    assert found.exit_code == 0, found.stderr
    assert "lonely-mac" in found.stdout and "\x1b" not in found.stdout
    assert "q ends" not in found.stdout


class Terminal:
    """``batchkv top`` in a pseudo-terminal of 100 columns."""

    def __init__(self, url: str, home: Path) -> None:
        self._own, other = pty.openpty()
        environ = {**os.environ, "BATCHKV_REDIS_URL": url, "BATCHKV_HOME": str(home)}
        environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        command = [sys.executable, "-m", "batchkv_producer", "top"]
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env=environ, start_new_session=True
        )
        os.close(other)
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def wait_for(self, words: str) -> None:
        """Read until these words were shown since the last call."""
        deadline = time.monotonic() + 20
        while words not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} was not shown: {self.text[-2000:]}"
            if select.select([self._own], [], [], left)[0]:
                self.text += os.read(self._own, 65_536).decode("utf-8", "replace")
        self.text = self.text.partition(words)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._own)


def test_keys_select_drain_resume_and_end(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """The arrow selects the second worker, d drains it, u resumes it, q ends with code 0. The
    terminal is then as it was."""
    for name in ("mac-1", "mac-2"):
        register(redis_connection, name)
    shown = Terminal(redis_url, tmp_path)
    try:
        shown.wait_for("> mac-1")
        shown.press("\x1b[B")
        shown.wait_for("> mac-2")
        shown.press("zd")
        shown.wait_for("mac-2 takes no more rows")
        assert orders.is_ordered(redis_connection, "mac-2")
        assert not orders.is_ordered(redis_connection, "mac-1")
        shown.press("u")
        shown.wait_for("mac-2 takes rows")
        assert not orders.is_ordered(redis_connection, "mac-2")
        redis_connection.delete(redis_keys.worker("mac-1"), redis_keys.worker("mac-2"))
        shown.wait_for("no workers: ")
        shown.press("d")
        shown.wait_for("there is no worker")
        shown.press("q")
        shown.wait_for("\x1b[?1049l")  # the screen from before is back
        assert shown.process.wait(10) == 0
    finally:
        shown.close()

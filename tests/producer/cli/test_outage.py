"""What a command that follows a batch says while its server is away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchkv_producer.cli.outage import OutageNote
from support.redis_server import running_server

DEADLINE_SECONDS = 60
BATCHKV = sys.executable, "-m", "batchkv_producer"


def test_a_long_outage_is_said_once_and_its_end() -> None:
    now, said = [100.0], list[str]()
    outage = OutageNote(said.append, lambda: now[0])
    for _ in range(2):
        for seconds in (0.0, 1.0, 1.5, 9.0):
            now[0] += seconds
            outage.away()
        outage.back()
        outage.back()
    assert len(said) == 4 and said[1] == said[3] == "the server answers again"
    for note in (said[0], said[2]):
        assert note.startswith("the server has not answered since ")
        assert note.endswith(": asking it again")


def test_a_short_outage_is_not_said() -> None:
    said = list[str]()
    now = [0.0]
    outage = OutageNote(said.append, lambda: now[0])
    outage.away()
    now[0] = 1.0
    outage.away()
    outage.back()
    assert not said


@pytest.mark.parametrize("words", [["wait"], ["results", "--follow", "-o", "out.jsonl"]])
def test_a_command_that_follows_says_that_its_server_is_away(
    words: list[str], tmp_path: Path
) -> None:
    """A server that is away for a while is named, and the command goes on when it is back."""
    source, log = tmp_path / "p.jsonl", tmp_path / "log"
    source.write_text('{"prompt": "a"}\n', "utf-8")
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        submitted = subprocess.run(
            [*BATCHKV, "submit", source, "-m", "demo", "--url", server.url],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=DEADLINE_SECONDS,
        )
        command = [*BATCHKV, *words, submitted.stdout.strip(), "--url", server.url]
        with (
            log.open("w") as stream,
            subprocess.Popen(command, stderr=stream, cwd=tmp_path) as waiting,
        ):
            try:
                wait_for(log, "0/1")
                server.stop()
                wait_for(log, "the server has not answered since")
                server.start()
                wait_for(log, "the server answers again")
                assert waiting.poll() is None
            finally:
                waiting.send_signal(signal.SIGINT)
                waiting.wait(DEADLINE_SECONDS)


def wait_for(log: Path, words: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while words not in (text := log.read_text("utf-8")):
        assert time.monotonic() < end, text
        time.sleep(0.1)

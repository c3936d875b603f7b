"""What a command that follows a batch says while its server is away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from redis import Redis

from batchkv_producer.cli.outage import OutageNote
from support.redis_server import RedisServer, running_server

DEADLINE_SECONDS = 60
POLLS = 30  # commands of a connection that is past its first looks
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


def test_commands_that_follow_say_that_their_server_is_away(tmp_path: Path) -> None:
    """A server that is away for a while is named, and each command goes on when it is back."""
    commands = [
        ["wait"],
        ["results", "--follow", "-o", "out.jsonl"],
        ["results", "--follow"],
        ["results", "--follow", "--format", "text", "-o", "out.txt"],
    ]
    source, logs = tmp_path / "p.jsonl", [tmp_path / f"{n}.log" for n in range(len(commands))]
    source.write_text('{"prompt": "a"}\n', "utf-8")
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        submitted = subprocess.run(
            [*BATCHKV, "submit", source, "-m", "demo", "--url", server.url],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=DEADLINE_SECONDS,
        )
        rest = [submitted.stdout.strip(), "--url", server.url]
        waiting = list[subprocess.Popen[bytes]]()
        try:
            for words, log in zip(commands, logs, strict=True):
                with log.open("w") as stream:
                    command = [*BATCHKV, *words, *rest]
                    waiting.append(subprocess.Popen(command, stderr=stream, cwd=tmp_path))
            wait_for(logs[:2], "0/1")  # the others show no progress
            wait_for_polls(server, len(commands))
            server.stop()
            wait_for(logs, "the server has not answered since")
            server.start()
            wait_for(logs, "the server answers again")
            assert all(each.poll() is None for each in waiting)
        finally:
            for each in waiting:
                each.send_signal(signal.SIGINT)
            for each in waiting:
                each.wait(DEADLINE_SECONDS)


def wait_for_polls(server: RedisServer, count: int) -> None:
    """Until so many connections have asked again and again."""
    end = time.monotonic() + DEADLINE_SECONDS
    with Redis.from_url(server.url) as connection:
        while sum(int(one["tot-cmds"]) > POLLS for one in connection.client_list()) < count:
            assert time.monotonic() < end, connection.client_list()
            time.sleep(0.1)


def wait_for(logs: list[Path], words: str) -> None:
    """Until each of the logs has the words."""
    end = time.monotonic() + DEADLINE_SECONDS
    while any(words not in log.read_text("utf-8") for log in logs):
        assert time.monotonic() < end, [log.read_text("utf-8") for log in logs]
        time.sleep(0.1)

"""Prompts and passwords are stored in their own places, and occur nowhere else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from redis import Redis

from batchkv_producer.errors import BatchkvError
from batchkv_producer.server import connection
from batchkv_producer.wire import redis_keys
from hostile.traps import batchkv
from support.redis_server import running_server
from support.worker_harness import WorkerProcess, num_ended, wait_until, workers

PROMPT = "PROMPT-MARKER-51fe"
ANSWER = "ANSWER-MARKER-51fe"
PASSWORD = "PASSWORD-MARKER-51fe"
SECRET = "SECRET-MARKER-51fe-with-more-than-sixteen-bytes"
SALT = "SALT-MARKER-51fe"
MARKERS = tuple(mark.encode() for mark in (PROMPT, ANSWER, PASSWORD, SECRET, SALT))
# Where prompts and answers have to be: jobs' data and batches' results.
PAYLOADS = ("data", "batchkv:res:")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[str, Redis]]:
    """A server with a password on a port: (URL, connection)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    options = ("--bind", "127.0.0.1", "--logfile", str(log), "--loglevel", "debug")
    options += ("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
    with running_server(*options) as server, server.connect() as admin:
        admin.config_set("requirepass", PASSWORD)
        admin.config_set("port", port)
        url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        with Redis.from_url(url) as own:
            yield url, own
            own.config_set("requirepass", "")


def command_lines() -> bytes:
    """The command lines of all processes, which every user of the machine can read."""
    return subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, check=True).stdout


def plain_forms(value: bytes) -> Iterator[bytes]:
    """A stored value as it is, and decompressed if it is."""
    yield value
    try:
        yield zlib.decompress(value)
    except zlib.error:
        return


def without_payload(redis: Redis) -> bytes:
    """All keys and values of the server, without the places for prompts and answers."""
    found: list[bytes] = []
    for key in redis.scan_iter():
        found.append(key)
        match redis.type(key):
            case b"hash":
                is_result = key.startswith(b"batchkv:res:")
                for name, value in redis.hgetall(key).items():
                    if not (is_result or (key.startswith(b"rq:job:") and name == b"data")):
                        found += [name, *plain_forms(value)]
            case b"list":
                found += redis.lrange(key, 0, -1)
            case b"set":
                found += redis.smembers(key)
            case b"zset":
                found += redis.zrange(key, 0, -1)
            case b"stream":
                found += [str(redis.xrange(key)).encode()]
            case _:
                found.append(redis.get(key) or b"")
    return b"\n".join(found)


def test_markers_stand_in_payloads_alone(locked: tuple[str, Redis], tmp_path: Path) -> None:
    """A batch with answers, a refused row and crashes, verbose: then every log, every
    key, every command line and everything that was printed is searched.
    """
    url, redis = locked
    source = tmp_path / "in.jsonl"
    rows = [
        {"custom_id": "a", "prompt": f"{PROMPT} one"},
        {"custom_id": "b", "messages": [{"role": "user", "content": f"{PROMPT} two"}]},
        {"custom_id": "c", "prompt": f"reject:engine_error: {PROMPT}"},
        {"custom_id": "d", "prompt": f"crash:{PROMPT}"},
        {"custom_id": "e", "prompt": f"slow:200 {PROMPT}"},
    ]
    lines = [json.dumps(row) for row in rows]
    lines += [f'{{"custom_id": "f", "prompt": "{PROMPT}", "surprise": 1}}', f'{{"{PROMPT}']
    source.write_text("\n".join(lines) + "\n")
    files = {"url": url, "secret": SECRET, "salt": SALT}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    by_file = {"BATCHKV_REDIS_URL_FILE": str(tmp_path / "url")}
    said = []
    found = batchkv("submit", source, "-m", "fake", **by_file)
    said.append(found.output)
    batch = found.stdout.strip()
    redis.hset(f"rq:job:{batch}-4", "bkv_deaths", 3)  # its next death is the last
    environ = {**os.environ, **by_file, "BATCHKV_MODEL": "fake"}
    environ |= {"BATCHKV_CACHE": f"memory: disk:{tmp_path}/blocks"}
    environ |= {f"BATCHKV_CACHE_{name.upper()}_FILE": str(tmp_path / name) for name in files}
    environ.pop("BATCHKV_CACHE_URL_FILE")
    environ |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    environ |= {"FAKE_PLAN": json.dumps({"answer": ANSWER, "step_seconds": 0.001})}
    logs = [tmp_path / f"worker-{number}.log" for number in range(4)]
    for log in logs:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "support.fake_engine", "-v", "--drain-seconds", "0"),
                    *("--lease-seconds", "60", "--heartbeat-seconds", "0.1"),
                    *("--maintenance-seconds", "0.1"),
                ],
                env=environ, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            # The row crashes its worker several times, until it is failed.
            wait_until(lambda p=process: p.poll() is not None or num_ended(redis, batch) == 7, 60)
            assert not [m for m in MARKERS if m in command_lines()]
            if process.poll() is None:
                process.terminate()
        finally:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        if num_ended(redis, batch) == 7:
            break
    assert num_ended(redis, batch) == 7
    for command in (["status"], ["status", batch], ["list"], ["workers"], ["cancel", batch]):
        said.append(batchkv(*command, **by_file).output)
    said.append(batchkv("wait", batch, **by_file).output)
    texts = {log.name: log.read_bytes() for log in logs if log.exists()}
    texts["server.log"] = (tmp_path / "server.log").read_bytes()
    texts["printed"] = "\n".join(said).encode()
    texts["keys"] = without_payload(redis)
    texts["info"] = json.dumps(redis.info("everything"), default=str).encode()
    for name, text in texts.items():
        assert not [m for m in MARKERS if m in text], (name, _around(text))
    assert b"crashed as asked" in b"".join(texts.values())  # the logs did say what happened
    answers = batchkv("results", batch, **by_file).output
    assert ANSWER in answers  # and the markers do stand where they belong


def _around(text: bytes) -> bytes:
    place = min((text.find(m) for m in MARKERS if m in text), default=0)
    return text[max(0, place - 300) : place + 100]


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:1/0",
        f"rediss://u:{PASSWORD}@127.0.0.1:1/0",
        f"redis://{PASSWORD}@127.0.0.1:1/0",
        f"redis://:{PASSWORD}@no.such.host.invalid:1/0",
        f"redis://:{PASSWORD}%40x@127.0.0.1:notaport/0",
        f"redis://:{PASSWORD}/with/slashes@127.0.0.1:1/0",
        f"unix://:{PASSWORD}@/nowhere/s",
        f"unix:///nowhere/s?password={PASSWORD}",
        f"http://:{PASSWORD}@127.0.0.1/",
        f":{PASSWORD}@127.0.0.1",
    ],
)
def test_no_error_repeats_a_password(url: str) -> None:
    """Neither the command's output nor the text of the error has it."""
    found = batchkv("status", url=url)
    assert found.exit_code in (2, 3)
    assert PASSWORD not in found.output
    with pytest.raises(BatchkvError) as caught:
        connection.connect(url)
    assert PASSWORD not in str(caught.value)


def test_a_wrong_password_is_not_repeated(locked: tuple[str, Redis], tmp_path: Path) -> None:
    """Command and worker report the server's refusal without the password that was tried."""
    url = locked[0].replace(PASSWORD, "WRONG-" + SECRET)
    found = batchkv("status", url=url)
    assert found.exit_code == 3 and "password" in found.stderr and SECRET not in found.output
    worker = WorkerProcess(url, tmp_path / "log", "--burst")
    with workers(worker):
        assert worker.wait(60) != 0
    assert SECRET not in worker.said


def test_a_jobs_description_and_results_tell_rq_nothing(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Dashboards show only the batch's id of a job. RQ's result stream is not used."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    batch = batchkv("submit", source, "-m", "fake", url=redis_url).stdout.strip()
    fields = redis_connection.hgetall(f"rq:job:{batch}-1")
    shown = {name: value for name, value in fields.items() if name != b"data"}
    assert PROMPT.encode() not in b"".join(shown.values())
    assert shown[b"description"] == f"batchkv {batch}".encode()
    assert b"meta" not in shown
    packed = {"o": "ok", "e": "chat", "c": "c", "t": ANSWER}
    redis_connection.hset(redis_keys.results(batch), 1, zlib.compress(msgpack.packb(packed)))
    assert not redis_connection.keys("rq:results:*")


def test_the_embedded_server_has_nothing_on_its_command_line(tmp_path: Path) -> None:
    """Every user can read its command line, which has no secret."""
    environ = {"BATCHKV_HOME": str(tmp_path / "h")}
    assert batchkv("server", "start", **environ).exit_code == 0
    try:
        lines = [line for line in command_lines().splitlines() if str(tmp_path).encode() in line]
        assert all(b"pass" not in line for line in lines)
    finally:
        assert batchkv("server", "stop", **environ).exit_code == 0

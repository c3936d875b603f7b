"""What was stored reaches a terminal spelled out, by every command that prints."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis import Redis

from batchkv_cache_store.blocks.manifests import encode_manifest
from batchkv_cache_store.blocks.names import block_name, manifest_name
from batchkv_cache_store.keys import namespace
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, encode_job, encode_result
from cache_store.blocks import encoded, make_block
from hostile.traps import ESCAPES, FORBIDDEN, batchkv
from support.worker_harness import QUEUE, submit

SHOW = Path(__file__).with_name("show_commands.py")
MANIFEST = {"format": 1, "model": f"m{ESCAPES}", f"name{ESCAPES}": "x", "list": [ESCAPES]}


def plant(connection: Redis) -> str:
    """A batch whose every text is an attack: name, model, ids, texts, errors, workers."""
    request = Request(custom_id=f"id{ESCAPES}", endpoint="completion", prompt=f"p{ESCAPES}")
    batch = submit(connection, ["0", "1", "2"], data=lambda _: encode_job(request))
    fields = {"name": f"n{ESCAPES}", "model": f"m{ESCAPES}"}
    connection.hset(redis_keys.batch(batch), mapping=fields)
    ok = Result(
        custom_id=f"id{ESCAPES}",
        endpoint="chat",
        outcome="ok",
        model=f"m{ESCAPES}",
        text=f"answer{ESCAPES}\nsecond line",
        finish_reason=f"f{ESCAPES}",
        worker=f"w{ESCAPES}",
        busy_ms=5,
    )
    bad = dataclasses.replace(ok, outcome="failed", error=(f"code{ESCAPES}", f"error{ESCAPES}"))
    for line, row in ((1, ok), (2, bad)):
        connection.hset(redis_keys.results(batch), str(line), encode_result(row))
        connection.rpush(redis_keys.done(batch), line)
    connection.hset(redis_keys.batch(batch), mapping={"ok": 1, "failed": 1, "completion_tokens": 9})
    connection.hset(f"rq:job:{batch}-3", "worker_name", f"w{ESCAPES}")
    worker = f"rq:worker:w{ESCAPES}"
    about = {"birth": "x", "queues": f"{QUEUE},q{ESCAPES}", "hostname": f"h{ESCAPES}"}
    about |= {"state": f"s{ESCAPES}", "pid": ESCAPES, "last_heartbeat": ESCAPES}
    connection.hset(worker, mapping=about)
    connection.sadd("rq:workers", worker)
    connection.sadd(f"rq:workers:{QUEUE}", worker)
    return batch


def plant_cache(folder: Path) -> str:
    """A disk tier with a block and a manifest full of attacks; the block's key in hex."""
    tier = DiskTier(folder, 2**24)
    block = dataclasses.replace(make_block(), writer=f"w{ESCAPES}")
    block = dataclasses.replace(block, namespace=namespace(MANIFEST))
    tensor = dataclasses.replace(block.tensors[0], name=f"t{ESCAPES}")
    block = dataclasses.replace(block, tensors=(tensor, *block.tensors[1:]))
    tier.put(block_name(block.key, block.kind), [encoded(block)])
    digest, text = encode_manifest(MANIFEST)
    tier.put(manifest_name(digest), [text])
    (folder / f"foreign{ESCAPES}").write_text(ESCAPES)
    tier.close()
    return block.key.hex()


def on_a_terminal(commands: list[list[str]], environ: dict[str, str]) -> str:
    """What a terminal shows of these commands, both streams."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SHOW), json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"},
    )
    os.close(theirs)
    seen: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                seen.append(piece)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(60) == 0
        reader.join(10)
    finally:
        process.kill()
        os.close(ours)
    return b"".join(seen).decode("utf-8", "surrogateescape")


def test_no_command_lets_anything_act_on_a_terminal(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Every command that prints what others wrote, on a real terminal, in both forms."""
    batch = plant(redis_connection)
    cache = tmp_path / "blocks"
    key = plant_cache(cache)
    tier = ["--cache", f"disk:{cache}"]
    commands: list[list[str]] = [
        ["status"],
        ["status", batch],
        *(["status", f"{batch}-{line}"] for line in (1, 2, 3)),
        ["list"],
        ["workers"],
        ["results", batch],
        ["results", batch, "--ordered"],
        ["results", batch, "--format", "text"],
        *(["result", f"{batch}-{line}"] for line in (1, 2)),
        *(["result", f"{batch}-{line}", "--format", "text"] for line in (1, 2, 3)),
        ["cache", "stats", "--by-namespace", *tier],
        ["cache", "ls", *tier],
        ["cache", "inspect", key, *tier],
        ["cache", "inspect", namespace(MANIFEST).hex(), *tier],
        ["cache", "verify", *tier],
        ["cache", "why", f"{batch}-1", *tier],
        ["cache", "why", f"{batch}-2", *tier],
        ["cache", "gc", "--dry-run", *tier],
        ["wait", batch, "--timeout", "0"],
        ["retry", batch],
        ["cancel", batch],
    ]
    json_too = ("status", "list", "workers", "cache")
    commands += [[*c, "--json"] for c in commands if c[0] in json_too and c[1:2] != ["gc"]]
    seen = on_a_terminal(commands, {"BATCHKV_REDIS_URL": redis_url})
    assert seen.count("answer") >= 5 and "\\u202eevil" in seen and "Traceback" not in seen
    for char in FORBIDDEN:
        place = seen.find(char)
        assert place < 0, ascii(seen[max(0, place - 200) : place + 50])


def test_lines_for_a_pipe_are_one_line_each(redis_connection: Redis, redis_url: str) -> None:
    """Where programs read, a line is JSON on one line, whatever is in its texts."""
    batch = plant(redis_connection)
    found = batchkv("results", batch, url=redis_url)
    lines = found.stdout.splitlines()
    assert len(lines) == 2 == len(found.stdout.strip("\n").split("\n"))
    assert json.loads(lines[0])["custom_id"] == f"id{ESCAPES}"


@pytest.mark.parametrize("text", [ESCAPES, "a\nb\r\nc", "\x00", "\ud800"])
def test_text_answers_are_one_line_each(redis_connection: Redis, redis_url: str, text: str) -> None:
    """--format text keeps a row on its line, so that no answer can pass for another's."""
    batch = submit(redis_connection, ["0"])
    packed: dict[str, Any] = {"o": "ok", "e": "chat", "c": "c", "t": f"x{text}y"}
    blob = zlib.compress(msgpack.packb(packed, unicode_errors="surrogatepass"))
    redis_connection.hset(redis_keys.results(batch), "1", blob)
    redis_connection.rpush(redis_keys.done(batch), 1)
    found = batchkv("results", batch, "--format", "text", url=redis_url)
    assert found.exit_code == 0
    assert found.stdout_bytes.count(b"\n") == 1 and b"\r" not in found.stdout_bytes

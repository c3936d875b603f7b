"""What an earlier version stored (``record.py``), put back as it was for a test."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import time
from pathlib import Path
from typing import Any

from redis import Redis

VERSIONS = ("v0.1.0",)
FOLDER = Path(__file__).parent
FIRST_GATEWAY = "first_gateway"
# Scores of these are moments at which something is forgotten: they move with the clock.
REGISTRIES = (
    *("rq:finished:", "rq:failed:", "rq:canceled:"),
    *("batchkv:gateway:ended", "batchkv:gateway:expiring"),
)
MOMENT = b"expires"  # so does this field of hashes
# The locks of a killed worker have run out by the time that its owner has installed this version.
LOCKS = "batchkv:lock:"


def batch_ids(version: str) -> dict[str, str]:
    """Name of the input -> id of its batch."""
    found: dict[str, str] = json.loads((FOLDER / version / "ids.json").read_text("utf-8"))
    return found


def put_back(version: str, connection: Redis) -> None:
    """Write every key of the recorded server into this one, but no lock."""
    with gzip.open(FOLDER / version / "server.json.gz") as file:
        stored = json.load(file)
    shift = time.time() - stored["recorded_at"]
    pipeline = connection.pipeline(transaction=False)
    for key, entry in stored["keys"].items():
        if key.startswith(LOCKS):
            continue
        values = [base64.b64decode(value) for value in entry["values"]]
        if entry["type"] == "hash":
            values = _moved(values, shift)
        _write(pipeline, key, entry["type"], values, shift if key.startswith(REGISTRIES) else 0.0)
        if entry["ttl_ms"] > 0:
            pipeline.pexpire(key, entry["ttl_ms"])
    pipeline.execute()


def _moved(pairs: list[bytes], shift: float) -> list[bytes]:
    """The fields and values of a hash, with its moment moved."""
    found = list(pairs)
    for at in range(0, len(found), 2):
        if found[at] == MOMENT and found[at + 1].isdigit() and int(found[at + 1]):
            found[at + 1] = str(int(found[at + 1]) + int(shift)).encode()
    return found


def _write(pipeline: Any, key: str, kind: str, values: list[bytes], shift: float) -> None:
    match kind:
        case "string":
            pipeline.set(key, values[0])
        case "hash":
            pipeline.hset(key, items=values)
        case "list":
            pipeline.rpush(key, *values)
        case "set":
            pipeline.sadd(key, *values)
        case "zset":
            scores = (float(score) + shift for score in values[1::2])
            pipeline.zadd(key, dict(zip(values[::2], scores, strict=True)))


def copy_files(version: str, target: Path) -> Path:
    """A copy of the recorded inputs, OUT files and blocks, as its owner had them."""
    folder = target / version
    shutil.copytree(FOLDER / version, folder)
    for path in (folder / "blocks").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def gateway_home(target: Path) -> Path:
    """A home folder with the files of the first gateway, as its owner had them."""
    home = target / "home"
    home.mkdir(mode=0o700)
    shutil.copytree(FOLDER / FIRST_GATEWAY / "files", home / "gateway")
    (home / "gateway").chmod(0o700)
    for path in (home / "gateway").iterdir():
        path.chmod(0o600)
    return home

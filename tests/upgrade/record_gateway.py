"""Record what the gateway of this version stores, so that later versions go on with it.

``python tests/upgrade/record_gateway.py FOLDER`` writes, with the version that runs it, every key
of the server to ``server.json.gz``, the contents of the gateway's folder to ``files/``, and what a
test must know to ``ids.json``: the key, the file that no batch reads, and a batch in each of five
states. ``writing`` is one whose gateway was killed after it had written the files, and before Redis
had them. ``first_gateway`` is of the first version that had batches. To record another version, run
this file with that version in PYTHONPATH, and the folder of its tests in the variable TESTS.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("TESTS", str(Path(__file__).parents[1])))

from openai import OpenAI
from redis import Redis

from support.gateway import chat_file, running_gateway, working
from support.redis_server import running_server

FOLDER = Path(__file__).parent
COMMAND = (sys.executable, "-m", "batchkv_producer")
PUBLISHED = "after batchkv_gateway.batches.steps:Steps._publish"
DEADLINE_SECONDS = 30.0


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bkv-rec-", dir="/tmp"))
    home = folder / "home"
    with running_server() as server:
        environment = {**os.environ, "BATCHKV_REDIS_URL": server.url, "BATCHKV_HOME": str(home)}
        made = subprocess.run(
            [*COMMAND, "keys", "add", "laptop"], env=environment, check=True, capture_output=True
        )
        key = made.stdout.decode().split()[-1]
        found = {"key": key}
        with running_gateway(server.url, home) as gateway, gateway.client(key) as client:
            content = chat_file("unread")
            found["file"] = client.files.create(file=("unread", content), purpose="batch").id
            found["cancelled"] = create(client, "cancelled")
            client.batches.cancel(found["cancelled"])
            found["failed"] = create(client, "failed", content=b"{}\n")
            with working(server.url):
                found["completed"] = create(client, "completed")
                for name in ("cancelled", "failed", "completed"):
                    wait(client, found[name], name)
            found["waiting"] = create(client, "waiting")
            wait(client, found["waiting"], "in_progress")
            found["writing"] = create(client, "writing", model="other")
            wait(client, found["writing"], "in_progress")
        with working(server.url, "other"), running_gateway(server.url, home, die_at=PUBLISHED) as g:
            g.wait_killed()
        with server.connect() as connection:
            write_server(target / "server.json.gz", connection)
    half = shutil.ignore_patterns("*.part")
    shutil.copytree(home / "gateway", target / "files", ignore=half, dirs_exist_ok=True)
    (target / "ids.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    shutil.rmtree(folder)


def create(client: OpenAI, name: str, *, content: bytes = b"", model: str = "fake") -> str:
    """A batch of two rows."""
    rows = content or chat_file(f"{name}-1", f"{name}-2").replace(b'"fake"', f'"{model}"'.encode())
    made = client.files.create(file=(f"{name}.jsonl", rows), purpose="batch")
    return client.batches.create(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=made.id,
        metadata={"name": name},
    ).id


def wait(client: OpenAI, batch_id: str, status: str) -> None:
    """Wait until a batch has this status."""
    until = time.monotonic() + DEADLINE_SECONDS
    while client.batches.retrieve(batch_id).status != status:
        assert time.monotonic() < until, client.batches.retrieve(batch_id)
        time.sleep(0.05)


def write_server(path: Path, connection: Redis) -> None:
    """Write down every key, as ``record.py`` does."""
    sys.path.insert(0, str(FOLDER))
    from record import read_key

    keys: dict[str, Any] = {}
    for key in sorted(connection.scan_iter(count=1000)):
        keys[key.decode()] = read_key(connection, key)
    stored = {"recorded_at": time.time(), "keys": keys}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(stored, sort_keys=True).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

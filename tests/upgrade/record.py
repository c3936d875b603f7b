"""Record what this version of batchkv stores, so that later versions can be held to it.

``python tests/upgrade/record.py tests/upgrade/v0.1.0`` writes, with the version that runs it:

=====================  =========================================================================
``*.jsonl``, ``*.txt``  the inputs
``server.json.gz``      every key of the server: an interrupted run whose workers were killed, a
                        batch that is done, one whose submit was cut off, one with duplicates
``out.jsonl``           OUT of the interrupted run, and ``out.jsonl.errors.jsonl``
``blocks/``             the disk tier that its workers wrote
``model/``              its demo model, to whose weights the blocks belong
``ids.json``            the id of each batch
=====================  =========================================================================
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Redis

from batchkv_producer.client import Client, SamplingParams, Terms
from batchkv_producer.submit import enqueue
from batchkv_worker.demo import MODEL_PATH

EXAMPLES = Path(__file__).parents[2] / "producer/examples/quickstart.jsonl"
COMMAND = (sys.executable, "-m", "batchkv_producer")
MIN_OK_ROWS = 4  # in OUT, when the run is killed
NUM_HALF_ROWS = 520  # a chunk of 500, and one that is not sent
DEADLINE_SECONDS = 120.0


class _CutOffError(Exception):
    """Ends a submit between two chunks."""


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(MODEL_PATH, target / "model", dirs_exist_ok=True)
    write_inputs(target)
    home = Path(tempfile.mkdtemp(prefix="bkv-rec-", dir="/tmp"))
    home.chmod(0o700)
    environment = {**os.environ, "BATCHKV_HOME": str(home / "home")}
    (home / "home").mkdir(mode=0o700)
    try:
        with_done = [*COMMAND, "run", "done.txt", "-m", "demo", "--max-tokens", "8"]
        subprocess.run(
            [*with_done, "--temperature", "0", "--keep", "3650d", "-o", home / "done"],
            cwd=target, env=environment, check=True,
        )  # fmt: skip
        interrupt_a_run(target, environment)
        record_server(target, Redis.from_url(f"unix://{home}/home/redis.sock"))
    finally:
        subprocess.run([*COMMAND, "server", "stop"], env=environment, check=False)
        shutil.rmtree(home)


def write_inputs(target: Path) -> None:
    """The files; the first rows of the interrupted one are answered soon, the last ones late."""
    with EXAMPLES.open(encoding="utf-8") as lines:
        ledger = [next(lines) for _ in range(8)]
    bad = [
        '{"custom_id": "broken", \n',
        '{"custom_id": "question-01", "prompt": "twice"}\n',
        '{"custom_id": "two-answers", "prompt": "Once", "n": 2}\n',
        '{"custom_id": "too-long", "prompt": "Once", "max_tokens": 1000000}\n',
    ]
    late = [
        json.dumps({"custom_id": f"late-{n}", "prompt": f"Tale {n}:", "max_tokens": 100,
                    "temperature": 0, "seed": n}) + "\n"
        for n in range(16)
    ]  # fmt: skip
    (target / "interrupted.jsonl").write_text("".join([*ledger, *bad, *late]), "utf-8")
    (target / "done.txt").write_text("The first\nThe second\n\nThe fourth line\n", "utf-8")
    half = "".join(f'{{"prompt": "Row {n}", "max_tokens": 2}}\n' for n in range(NUM_HALF_ROWS))
    (target / "half.jsonl").write_text(half, "utf-8")
    same = [f'{{"custom_id": "same-{n}", "prompt": "Same {n % 2}", "temperature": 0}}\n'
            for n in range(6)]  # fmt: skip
    (target / "same.jsonl").write_text("".join(same), "utf-8")


def interrupt_a_run(target: Path, environment: dict[str, str]) -> None:
    """Run, and kill the run and its worker once some rows are in OUT."""
    blocks, out = target / "blocks", target / "out.jsonl"
    blocks.mkdir(exist_ok=True)
    command = [*COMMAND, "run", "interrupted.jsonl", "-m", "demo", "-o", "out.jsonl"]
    with_cache = {**environment, "BATCHKV_CACHE": f"disk:{blocks}"}
    run = subprocess.Popen([*command, "--slots", "4"], cwd=target, env=with_cache)
    until = time.monotonic() + DEADLINE_SECONDS
    while not out.exists() or out.read_bytes().count(b'"error":null') < MIN_OK_ROWS:
        assert run.poll() is None and time.monotonic() < until, "the run ended before it was killed"
        time.sleep(0.05)
    listed = subprocess.run(
        [*COMMAND, "workers", "--json"], env=environment, check=True, capture_output=True
    )
    for worker in json.loads(listed.stdout):
        os.kill(worker["pid"], signal.SIGKILL)
    run.kill()
    run.wait()


def record_server(target: Path, connection: Redis) -> None:
    """Add what needs no worker, then write down every key."""
    client = Client(connection)
    ids = {"interrupted.jsonl": "", "done.txt": ""}
    for batch in client.list_batches():
        ids[batch.name] = batch.batch_id
    enqueue.MAX_IN_FLIGHT = 1  # type: ignore[misc]

    def cut_off(*_: int) -> None:
        raise _CutOffError

    with suppress(_CutOffError):
        client.submit(target / "half.jsonl", model="demo", on_progress=cut_off)
    ids["half.jsonl"] = client.check(target / "half.jsonl", model="demo").batch_id
    ids["same.jsonl"] = client.submit(
        target / "same.jsonl",
        model="demo",
        defaults=SamplingParams(max_tokens=4),
        terms=Terms(priority="high", dedupe=True),
    ).batch_id
    for entry in list(ids):
        assert ids[entry], entry
    keys = {}
    for key in sorted(connection.scan_iter(count=1000)):
        keys[key.decode()] = read_key(connection, key)
    stored = {"recorded_at": time.time(), "keys": keys}
    with gzip.GzipFile(target / "server.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps(stored, sort_keys=True).encode())
    (target / "ids.json").write_text(json.dumps(ids, indent=2) + "\n", "utf-8")


def read_key(connection: Redis, key: bytes) -> dict[str, Any]:
    """A key as JSON: its type, its time to live, its values."""
    kind = connection.type(key).decode()
    readers: dict[str, Any] = {
        "string": lambda: [connection.get(key)],
        "hash": lambda: [item for pair in connection.hgetall(key).items() for item in pair],
        "list": lambda: connection.lrange(key, 0, -1),
        "set": lambda: sorted(connection.smembers(key)),
        "zset": lambda: [
            item
            for name, score in connection.zrange(key, 0, -1, withscores=True)
            for item in (name, repr(score).encode())
        ],
    }
    values = [base64.b64encode(value).decode() for value in readers[kind]()]
    return {"type": kind, "ttl_ms": connection.pttl(key), "values": values}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

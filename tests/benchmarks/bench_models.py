"""Two models, three hosts, many rows: who loads what, and whether any row waits in vain.

    python tests/benchmarks/bench_models.py [--quick] [--real] [--kill] [--json FILE]

A large host holds both models together; two small ones hold one at a time. Half of the rows of each
model are queued at the start, the others while the hosts work. Each row must end exactly once.
The hosts may load at most as often as there are hosts and models. No row may wait while a worker
that holds its model has been idle for more than a few seconds.

Engines are fake (they sleep): what is measured is who does what. ``--real`` uses ``batchkv worker``
with the demo model, a copy of it, and ``--memory``. ``--kill`` ends a small host with SIGKILL while
it changes. Exit code 1 if a demand is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchkv_producer import Client
from batchkv_producer.monitor.workers import listed_workers
from batchkv_producer.submit.fingerprint import locate
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import SamplingParams
from support.redis_server import running_server
from support.worker_harness import WorkerProcess, assert_reconciled, wait_until, workers

LOOK_SECONDS = 0.2
IDLE_LIMIT_SECONDS = 5.0
TIMEOUT_SECONDS = 1800.0
PLAN: dict[str, object] = {"step_seconds": 0.2, "steps": 4, "load_seconds": 1.0}
SLOTS = "8"

Idle = dict[str, float]  # worker -> since when it is idle while rows of its model wait


def submit(connection: Redis, folder: Path, model: str, part: int, count: int) -> str:
    """Queue a part of a model's rows; the batch's id."""
    path = folder / f"{Path(model).name}-{part}.jsonl"
    path.write_text("".join(f'{{"prompt": "{part} {i}"}}\n' for i in range(count)), "utf-8")
    params = SamplingParams(max_tokens=2)
    return Client(connection).submit(path, model=model, defaults=params).batch_id


def start_fake(url: str, folder: Path, models: Sequence[str]) -> list[WorkerProcess]:
    """A host that holds both, and two that hold one at a time."""
    groups = {"large": [",".join(models)], "small-1": list(models), "small-2": list(models)}
    command = (sys.executable, "-m", "worker.queue.models.fake_host")
    return [
        WorkerProcess(
            *(url, folder / f"{name}.log", *words, "--name", name, "--stay", "2", "--slots", SLOTS),
            command=command,
            plan=PLAN,
        )
        for name, words in groups.items()
    ]


def start_real(url: str, folder: Path, models: Sequence[str]) -> list[WorkerProcess]:
    """The same with the command, whose memory decides what it holds together."""
    sizes = {"large": "512MiB", "small-1": "64MiB", "small-2": "100MiB"}
    named = [word for model in models for word in ("-m", model)]
    command = (sys.executable, "-P", "-m", "batchkv_producer", "worker", *named)
    return [
        WorkerProcess(
            *(url, folder / f"{name}.log", "--name", name, "--memory", size),
            *("--stay-seconds", "5"),
            command=command,
        )
        for name, size in sizes.items()
    ]


def look(connection: Redis, models: Sequence[str], idle: Idle) -> float:
    """The longest time that any worker has been idle while rows of its model wait."""
    found = [one for one in listed_workers(connection) if one.num_slots and not one.doing]
    now, waiting = time.monotonic(), set[str]()
    for model in models:
        queue = redis_keys.queue_name(model)
        if not sum(connection.llen(key) for key in redis_keys.waiting_lists(queue)):
            continue
        waiting |= {one.name for one in found if queue in one.queues and one.state == "idle"}
    for name in [name for name in idle if name not in waiting]:
        del idle[name]
    return max((now - idle.setdefault(name, now) for name in waiting), default=0.0)


def kill_who_changes(started: Sequence[WorkerProcess]) -> bool:
    """Kill a host that changes its model. Returns whether one did."""
    for one in started:
        if "changing to" in one.said and one.process.poll() is None:
            one.process.kill()
            return True
    return False


def measure(num_rows: int, *, is_real: bool, is_kill: bool) -> dict[str, Any]:
    """One run; its figures."""
    with tempfile.TemporaryDirectory() as temporary, running_server() as server:
        folder = Path(temporary)
        models = ["a", "b"]
        if is_real:
            copied = folder / "copy"
            demo = locate("demo")
            assert demo is not None
            shutil.copytree(demo, copied)
            models = ["demo", str(copied)]
        with server.connect() as connection:
            place = (connection, server.url, folder)
            return run(*place, models, num_rows, is_real=is_real, is_kill=is_kill)


def run(
    connection: Redis,
    url: str,
    folder: Path,
    models: Sequence[str],
    num_rows: int,
    *,
    is_real: bool,
    is_kill: bool,
) -> dict[str, Any]:
    """Queue, work, check, count."""
    quarter = num_rows // 4
    batches = {(m, 1): submit(connection, folder, m, 1, quarter) for m in models}
    began, idle, longest, is_second = time.monotonic(), Idle(), 0.0, False
    started = (start_real if is_real else start_fake)(url, folder, models)
    client, has_killed = Client(connection), not is_kill
    with workers(*started):
        while not all(client.status(batch).is_done for batch in batches.values()) or not is_second:
            assert time.monotonic() - began < TIMEOUT_SECONDS, "waited too long"
            longest = max(longest, look(connection, models, idle))
            has_killed = has_killed or kill_who_changes(started)
            num_ended = sum(client.status(batch).num_ended for batch in batches.values())
            if not is_second and num_ended >= quarter:
                batches |= {(m, 2): submit(connection, folder, m, 2, quarter) for m in models}
                is_second = True
            time.sleep(LOOK_SECONDS)
        seconds = time.monotonic() - began
        for model in models:  # a lease ends a moment after its row
            wip = redis_keys.registry("wip", redis_keys.queue_name(model))
            wait_until(lambda wip=wip: not connection.zcard(wip))
        for (model, _), batch in batches.items():
            assert_reconciled(connection, batch, queue=redis_keys.queue_name(model))
        for one in started:
            one.process.terminate()
        codes = [one.wait(60.0) for one in started]
    num_loads = sum(one.said.count("started with PID") for one in started)
    return {
        "rows": 4 * quarter,
        "seconds": round(seconds, 1),
        "loads": num_loads,
        "most_loads": len(started) + len(models),
        "idle_seconds": round(longest, 1),
        "exit_codes": codes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200 rows")
    parser.add_argument("--real", action="store_true", help="real engines")
    parser.add_argument("--kill", action="store_true", help="kill a host that changes its model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(200 if options.quick else 2000, is_real=options.real, is_kill=options.kill)
    found["load_average"] = os.getloadavg()
    for name, value in found.items():
        print(f"{name:14} {value}")
    if options.kill and -9 not in found["exit_codes"]:
        print("no host changed its model, so none was killed")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    is_met = found["loads"] <= found["most_loads"] and found["idle_seconds"] <= IDLE_LIMIT_SECONDS
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

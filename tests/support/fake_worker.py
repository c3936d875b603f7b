"""A worker without a model: takes rows through ``Transitions``, answers each with canned text.

It understands the part of ``batchkv worker``'s command line that ``batchkv run`` uses. How it
behaves comes from the environment: FAKE_DELAY (seconds a row), FAKE_DIE_AFTER (rows until it kills
itself), FAKE_POISON (a custom_id that kills it), FAKE_FAIL (a custom_id or a prompt that fails),
FAKE_EXIT (end at once with this code and FAKE_WORDS on standard error), FAKE_THOUGHT (the reasoning
of each row, of two tokens). There is no mains here:
with BATCHKV_POLITE=on it takes no row.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from redis import Redis

from batchkv_producer.submit.fingerprint import of_model
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import Result, Usage, decode_job, encode_result
from batchkv_producer.wire.maker import ABILITIES, Maker
from batchkv_producer.wire.transitions import JobResult, Pulled, Transitions, iso_now

GROUP = 4
LEASE_SECONDS = 60


def answer(prompt: str) -> str:
    """What the fake model says."""
    return f"answer to {prompt}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--name", "--kv-scheme", "--slots", "--memory", "--trace", "--adapter"):
        parser.add_argument(flag)
    parser.add_argument("--exit-with-parent", action="store_true")
    options = parser.parse_args()
    if options.trace:
        Path(options.trace).write_text(options.name)
    if "FAKE_EXIT" in os.environ:
        sys.stderr.write(os.environ.get("FAKE_WORDS", "batchkv: no such model") + "\n")
        sys.exit(int(os.environ["FAKE_EXIT"]))
    model = options.model
    if options.adapter:  # it serves the queue of the adapter alone
        os.environ["BATCHKV_ADAPTERS"] = options.adapter
        model = f"{model}@{options.adapter.partition('=')[0]}"
    worker = FakeWorker(model, options.name, options.kv_scheme or "affine8")
    signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
    if options.exit_with_parent:
        threading.Thread(target=worker.watch_parent, daemon=True).start()
    worker.work()


class FakeWorker:
    def __init__(self, model: str, name: str, scheme: str) -> None:
        self.maker = Maker(of_model(model), scheme, "float32")
        self.model, self.name = model, name
        self.queue = redis_keys.queue_name(model)
        self.connection = Redis.from_url(os.environ["BATCHKV_REDIS_URL"])
        self.transitions = Transitions(self.connection)
        self.stopping = threading.Event()
        self.num_done = 0

    def watch_parent(self) -> None:
        while os.read(0, 4096):  # not sys.stdin: Python waits a second at its end for who reads it
            pass
        self.stopping.set()

    def work(self) -> None:
        key = redis_keys.worker(self.name)
        about = {"birth": iso_now(), "queues": self.queue, "hostname": socket.gethostname()}
        about |= {"bkv_abilities": " ".join(ABILITIES)}
        about |= {f"bkv_{name}": value for name, value in self.maker.fields().items()}
        about |= {"pid": str(os.getpid()), "state": "busy", "last_heartbeat": iso_now()}
        self.connection.hset(key, mapping=about)
        self.connection.expire(key, 90)
        self.connection.sadd("rq:workers", key)
        self.connection.sadd(f"rq:workers:{self.queue}", key)
        while os.environ.get("BATCHKV_POLITE") == "on" and not self.stopping.wait(0.02):
            pass
        while not self.stopping.is_set():
            pulled = self.transitions.pull_run(
                *(self.queue, self.name, GROUP, LEASE_SECONDS),
                knows_suspects=True,
                may_be_apart=True,
                maker=self.maker,
            ).jobs
            if not pulled:
                time.sleep(0.02)
            for index, row in enumerate(pulled):
                if self.stopping.is_set():
                    rest = [later.lease for later in pulled[index:]]
                    self.transitions.give_back(self.queue, rest)
                    break
                self.finish(row)
        self.connection.delete(key)

    def finish(self, row: Pulled) -> None:
        request = decode_job(row.data)
        time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
        if request.custom_id == os.environ.get("FAKE_POISON"):
            os.kill(os.getpid(), signal.SIGKILL)
        prompt = request.prompt or str((request.messages or [{}])[-1].get("content"))
        thought = os.environ.get("FAKE_THOUGHT", "")
        is_bad = os.environ.get("FAKE_FAIL", "") in (request.custom_id, request.prompt)
        result = Result(
            custom_id=request.custom_id,
            endpoint=request.endpoint,
            outcome="failed" if is_bad else "ok",
            model=self.model,
            text="" if is_bad else answer(prompt),
            finish_reason="stop",
            usage=Usage(5, 3, 1, reasoning=2 if thought else 0),
            reasoning=thought,
            error=("engine_error", "it was told to") if is_bad else None,
            worker=self.name,
            created=int(time.time()),
            busy_ms=10,
            fingerprint=self.maker.fingerprint,
            scheme=self.maker.scheme,
            more=(Choice(answer(prompt), "stop"),) * ((request.params.n or 1) - 1),
        )
        ending = JobResult(row.lease, result.outcome, encode_result(result), 5, 3, 1, 10)
        self.transitions.finish(self.queue, self.name, [ending], maker=self.maker)
        self.num_done += 1
        if self.num_done == int(os.environ.get("FAKE_DIE_AFTER", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

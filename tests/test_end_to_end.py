"""The whole of it: real commands, the embedded server, real workers, the demo model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job
from rq.serializers import JSONSerializer

from batchkv_producer.client import Client
from batchkv_producer.server import embedded
from batchkv_producer.server import home as server_home
from batchkv_producer.wire.redis_keys import queue_name
from support.homes import new_home
from support.openai_bodies import OWN_KEYS, extra_keys

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "producer" / "examples" / "quickstart.jsonl"
DATA = Path(os.environ.get("BATCHKV_DATA", ROOT.parent / "shared" / "data"))
CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
TIMEOUT_SECONDS = 170


class Home:
    """A fresh BATCHKV_HOME with an embedded server of its own, stopped at the end."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="bkv-e2e-", dir="/tmp"))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BATCHKV_")}
        self.environment = {**kept, "BATCHKV_HOME": str(new_home(self.path / "home"))}

    def cli(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*CLI, *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def url(self) -> str:
        return server_home.Home(self.path / "home").url


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    try:
        yield made
    finally:
        embedded.stop(server_home.Home(made.path / "home"))
        shutil.rmtree(made.path, ignore_errors=True)


def lines(path: Path) -> list[dict[str, object]]:
    """Whole lines that are there; OUT comes and goes while run finds out whether it can write."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the results file has so many lines."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(lines(path)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_running(url: str, process: subprocess.Popen[str]) -> None:
    """Until a worker holds rows of the server's batch."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        with suppress(RedisError), Redis.from_url(url) as connection:
            if any(batch.running for batch in Client(connection).list_batches()):
                return
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


CHAT = {"messages": [{"role": "user", "content": "7"}]}
ASKED: list[dict[str, object]] = [
    {**CHAT, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"prompt": "Once", "n": 2, "logprobs": 2, "return_token_ids": True, "temperature": 0},
    {"prompt": [5, 6, 7], "return_token_ids": True, "skip_special_tokens": False},
    {**CHAT, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [9], "bad_words": ["x"]},
    {**CHAT, "logit_bias": {"7": 5}, "presence_penalty": 1, "frequency_penalty": -1},
    {"prompt": "Once", "stop": "e", "include_stop_str_in_output": True, "repetition_penalty": 1.2},
    {"prompt": "Once", "guided_choice": ["yes", "no"], "n": 2, "max_tokens": 60},
    {**CHAT, "response_format": {"type": "json_object"}, "thinking_budget": 2, "max_tokens": 24},
]


def test_quickstart_answers_are_right(home: Home) -> None:
    """One command on nothing: 40 questions, 40 results, nearly all right with 8-bit KV.

    Rows that ask for more are answered beside them. OpenAI's types accept every line.
    """
    out, asked = home.path / "out.jsonl", home.path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"max_tokens": 4, **row}) + "\n" for row in ASKED))
    num, num_all = len(ASKED), 40 + len(ASKED)
    ran = home.cli("run", QUICKSTART, asked, "-m", "demo", "-o", out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{num_all} = {num_all} ok (" in ran.stdout  # those of few tokens are cut
    right = int(ran.stdout.split("answers right: ")[1].split()[0])
    assert right >= 38
    results = lines(out)
    assert len({line["custom_id"] for line in results}) == num_all
    bodies: list[dict[str, Any]] = [line["response"]["body"] for line in results]  # type: ignore[index]
    assert set[str]().union(*map(extra_keys, bodies)) <= OWN_KEYS
    of_asked = {
        int(str(line["custom_id"]).rpartition(":")[2]): line["response"]["body"]["choices"]  # type: ignore[index]
        for line in results
        if str(line["custom_id"]).startswith("asked.jsonl:")
    }
    assert [len(of_asked[row]) for row in range(1, num + 1)] == [3, 2, 1, 1, 1, 1, 2, 1]
    assert {choice["text"] for choice in of_asked[7]} <= {"yes", "no"}
    assert of_asked[8][0]["message"]["content"].startswith("{")
    assert of_asked[3][0]["prompt_token_ids"] == [5, 6, 7]
    usage = [line["response"]["body"]["usage"] for line in results]  # type: ignore[index]
    cached = [part["prompt_tokens_details"]["cached_tokens"] for part in usage]
    assert sum(count >= 512 for count in cached) >= 30  # the ledger was computed once
    again = home.cli("run", QUICKSTART, asked, "-m", "demo", "-o", out)
    assert again.returncode == 0 and len(lines(out)) == num_all


def test_run_killed_in_the_middle_goes_on(home: Home) -> None:
    """kill -9 of ``batchkv run``: its workers end too; the same command completes each id once."""
    out = home.path / "out.jsonl"
    run = home.start("run", QUICKSTART, "-m", "demo", "-o", out, "--kv-scheme", "float")
    wait_for_lines(out, 1, run)
    workers = children(run.pid)
    run.kill()
    run.communicate()
    with out.open("ab") as file:  # what a crash in the middle of a write leaves
        file.write(out.read_bytes()[:30])
    again = home.cli("run", QUICKSTART, "-m", "demo", "-o", out, "--kv-scheme", "float")
    assert again.returncode == 0, again.stdout + again.stderr
    ids = [line["id"] for line in lines(out)]
    assert len(ids) == len(set(ids)) == 40
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_worker_killed_in_the_middle_is_replaced(home: Home) -> None:
    """kill -9 of the worker: its jobs go back at once, another takes them, every result once."""
    source, out = home.path / "in.jsonl", home.path / "out.jsonl"
    rows = lines(QUICKSTART) * 2
    named = [row | {"custom_id": f"row-{number}"} for number, row in enumerate(rows)]
    source.write_text("".join(json.dumps(row) + "\n" for row in named))
    run = home.start("run", source, "-m", "demo", "-o", out)
    wait_for_running(home.url, run)
    (worker,) = children(run.pid)
    os.kill(worker, signal.SIGKILL)
    text, _ = run.communicate(timeout=TIMEOUT_SECONDS)
    assert run.returncode == 0, text
    assert re.search(r"killed by SIGKILL.* [1-9]\d* rows went back to the queue", text), text
    ids = [line["id"] for line in lines(out)]
    assert len(ids) == len(set(ids)) == len(rows)


def test_documented_rq_worker_serves_a_submitted_batch(home: Home) -> None:
    """submit, stock ``rq worker`` with our class, status by plain RQ, result and results."""
    source = home.path / "in.jsonl"
    source.write_text("".join(QUICKSTART.read_text().splitlines(keepends=True)[:3]))
    batch = home.cli("submit", source).stdout.strip()  # the model is the lines' own
    environment = {
        **home.environment,
        "BATCHKV_MODEL": "demo",
        "BATCHKV_REDIS_URL": home.url,
    }
    command = [sys.executable, "-m", "rq.cli", "worker", "-w", "batchkv_worker.BatchWorker"]
    worked = subprocess.run(
        [*command, "-c", "batchkv_worker.rq_config", "--burst", queue_name("demo")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert worked.returncode == 0, worked.stderr
    with Redis.from_url(home.url) as connection:
        job = Job.fetch(f"{batch}-2", connection=connection, serializer=JSONSerializer)
        assert job.get_status() == "finished"
    ordered = home.cli("results", batch, "--ordered", "--format", "text").stdout.split()
    expected = [
        json.loads(line)["body"]["metadata"]["expected"] for line in source.read_text().splitlines()
    ]
    assert sum(a == b for a, b in zip(ordered, expected, strict=True)) >= 2
    one = json.loads(home.cli("result", f"{batch}-1", "--json").stdout)
    assert one["response"]["body"]["choices"][0]["message"]["content"] == ordered[0]
    assert "3 = 3 ok" in home.cli("wait", batch).stdout


def test_unknown_model_is_one_clear_error(home: Home) -> None:
    """A model folder that is not there ends the run with a sentence, and the batch stays queued."""
    ran = home.cli("run", QUICKSTART, "-m", "/no/such/model", "-o", home.path / "out.jsonl")
    assert ran.returncode == 2
    assert "/no/such/model" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.skipif(
    not (DATA / "gsm8k_8shot.jsonl").exists(), reason="gsm8k_8shot.jsonl is not in BATCHKV_DATA"
)
def test_real_prompts(home: Home) -> None:
    """More 8-shot prompts than there are slots: every row ok, each custom_id once, input order on
    request."""
    source = home.path / "in.jsonl"
    with (DATA / "gsm8k_8shot.jsonl").open() as file:
        source.write_text("".join(line for line, _ in zip(file, range(40), strict=False)))
    ran = home.cli("run", source, "-m", "demo", "--max-tokens", "16")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = lines(Path(f"{source}.results.jsonl"))
    wanted = [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]
    assert sorted(str(line["custom_id"]) for line in results) == sorted(wanted)
    assert all(line["error"] is None for line in results)
    batch = str(results[0]["id"]).split("-")[0]
    ordered = home.cli("results", batch, "--ordered").stdout.splitlines()
    assert [json.loads(line)["custom_id"] for line in ordered] == wanted

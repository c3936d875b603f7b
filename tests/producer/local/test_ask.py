"""``batchkv ask``: one answer on standard output, and nothing left on the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli.ask import _print_row
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.local import ask as asking
from batchkv_producer.local.ask import Question
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, Usage
from support import fake_worker

BATCHKV = [sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))]
MODEL = f"fake-ask-{os.getpid()}"
DEADLINE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, and no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def worker(redis_url: str) -> Iterator[None]:
    """A worker of the model that `ask` did not start."""
    environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url}
    command = [sys.executable, fake_worker.__file__, "--model", MODEL, "--name", "other"]
    with subprocess.Popen(command, env=environment) as process, Redis.from_url(redis_url) as redis:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not Client(redis).serving(redis_keys.queue_name(MODEL)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
        process.terminate()


def settings(url: str, **fake: str) -> dict[str, Any]:
    environment = {**os.environ, "BATCHKV_REDIS_URL": url}
    environment |= {f"FAKE_{name}": value for name, value in fake.items()}
    return {"env": environment, "text": True}


def asked(url: str, *arguments: str, stdin: str = "", **fake: str) -> Any:
    command = [*BATCHKV, "ask", "-m", MODEL, *arguments]
    options = settings(url, **fake)
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, **options)


def left_behind(url: str) -> list[str]:
    """Keys of batches and jobs."""
    with Redis.from_url(url) as redis:
        found = [key.decode() for key in redis.scan_iter()]
    return [key for key in found if key.startswith(("batchkv:", "rq:job"))]


def test_an_answer_and_nothing_else(redis_url: str) -> None:
    """If no worker serves the model, one is started. The answer is printed and the batch
    deleted."""
    found = asked(redis_url, "why?")
    assert (found.returncode, found.stdout) == (0, fake_worker.answer("why?") + "\n"), found.stderr
    assert f"nobody serves {MODEL}: a worker is started" in found.stderr
    assert left_behind(redis_url) == []


def test_the_worker_of_a_question_does_not_pause(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for the answer: a variable that makes workers polite is not for this one."""
    monkeypatch.setenv("BATCHKV_POLITE", "on")
    found = asked(redis_url, "why?")
    assert (found.returncode, found.stdout) == (0, fake_worker.answer("why?") + "\n"), found.stderr


@pytest.mark.usefixtures("worker")
def test_a_worker_that_is_there_answers(redis_url: str) -> None:
    """No worker is started if one serves the model. Standard input is one prompt, without its last
    newline."""
    found = asked(redis_url, "-", "--json", stdin="two\nlines\n")
    assert found.returncode == 0, found.stderr
    assert "a worker is started" not in found.stderr
    line = json.loads(found.stdout)
    assert line["response"]["body"]["choices"][0]["text"] == fake_worker.answer("two\nlines")
    assert left_behind(redis_url) == []


def test_a_question_without_an_answer(redis_url: str) -> None:
    """A failed row is exit code 1, with its reason on standard error alone."""
    found = asked(redis_url, "bad", FAIL="bad")
    assert (found.returncode, found.stdout) == (1, "")
    assert "no answer: engine_error: it was told to" in found.stderr
    assert left_behind(redis_url) == []


def test_ctrl_c_deletes_the_question(redis_url: str) -> None:
    """An interrupted question is deleted from the server, and its worker ends."""
    command = [*BATCHKV, "ask", "-m", MODEL, "slow"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **settings(redis_url, DELAY="2"),
    ) as process:
        with Redis.from_url(redis_url) as redis:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not any(batch.running for batch in Client(redis).list_batches()):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            (batch,) = Client(redis).list_batches()
            assert batch.priority == "high" and batch.expires and batch.keep_seconds
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, ""), said
    assert "the question is deleted from the server" in said
    assert left_behind(redis_url) == []
    with Redis.from_url(redis_url) as redis:
        assert not Client(redis).serving(redis_keys.queue_name(MODEL))


def test_the_same_question_is_another_batch() -> None:
    """An earlier answer is not given again, because no two questions have the same id."""
    client = Client.__new__(Client)  # checking needs no server
    ids = {client.check(Question("why?", "m").source(), model="m").batch_id for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("prompt", "why"), [(" \n", "empty"), ("\ud800", "not UTF-8"), ("x" * 2**24, "longer than")]
)
def test_what_is_no_question_is_refused(prompt: str, why: str) -> None:
    """A wrong prompt is refused in one line, before anything is sent or started."""
    with pytest.raises(UsageError, match=why):
        Question(prompt, "m").source()


def test_a_question_is_a_plain_prompt() -> None:
    """It is sent through the chat template, with the system message, unless it is raw."""
    for prompting in (Prompting(), Prompting(system="s"), Prompting(raw=True)):
        question = Question("why?", "m", prompting=prompting)
        checked = Client.check(question.source(), model="m", prompting=prompting)
        assert (checked.num_jobs, checked.num_bad) == (1, 0)


def test_a_model_has_to_be_named(redis_url: str) -> None:
    """Without -m and BATCHKV_MODEL, or with a folder that does not exist, nothing is queued."""
    command = [*BATCHKV, "ask", "why?"]
    options = settings(redis_url)
    found = subprocess.run(command, capture_output=True, timeout=60, **options)
    assert (found.returncode, found.stdout) == (2, "")
    assert "no model: name one with -m" in found.stderr
    found = subprocess.run([*command, "-m", "./none"], capture_output=True, timeout=60, **options)
    assert (found.returncode, found.stdout) == (2, "")
    assert "there is no model folder" in found.stderr
    assert left_behind(redis_url) == []


@pytest.mark.usefixtures("worker")
def test_who_can_not_answer_is_nobody(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is away, paused or has other weights does not count as serving the model."""
    with Redis.from_url(redis_url) as redis:
        (there,) = Client(redis).serving(redis_keys.queue_name(MODEL))
    assert asking._is_served(MODEL, [there])
    assert not asking._is_served(MODEL, [])
    assert not asking._is_served(MODEL, [replace(there, is_away=True)])
    assert not asking._is_served(MODEL, [replace(there, doing="paused: on battery")])
    monkeypatch.setattr(asking.fingerprint, "of_model", lambda _: "a" * 32)
    assert asking._is_served(MODEL, [replace(there, fingerprint="")])
    assert not asking._is_served(MODEL, [replace(there, fingerprint="b" * 32)])


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("It is", "", "the answer was cut after 512 tokens: --max-tokens N allows more"),
        ("It is", "Hm", "the answer was cut after 512 tokens: --max-tokens N allows more"),
        ("", "Hm", "the reasoning alone took 512 tokens: --max-tokens N allows more, and"),
    ],
)
def test_why_an_answer_is_short(
    text: str, reasoning: str, said: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A model that thinks may use all tokens before its answer, which is then empty."""
    result = Result(
        *("q", "completion", "ok"),
        text=text,
        reasoning=reasoning,
        finish_reason="length",
        usage=Usage(completion=512),
    )
    assert _print_row(StoredRow("b-1", 1, 0, result), as_json=False) == 0
    out, err = capfdbinary.readouterr()
    assert out.decode() == f"{text}\n" and said in err.decode()

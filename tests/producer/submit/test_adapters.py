"""Batches with an adapter: their names, ids and fingerprints, and the workers that run starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.errors import UsageError
from batchkv_producer.local.own_adapter import own_model
from batchkv_producer.monitor.delays import unserved_note
from batchkv_producer.submit.adapter_folders import folder_of, given
from batchkv_producer.submit.fingerprint import of_adapter, of_model
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result, encode_result
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transitions import JobResult, Transitions
from support import fake_worker
from support.adapter_files import write_files

BATCHKV = [sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that passes for a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return str(folder)


@pytest.fixture
def source(write_lines: Write) -> Path:
    """Three rows."""
    return write_lines(*({"custom_id": f"q{n}", "prompt": f"p{n}"} for n in (1, 2, 3)))


def test_an_adapter_is_part_of_a_batch(
    client: Client, source: Path, model: str, redis_connection: Redis
) -> None:
    """Each adapter has a batch and a queue of its own. Both ways to name it mean the same batch."""
    alone = client.submit(source, model=model)
    a, b = (client.submit(source, model=model, adapter=name) for name in "ab")
    assert len({each.batch_id for each in (alone, a, b)}) == 3
    assert a.queue == redis_keys.queue_name(f"{model}@a") != b.queue != alone.queue
    for again in (
        client.submit(source, model=f"{model}@a"),
        client.submit(source, model=model, options=BatchOptions(adapter=Adapter("a"))),
    ):
        assert (again.batch_id, again.joined) == (a.batch_id, True)
    status = client.status(a.batch_id)
    assert (status.model, status.adapter) == (f"{model}@a", "a")
    assert redis_connection.hget(redis_keys.batch(alone.batch_id), "adapter") is None
    assert client.check(source, model=model, adapter=Adapter("a")).batch_id == a.batch_id


def test_a_batch_knows_the_files_of_its_adapter(
    client: Client, source: Path, model: str, tmp_path: Path
) -> None:
    """Other files of the same name are a new generation. Without a folder the worker decides."""
    folder = write_files(tmp_path / "a", number=1.0)
    named = f"a={folder}"
    first = client.submit(source, model=model, adapter=named)
    fingerprint = client.status(first.batch_id).fingerprint
    assert fingerprint == of_adapter(of_model(model), folder) != of_model(model)
    assert client.submit(source, model=model, adapter="a").batch_id == first.batch_id
    write_files(folder, number=2.0)
    second = client.submit(source, model=model, adapter=named)
    assert (second.generation, second.base) == (2, first.batch_id)
    unknown = client.submit(source, model=model, adapter="other")
    assert client.status(unknown.batch_id).fingerprint == ""


def test_answers_of_other_files_are_not_kept(
    client: Client,
    transitions: Transitions,
    source: Path,
    model: str,
    tmp_path: Path,
    write_lines: Write,
) -> None:
    """A corrected file keeps no answer of an adapter whose files have changed since."""
    folder = write_files(tmp_path / "a", number=1.0)
    scheme = BatchOptions(maker=Maker(scheme="affine8"))
    first = client.submit(source, model=model, adapter=f"a={folder}", options=scheme)
    ended = [
        JobResult(row.lease, "ok", encode_result(Result(f"q{n}", "completion", "ok", text="a")))
        for n, row in enumerate(transitions.pull(first.queue, "w", 9, 60), 1)
    ]
    assert transitions.finish(first.queue, "w", ended) == ["ok"] * 3
    more = write_lines(*({"custom_id": f"q{n}", "prompt": f"p{n}"} for n in (1, 2, 4)), name="2")
    earlier = EarlierBatch(first.batch_id)
    client.submit(more, model=model, adapter=f"a={folder}", earlier=earlier)
    assert (earlier.why_not, earlier.num_alike) == ("", 2)
    write_files(folder, number=2.0)
    later = EarlierBatch(first.batch_id)
    client.submit(more, model=model, adapter=f"a={folder}", earlier=later)
    assert "files" in later.why_not or "weights" in later.why_not


def test_folders_come_from_the_caller_or_the_variable(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that a command names is used before that of BATCHKV_ADAPTERS."""
    write_files(tmp_path / "1", number=1.0)
    write_files(tmp_path / "2", number=2.0)
    assert folder_of("a") == "" and of_model(f"{model}@a") == ""
    monkeypatch.setenv("BATCHKV_ADAPTERS", f"a={tmp_path}/1")
    assert of_model(f"{model}@a") == of_adapter(of_model(model), tmp_path / "1")
    with given(Adapter("a", f"{tmp_path}/2")):
        assert of_model(f"{model}@a") == of_adapter(of_model(model), tmp_path / "2")
        assert folder_of("b") == ""
    monkeypatch.setenv("BATCHKV_ADAPTERS", f"a={tmp_path}/none")
    assert of_model(f"{model}@a") == ""
    assert of_adapter("", tmp_path / "1") == ""


def test_nobody_serves_an_adapter(client: Client, source: Path, model: str) -> None:
    """The note names the model with its adapter, and the command with its flag."""
    batch = client.submit(source, model=model, adapter="a").batch_id
    note = unserved_note(client.status(batch))
    assert f"of {model}@a. A worker that was just started" in note
    assert "Otherwise run on a machine with the model and the adapter: " in note
    assert note.endswith(f"batchkv worker -m {model} --adapter a=FOLDER")


def test_workers_here_need_the_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run`` starts no worker for an adapter that this machine does not have."""
    own = own_model(f"{model}@a", Adapter("a", str(write_files(tmp_path / "a"))))
    assert (own.model, own.arguments) == (model, ("--adapter", f"a={tmp_path}/a"))
    assert own.queues == tuple(map(redis_keys.queue_name, (model, f"{model}@a")))
    assert own_model(model).arguments == ()
    with pytest.raises(UsageError, match="--adapter b=FOLDER, or set BATCHKV_ADAPTERS"):
        own_model(f"{model}@b", Adapter("b"))
    monkeypatch.setenv("BATCHKV_ADAPTERS", f"b={tmp_path}")
    with pytest.raises(UsageError, match=r"no adapter_config.json and no adapters.safetensors"):
        own_model(f"{model}@b")


def test_run_and_ask_start_workers_with_the_adapter(
    redis_url: str, source: Path, model: str, tmp_path: Path
) -> None:
    """The answers are of the model with the adapter's files, by its name and fingerprint."""
    folder, out = write_files(tmp_path / "a"), tmp_path / "out.jsonl"
    flags = ("-m", model, "--adapter", f"a={folder}")
    environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url}

    def batchkv(*words: object) -> Any:
        command = [*BATCHKV, *map(str, words), *flags]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    ran = batchkv("run", source, "-o", out)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    mark = f"fp_{of_adapter(of_model(model), folder)[:12]}_affine8"
    assert {(row["model"], row["system_fingerprint"]) for row in rows} == {(f"{model}@a", mark)}
    asked = batchkv("ask", "why?")
    assert (asked.returncode, asked.stdout) == (0, fake_worker.answer("why?") + "\n"), asked.stderr
    assert f"nobody serves {model}@a: a worker is started" in asked.stderr


def test_a_wrong_name_is_refused_before_anything_is_read(source: Path) -> None:
    """A path is no name of an adapter."""
    for command in (["submit", str(source)], ["run", str(source)], ["ask", "why?"]):
        ended = CliRunner().invoke(cli, [*command, "-m", "demo", "--adapter", "../x"])
        assert ended.exit_code == 2 and "adapter's name '../x'" in ended.output + str(ended.stderr)


def test_two_adapters_for_one_batch_are_refused(source: Path) -> None:
    """None of them is ignored in silence."""
    two = ["--adapter", "a=x", "--adapter", "b=y"]
    for command in (["submit", str(source)], ["run", str(source)], ["ask", "why?"]):
        ended = CliRunner().invoke(cli, [*command, "-m", "demo", *two])
        assert ended.exit_code == 2 and "give the flag once" in ended.output + str(ended.stderr)

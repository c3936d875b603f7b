"""status, list and workers for people: in 80 columns, with per cent and time left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer.cli import cli
from batchkv_producer.monitor.remaining import percent_done, seconds_left, share_done
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.tables import (
    Column,
    shorten_middle,
    shorten_model,
    shorten_models,
    shorten_names,
    table_lines,
)
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions

MODELS = (
    "mlx-community/Qwen3-Coder-480B-A35B-Instruct-4bit-and-quite-a-long-name-behind-it",
    "/Users/somebody/Library/Application Support/models/of-mine/that-I-trained-myself-2026",
    "m",
)


def batch(**values: Any) -> BatchStatus:
    base: dict[str, Any] = dict.fromkeys(BatchStatus.__dataclass_fields__, 0)
    base |= {"batch_id": "a" * 16, "queue": "q", "priority": "normal", "is_submitted": True}
    return BatchStatus(**{**base, "total": 100, **values})


def worker(rate: int | None, queue: str = "q") -> WorkerInfo:
    return WorkerInfo("w", "h", 1, (queue,), "busy", 0.0, 0, 0, 0, tokens_per_second=rate)


@pytest.fixture
def at_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)


def batchkv(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def fill(connection: Redis, form: str = "{:016x}") -> list[str]:
    """Batches with many rows and long names, in every state, and workers with and without data."""
    moves, ids = Transitions(connection), []
    for number, model in enumerate(MODELS):
        batch_id, queue = form.format(number), redis_keys.queue_name(model)
        fields: dict[str, str | int] = {"digest": "0", "total": 1_000_000, "num_chunks": 1}
        fields |= {"model": model, "queue": queue, "name": f"prompts-of-{'many-' * 20}days.jsonl"}
        if number:
            fields |= {"priority": ("low", "high")[number - 1], "expires": int(time.time()) + 9999}
        moves.create(batch_id, fields)
        counts = {"chunks": 1, "ok": 340_000, "failed": 1234, "canceled": 99, "running": 128}
        counts |= {"completion_tokens": 340_000 * 100, "prompt_tokens": 10**9, "cut": 200_000}
        connection.hset(redis_keys.batch(batch_id), mapping=counts)  # type: ignore[arg-type]
        connection.rpush(redis_keys.queue(queue), f"{batch_id}-1")  # so that nobody mends the rest
        ids.append(batch_id)
        name = f"a-mac-with-a-long-host-name-in-the-cellar-{number}-1a2b3c4d"
        key = redis_keys.worker(name)
        about = {"birth": "2026-01-01T00:00:00Z", "queues": queue, "hostname": "h" * 60}
        about |= {"pid": "12345", "state": "busy", "successful_job_count": "340000"}
        if number != 2:
            about |= {"bkv_model": model, "bkv_scheme": "affine4/32,first+last=affine8"}
            about |= {"bkv_version": "0.1.0", "bkv_tokens_per_second": "5120"}
            about |= {
                "bkv_memory": "31000000000",
                "bkv_state": ("", "finishing 1,200 rows")[number],
            }
        connection.hset(key, mapping=about)  # type: ignore[arg-type]
        connection.sadd("rq:workers", key)
        connection.sadd(f"rq:workers:{queue}", key)
    return ids


@pytest.mark.usefixtures("at_server")
def test_everything_fits_eighty_columns(redis_connection: Redis) -> None:
    """With long names, a million rows and all columns, no line is longer than 80 characters."""
    ids = fill(redis_connection)
    commands = (["status"], ["list"], ["workers"], *(["status", each] for each in ids))
    for command in commands:
        found = batchkv(*command)
        assert found.exit_code == 0, found.output
        lines = found.stdout.splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        if command[-1] not in ("workers", *ids):
            assert all(each in found.stdout for each in ids)


@pytest.mark.usefixtures("at_server")
def test_waiting_rows_have_a_column_beside_canceled_ones(redis_connection: Redis) -> None:
    """Where not all columns fit, those of canceled rows are left out first."""
    ids = fill(redis_connection)
    counts = {"total": 60, "ok": 0, "failed": 1, "canceled": 2, "running": 0}
    for batch_id in ids:
        redis_connection.hset(redis_keys.batch(batch_id), mapping=counts)  # type: ignore[arg-type]
    redis_connection.delete(*redis_connection.scan_iter("rq:worker*"))  # and so no time left
    title, *lines = batchkv("status").stdout.splitlines()
    assert "QUEUED" in title.split() and "CANCELED" not in title
    (line,) = (line for line in lines if line.startswith(ids[0]))
    assert line[: title.index("QUEUED") + len("QUEUED")].split()[-1] == "57"


@pytest.mark.usefixtures("at_server")
def test_failed_rows_are_listed_beside_the_long_ids_of_a_gateway(redis_connection: Redis) -> None:
    """Where not all columns fit, other ones are left out."""
    ids = fill(redis_connection, "batch_{:032x}")
    title, *lines = batchkv("list").stdout.splitlines()
    assert "FAILED" in title.split() and "PRIORITY" not in title
    assert {line.split()[0] for line in lines} == {*ids}
    end = title.index("FAILED") + len("FAILED")
    assert all(line[:end].split()[-1] == "1,234" and len(line) <= 80 for line in lines)


@pytest.mark.usefixtures("at_server")
def test_a_deadline_is_listed_until_all_rows_have_ended(redis_connection: Redis) -> None:
    """After that it says nothing: results stay for another time."""
    late = fill(redis_connection)[1:]
    assert all(batch_id in batchkv("list").stdout for batch_id in late)
    assert "EXPIRES" in batchkv("list").stdout
    ended = {"total": 3, "ok": 1, "failed": 1, "canceled": 1, "running": 0}
    for batch_id in late:
        redis_connection.hset(redis_keys.batch(batch_id), mapping=ended)  # type: ignore[arg-type]
    shown = batchkv("list").stdout
    assert "EXPIRES" not in shown and all(batch_id in shown for batch_id in late)


@pytest.mark.usefixtures("at_server")
def test_the_worker_of_a_begun_batch_is_named(redis_connection: Redis) -> None:
    """Also once a worker has taken rows and died: nobody else would compute the rest."""
    (batch_id, *_) = fill(redis_connection)
    redis_connection.delete(*redis_connection.scan_iter("rq:worker*"))
    shown = "".join(batchkv("status", batch_id).stdout.split())
    assert f"servedbynone:`batchkvworker-m{MODELS[0]}`computestherest" in shown


@pytest.mark.usefixtures("at_server")
def test_per_cent_and_time_left(redis_connection: Redis) -> None:
    """The share of rows that are done, and the time left at the present speed of the workers."""
    ids = fill(redis_connection)
    shown = batchkv("status", ids[0]).stdout
    assert re.search(r"done +34 %, about 3h34m left\n", shown)  # 658,667 rows of 100 at 5,120/s
    assert "34 %" in batchkv("status").stdout and "34 %" in batchkv("list").stdout
    fields = json.loads(batchkv("list", "--json").stdout)
    by_id = {each["batch_id"]: each for each in fields}
    assert by_id[ids[0]]["percent_done"] == 34
    assert by_id[ids[0]]["seconds_left"] == pytest.approx(658_667 * 100 / 5120)
    assert by_id[ids[2]]["seconds_left"] is None  # its worker does not tell


@pytest.mark.usefixtures("at_server")
def test_workers_that_pass_rows_by_are_listed_apart(redis_connection: Redis) -> None:
    """``status BATCH`` does not list workers that pass its rows by as serving it."""
    (batch_id, *_) = fill(redis_connection)
    redis_connection.hset(redis_keys.batch(batch_id), "scheme", "affine8")
    name = "a-mac-with-a-long-host-name-in-the-cellar-0-1a2b3c4d"
    fields = json.loads(batchkv("status", batch_id, "--json").stdout)
    has = "it has KV scheme affine4/32,first+last=affine8"
    assert fields["workers"] == [] and fields["passed_by"] == {name: has}
    shown = re.sub(r"\s+", " ", batchkv("status", batch_id).stdout)
    assert f"served by none passed by {name} ({has})" in shown
    redis_connection.hset(redis_keys.batch(batch_id), "scheme", "affine4/32,first+last=affine8")
    fields = json.loads(batchkv("status", batch_id, "--json").stdout)
    assert fields["workers"] == [name] and fields["passed_by"] == {}


@pytest.mark.usefixtures("at_server")
def test_rows_that_a_worker_died_with_are_told_of(redis_connection: Redis, tmp_path: Path) -> None:
    """``status BATCH`` names them while they wait to run apart."""
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', "utf-8")
    batch_id = batchkv("submit", source, "-m", "m").stdout.strip()
    queue, moves = redis_keys.queue_name("m"), Transitions(redis_connection)
    assert "set apart" not in batchkv("status", batch_id).stdout
    moves.give_back(queue, [job.lease for job in moves.pull(queue, "w", 2, 60)], died=True)
    shown = re.sub(r"\s+", " ", batchkv("status", batch_id).stdout)
    assert "set apart 2 rows of its queue: a worker died with them" in shown
    assert json.loads(batchkv("status", batch_id, "--json").stdout)["num_apart"] == 2


@pytest.mark.usefixtures("at_server")
def test_a_worker_with_the_adapter_of_a_batch_serves_it(redis_connection: Redis) -> None:
    """Its weights are compared with the adapter, not those of the model alone."""
    (batch_id, *_) = fill(redis_connection)
    served = f"{MODELS[0]}@legal"
    queue = redis_keys.queue_name(served)
    about = {"model": served, "queue": queue, "fingerprint": "12ab"}
    redis_connection.hset(redis_keys.batch(batch_id), mapping=about)
    redis_connection.rpush(redis_keys.queue(queue), f"{batch_id}-1")
    name = "a-mac-with-a-long-host-name-in-the-cellar-0-1a2b3c4d"
    key = redis_keys.worker(name)
    record = {"queues": f"{redis_keys.queue_name(MODELS[0])},{queue}", "bkv_fingerprint": "99"}
    redis_connection.hset(key, mapping={**record, "bkv_adapters": "legal:12ab"})
    redis_connection.sadd(redis_keys.workers(queue), key)
    fields = json.loads(batchkv("status", batch_id, "--json").stdout)
    assert (fields["workers"], fields["passed_by"], fields["waits_for"]) == ([name], {}, None)
    assert "weights 12ab" not in batchkv("status").stdout
    redis_connection.hset(key, "bkv_adapters", "legal:34cd")
    fields = json.loads(batchkv("status", batch_id, "--json").stdout)
    assert fields["workers"] == [] and fields["passed_by"] == {name: "it has weights 34cd"}
    assert "weights 34cd" in batchkv("status").stdout


def test_no_time_left_is_shown_for_rows_that_a_dead_worker_holds() -> None:
    """They wait until its lease ends. A dead worker without rows does not change the time left."""
    open_rows = batch(batch_id="b", ok=90, completion_tokens=900, running=10)
    alive = worker(10)
    assert seconds_left([open_rows], [alive]) == {"b": 10.0}
    assert seconds_left([open_rows], [worker(10_000)]) == {"b": 1.0}  # never 0 while rows are open
    dead = dataclasses.replace(worker(90), is_away=True)
    assert seconds_left([open_rows], [alive, dead]) == {"b": 10.0}
    assert seconds_left([open_rows], [alive, dataclasses.replace(dead, num_running=9)]) == {}


def test_a_paused_worker_makes_no_batch_faster() -> None:
    """The time left is that of the workers that compute; with none of them nothing is known."""
    open_rows = batch(batch_id="b", ok=90, completion_tokens=900, running=10)
    paused = dataclasses.replace(worker(90), doing="paused: on battery")
    assert seconds_left([open_rows], [worker(10), paused]) == {"b": 10.0}
    assert seconds_left([open_rows], [paused]) == {}


@pytest.mark.usefixtures("at_server")
def test_workers_say_what_they_run(redis_connection: Redis) -> None:
    """Version, model, scheme, tokens a second and memory, for people and for programs."""
    fill(redis_connection)
    shown = batchkv("workers").stdout
    about = "affine4/32,first+last=affine8, batchkv 0.1.0, 340,000 ok, 0 failed"
    for words in ("5,120", "31.0 GB", about, "finishing 1"):
        assert words in shown
    found = {each["name"][-10]: each for each in json.loads(batchkv("workers", "--json").stdout)}
    assert found["0"]["scheme"] == "affine4/32,first+last=affine8"
    assert (found["0"]["tokens_per_second"], found["0"]["memory_bytes"]) == (5120, 31_000_000_000)
    assert (found["0"]["model"], found["0"]["version"]) == (MODELS[0], "0.1.0")
    assert found["2"]["tokens_per_second"] is None


@pytest.mark.usefixtures("at_server")
def test_workers_say_which_adapters_they_serve(redis_connection: Redis) -> None:
    """The names are listed; what is no name of an adapter in a record is left out."""
    fill(redis_connection)
    (key, *_) = sorted(redis_connection.smembers(redis_keys.workers()))
    redis_connection.hset(key, "bkv_adapters", "support:12ab legal: ../x:1 \x1b[31m")
    assert "adapters support, legal" in batchkv("workers").stdout
    name = key.decode().removeprefix(redis_keys.worker(""))
    found = {each["name"]: each for each in json.loads(batchkv("workers", "--json").stdout)}
    assert found[name]["adapters"] == ["support", "legal"]


def test_batches_of_a_queue_wait_for_each_other() -> None:
    """A batch's time includes the batches before it. Urgent ones come first, queues are apart."""
    batches = [
        batch(batch_id="late", created=2, ok=50, completion_tokens=500),
        batch(batch_id="early", created=1, ok=90, completion_tokens=900),
        batch(batch_id="urgent", created=3, ok=99, completion_tokens=9900, priority="high"),
        batch(batch_id="other", queue="r", ok=50, completion_tokens=500),
        batch(batch_id="done", total=5, ok=5, completion_tokens=500),
    ]
    left = seconds_left(batches, [worker(20), worker(30), worker(100, "r"), worker(None)])
    assert left == {
        "urgent": pytest.approx(100 / 50),
        "early": pytest.approx(200 / 50),
        "late": pytest.approx(700 / 50),
        "other": pytest.approx(5),
    }
    assert seconds_left(batches, []) == {}
    unknown = [batch(batch_id="new", created=0), *batches[:2]]
    assert seconds_left(unknown, [worker(50)]) == {}


def test_a_hundred_per_cent_is_all() -> None:
    """One open row of a million is 99 %."""
    assert percent_done(batch(total=1_000_000, ok=999_999)) == 99
    assert percent_done(batch(total=1_000_000, ok=1_000_000)) == 100
    assert percent_done(batch(total=100, ok=1)) == 1


def test_a_batch_without_rows_is_not_done_to_a_hundred_per_cent() -> None:
    """All lines of one were refused; those of another are still being checked."""
    assert share_done(batch(total=0)) == "no rows"
    assert share_done(batch(total=0, is_submitted=False)) == "0 %"
    assert share_done(batch(total=4, ok=4)) == "100 %"


def test_names_are_shortened_in_the_middle() -> None:
    """A model's owner or folder is left out first, then the middle of its name."""
    assert shorten_model("mlx-community/Qwen3-4B-4bit", 20) == "Qwen3-4B-4bit"
    assert shorten_model("mlx-community/Qwen3-4B-4bit", 10) == "Qwen..4bit"
    assert shorten_model("/models/mine/", 8) == "mine"
    assert shorten_middle("abcdefghij", 10) == "abcdefghij"
    assert [len(shorten_middle("abcdefghij", n)) for n in range(10)] == list(range(10))


@pytest.mark.parametrize("limit", [8, 12, 20, 30])
def test_shortened_names_of_a_column_differ(limit: int) -> None:
    """Names that begin and end alike are cut so that the part in which they differ is shown."""
    names = [f"prompts-of-a-long-experiment-{n}-at-temperature-0.jsonl" for n in (1, 2, 3, 31)]
    models = ["mlx-community/Qwen3-4B-Instruct-2507-4bit", "of-mine/Qwen3-4B-Instruct-2507-4bit"]
    models += ["mlx-community/Qwen3-4B-Thinking-2507-4bit", "mlx-community/Qwen3-4B-4bit"]
    for shown in (shorten_names([*names, *names], limit), shorten_models(models, limit)):
        assert len(set(shown)) == 4, shown
        assert max(map(len, shown)) <= limit
    assert shorten_names(["same-name-of-two-batches"] * 2, 8) == ["sam..hes"] * 2
    assert [len(name) for name in shorten_names(["abcdefgh1x", "abcdefgh2x"], 3)] == [3, 3]


def test_short_names_keep_what_can_be_read() -> None:
    """Names that already differ at their beginning are cut at their end; of lists, each name."""
    names = ["long.jsonl", "long3.jsonl", "prompts.jsonl"]
    assert shorten_names(names, 8) == ["long.j..", "long3...", "pro..onl"]
    assert shorten_model("demo, of-mine/small, /models/other", 20) == "demo, small, other"
    assert shorten_model("demo, of-mine/small", 20) == "demo, of-mine/small"


def test_what_does_not_fit_is_narrowed_then_dropped() -> None:
    """Names become shorter first. Then columns are left out by their number, empty ones at once."""
    columns = [
        Column("ID", ["0123456789"]),
        Column("NONE", [0], if_any=True),
        Column("FIRST", ["f" * 10], drop=1),
        Column("NAME", ["n" * 30], shorten_names, min_width=8, drop=2),
    ]
    assert table_lines(columns, 60)[0].split() == ["ID", "FIRST", "NAME"]
    assert table_lines(columns, 32)[1].split() == ["0123456789", "f" * 10, "nnnn..nnnn"[1:-1]]
    assert table_lines(columns, 25)[0].split() == ["ID", "NAME"]
    assert table_lines(columns, 15)[0].split() == ["ID"]


def watched(url: str, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if "BATCHKV" not in key}
    environ = {**kept, "BATCHKV_REDIS_URL": url, "BATCHKV_HOME": str(tmp_path / "home")}
    command: Sequence[str] = (sys.executable, "-m", "batchkv_producer", *arguments, "--watch")
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def test_watch_shows_a_batch_until_it_is_done(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """In a pipe, blocks are separated by an empty line. It ends when the batch is done."""
    (batch_id, *_) = fill(redis_connection)
    process = watched(redis_url, tmp_path, "status", batch_id)
    assert process.stdout is not None
    seen = process.stdout.readline()
    redis_connection.hset(redis_keys.batch(batch_id), "ok", 1_000_000 - 1234 - 99)
    redis_connection.hset(redis_keys.batch(batch_id), "running", 0)
    seen += process.stdout.read()
    assert process.wait(30) == 0
    process.stdout.close()
    first, last = seen.split("\n\n")
    assert "34 %" in first and "100 %" in last
    assert "\x1b" not in seen


@pytest.mark.usefixtures("at_server")
def test_watch_and_json_exclude_each_other(redis_connection: Redis) -> None:
    """Together they are refused with a sentence."""
    for command in (["status"], ["list"], ["workers"]):
        found = batchkv(*command, "--watch", "--json")
        assert found.exit_code == 2 and "--watch and --json exclude each other" in found.stderr


def test_a_long_table_takes_each_value_a_few_times() -> None:
    """The work for a table grows linearly with its rows."""

    class Counted(list[int]):
        num_walks = 0

        def __iter__(self) -> Iterator[int]:
            Counted.num_walks += 1
            return super().__iter__()

    assert len(table_lines([Column("N", Counted(range(500)))], 80)) == 501
    assert Counted.num_walks < 10

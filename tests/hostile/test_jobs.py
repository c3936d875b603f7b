"""Hostile payloads of jobs: each gives a failed row with a reason, and nothing of it is called.

All payloads go through a real server, RQ's side of a real worker and back, in one batch.
"""

from __future__ import annotations

import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from batchkv_producer.errors import WireError
from batchkv_producer.wire import job as wire
from batchkv_producer.wire import redis_keys, transitions
from batchkv_producer.wire.inflating import inflate
from batchkv_producer.wire.job import Request, Result, encode_job
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from hostile.traps import Trap, batchkv, burst, trap
from support.fake_engine import FakePlan
from support.redis_server import RedisServer
from support.worker_harness import (
    MODEL,
    QUEUE,
    assert_reconciled,
    counts_of,
    results_of,
    submit,
)

MIB = 2**20


class Evil:
    """Pickles as a call that makes a folder."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (str(self._mark),)


def call(*parts: Any) -> bytes:
    """A job's data with this call."""
    return zlib.compress(json.dumps(list(parts)).encode())


def payload(**changes: Any) -> bytes:
    """The call of a batchkv job, with other fields."""
    fields = {"custom_id": "c", "endpoint": "completion", "prompt": "p", "params": {}}
    return call(wire.FUNCTION_NAME, None, [{**fields, **changes}], {})


def raw_payload(text: str) -> bytes:
    """The call of a batchkv job, its one argument as text."""
    return zlib.compress(f'["batchkv.generate",null,[{text}],{{}}]'.encode())


def bomb(num_bytes: int, start: bytes = b"", fill: bytes = b" ") -> bytes:
    """Compressed data that inflates to that many bytes."""
    deflater = zlib.compressobj(9)
    parts = [deflater.compress(start)]
    parts += [deflater.compress(fill * MIB) for _ in range(num_bytes // MIB)]
    return b"".join([*parts, deflater.flush()])


GOOD = '{"custom_id":"c","endpoint":"completion","prompt":"p"}'

# name -> (data made of the mark's path, what the row's error says)
HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "pickle": (lambda m: pickle.dumps(Evil(m)), "not compressed"),
    "pickle, compressed": (lambda m: zlib.compress(pickle.dumps(Evil(m))), "not JSON"),
    "pickle 5, compressed": (lambda m: zlib.compress(pickle.dumps(Evil(m), 5)), "not JSON"),
    "pickle 0, compressed": (lambda m: zlib.compress(pickle.dumps(Evil(m), 0)), "not JSON"),
    "os.system": (lambda m: call("os.system", None, [f"touch {m}"], {}), "'os.system'"),
    "os.mkdir": (lambda m: call("os.mkdir", None, [str(m)], {}), "'os.mkdir'"),
    "eval": (lambda m: call("builtins.eval", None, [f"open({str(m)!r},'w')"], {}), "eval'"),
    "our name with a zero": (lambda m: call("batchkv.generate\0", None, [{}], {}), "only"),
    "a name that is a list": (lambda m: call(["os.mkdir"], None, [str(m)], {}), "only"),
    "a name of another case": (lambda m: call("Batchkv.Generate", None, [{}], {}), "only"),
    "instance": (lambda m: call(wire.FUNCTION_NAME, "os", [{}], {}), "never writes"),
    "instance that is false": (lambda m: call(wire.FUNCTION_NAME, False, [{}], {}), "never"),
    "keyword arguments": (lambda m: call(wire.FUNCTION_NAME, None, [{}], {"a": 1}), "never"),
    "two arguments": (lambda m: call(wire.FUNCTION_NAME, None, [{}, {}], {}), "never writes"),
    "no list": (lambda m: zlib.compress(b'{"func_name":"os.mkdir"}'), "not a call"),
    "five parts": (lambda m: call(wire.FUNCTION_NAME, None, [{}], {}, 1), "not a call"),
    "a field of ours too many": (lambda m: payload(__class__="os.mkdir"), "fields that"),
    "a custom_id of a million": (lambda m: payload(custom_id="x" * 10**6), "custom_id is too long"),
    "a template as a field": (lambda m: payload(chat_template="{{ 1 }}"), "fields that"),
    "an endpoint that is a module": (lambda m: payload(endpoint="os"), "unknown endpoint"),
    "neither prompt nor messages": (lambda m: payload(prompt=None), "prompt"),
    "a prompt that is an object": (lambda m: payload(prompt={"a": 1}), "not a str"),
    "messages that are a text": (lambda m: payload(prompt=None, messages="x"), "messages"),
    "stop that is an object": (lambda m: payload(params={"stop": {"a": 1}}), "stop"),
    "a parameter nobody knows": (lambda m: payload(params={"eval": 1}), "params.eval"),
    "a seed that is a truth": (lambda m: payload(params={"seed": True}), "params.seed"),
    "tokens as a text": (lambda m: payload(params={"max_tokens": "1"}), "params.max_tokens"),
    "10,000 deep": (lambda m: zlib.compress(b"[" * 10_000 + b"]" * 10_000), "not JSON"),
    "a deep argument": (
        lambda m: raw_payload('{"messages":' + "[" * 10_000 + "]" * 10_000 + "}"),
        "not JSON",
    ),
    "a number of 5,000 digits": (lambda m: raw_payload("1" * 5000), "not JSON"),
    "bytes that are no text": (lambda m: zlib.compress(b'["\xff\xfe"]'), "not JSON"),
    "nothing": (lambda m: b"", "missing"),
    "an empty text": (lambda m: zlib.compress(b""), "not JSON"),
    "gzip": (lambda m: b"\x1f\x8b\x08\x00" + bytes(20), "not compressed"),
    "cut short": (lambda m: zlib.compress(b"x" * 1000)[:-5], "cut short"),
    "a bomb of blanks": (lambda m: bomb(65 * MIB), "larger than"),
    "a bomb of nesting": (lambda m: bomb(65 * MIB, b"", b"["), "larger than"),
    "a bomb in our own call": (
        lambda m: bomb(65 * MIB, b'["batchkv.generate",null,[{"prompt":"'),
        "larger than",
    ),
    "a dictionary that is not here": (
        lambda m: b"\x78\xbb\x00\x00\x00\x01" + b"abc",
        "not compressed",
    ),
    "a script": (lambda m: f"#!/bin/sh\ntouch {m}\n".encode(), "not compressed"),
    "msgpack": (lambda m: msgpack.packb({"func": "os.mkdir"}), "not compressed"),
    "yaml": (lambda m: zlib.compress(b"!!python/object/apply:os.mkdir [x]"), "not JSON"),
}


@pytest.fixture(scope="module")
def endings(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Result]]:
    """Name of a payload -> how its row ended, of one batch with all of them and a good row."""
    folder = tmp_path_factory.mktemp("jobs")
    with trap(folder) as here, redis_server.connect() as connection:
        connection.flushall()
        data = {name: make(here.mark) for name, (make, _) in HOSTILE.items()}
        data["good"] = raw_payload(GOOD)
        batch = submit(connection, list(data), data=data.__getitem__)
        burst(connection)
        assert_reconciled(connection, batch)
        results = results_of(connection, batch)
    yield {name: results[line] for line, name in enumerate(data, 1)}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_payload_is_a_failed_row(name: str, endings: dict[str, Result]) -> None:
    """It ends once, with a code and a sentence that names the fault, and nothing is called."""
    row = endings[name]
    assert row.outcome == "failed" and row.error is not None
    assert row.error[0] == "invalid_request"
    assert HOSTILE[name][1] in row.error[1]
    assert len(row.error[1]) < 500


def test_the_good_row_beside_them_is_answered(endings: dict[str, Result]) -> None:
    """Forty hostile neighbours cost a row nothing."""
    assert endings["good"].outcome == "ok" and endings["good"].text == "echo p"


def test_data_beyond_the_limit_never_leaves_the_server(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is compared before the data is sent, so that no worker has it in memory."""
    monkeypatch.setattr(transitions, "MAX_JOB_BYTES", 1000)
    noise = random.Random(1).randbytes(5000)
    batch = submit(redis_connection, ["x"], data=lambda _: noise)
    pulled = Transitions(redis_connection).pull(QUEUE, "w", 1, 60)
    assert [row.data for row in pulled] == [b""]
    Transitions(redis_connection).give_back(QUEUE, [row.lease for row in pulled])
    burst(redis_connection)
    assert "larger than" in results_of(redis_connection, batch)[1].error[1]  # type: ignore[index]


def test_what_is_too_large_compressed_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for the bytes as they come, too."""
    with pytest.raises(WireError, match="compressed as it is"):
        inflate(b"x" * 1001, 1000, "job")


# -- what else a job's hash may say ---------------------------------------------------------------


def hash_fields(mark: Path) -> dict[str, Any]:
    """All fields of a job for which RQ would call a function, or fetch an address."""
    evil = pickle.dumps(Evil(mark))
    hook = {"url": "http://127.0.0.1:9/", "status": "finished"}
    return {
        "meta": evil,
        "result": evil,
        "exc_info": zlib.compress(evil),
        "success_callback_name": "os.mkdir",
        "failure_callback_name": "os.mkdir",
        "stopped_callback_name": "os.mkdir",
        "success_callback": evil,
        "dependency_id": "x",
        "dependency_ids": json.dumps(["x"]),
        "allow_dependency_failures": "1",
        "webhooks": json.dumps([hook]),
        "repeats_left": "5",
        "repeat_intervals": "[0]",
        "retry_intervals": "[0]",
        "group_id": "g",
        "serializer": "pickle",
        "origin": "../../other",
        "func_name": "os.mkdir",
    }


@pytest.mark.parametrize("prompt", ["fine", "reject:engine_error", "slow:100000"])
def test_callbacks_dependents_and_webhooks_of_a_hash_do_nothing(
    redis_connection: Redis, prompt: str, sentinel: Trap
) -> None:
    """Whether the row is answered, fails or runs out of time: nothing that its hash names runs."""
    seconds = 1 if prompt.startswith("slow") else 30
    batch = submit(redis_connection, [prompt], timeout_seconds=seconds)
    fields = hash_fields(sentinel.mark)
    redis_connection.hset(f"rq:job:{batch}-1", mapping=fields)
    redis_connection.sadd(f"rq:job:{batch}-1:dependents", f"{batch}-1", "x")
    burst(redis_connection, FakePlan(step_seconds=0.002))
    assert_reconciled(redis_connection, batch)
    assert results_of(redis_connection, batch)[1].outcome == (
        "ok" if prompt == "fine" else "failed"
    )
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 0  # no repeat, no dependent
    assert redis_connection.hget(f"rq:job:{batch}-1", "meta") == fields["meta"]  # nobody read it


def test_abandoned_jobs_are_healed_without_their_callbacks(
    redis_connection: Redis, sentinel: Trap
) -> None:
    """Lease over, deaths used up: maintenance writes an error row and calls nothing."""
    batch = submit(redis_connection, ["a", "b"])
    for line in (1, 2):
        redis_connection.hset(f"rq:job:{batch}-{line}", mapping=hash_fields(sentinel.mark))
        last = {"bkv_deaths": 3, "bkv_suspect": f"{line}.1", "bkv_halves": 3}
        redis_connection.hset(f"rq:job:{batch}-{line}", mapping=last)
    redis_connection.hset(f"rq:job:{batch}-2", "data", pickle.dumps(Evil(sentinel.mark)))
    moves = Transitions(redis_connection)
    for held in [row.lease for row in moves.pull(QUEUE, "w", 2, 60)]:
        wip = redis_keys.registry("wip", QUEUE)
        redis_connection.zadd(wip, {f"{held.job_id}:{held.execution}": 1})
    from batchkv_worker.queue.maintenance import Maintenance

    assert Maintenance(redis_connection, QUEUE, "w").run(1)
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["failed"] == 2


@pytest.mark.parametrize(
    "job_id",
    [
        b"\xff\xfe\x80",
        b"a\nb",
        b"\x1b[31mred",
        b"../../etc/passwd",
        b"0123456789abcdef-1:other",
        b"",
        b"x" * 5000,
        b"a\x00b",
        "\u202eid".encode(),
    ],
)
def test_an_id_that_is_none_is_dropped(redis_connection: Redis, job_id: bytes) -> None:
    """RQ's ids are letters, digits, "_" and "-"; another never reaches a worker or its log."""
    queue = redis_keys.queue(QUEUE)
    redis_connection.hset(b"rq:job:" + job_id, mapping={"status": "queued", "data": b"x"})
    redis_connection.rpush(queue, job_id)
    batch = submit(redis_connection, ["fine"])
    burst(redis_connection)
    assert_reconciled(redis_connection, batch)
    assert redis_connection.llen(queue) == 0


def test_a_job_that_is_no_hash_does_not_stop_the_queue(redis_connection: Redis) -> None:
    """A key of another type under a job's name is skipped, and the next row is answered."""
    redis_connection.set("rq:job:planted", "text")
    redis_connection.rpush(redis_keys.queue(QUEUE), "planted")
    batch = submit(redis_connection, ["fine"])
    burst(redis_connection)
    assert_reconciled(redis_connection, batch)


@pytest.mark.parametrize("lease", [b"nothing", b"\xff:\xff", b":", b"../x:e", b"a\nb:c"])
def test_a_lease_that_is_none_is_removed(redis_connection: Redis, lease: bytes) -> None:
    """A wrong entry among the leases is removed, and the lapsed leases are still taken back."""
    wip = redis_keys.registry("wip", QUEUE)
    batch = submit(redis_connection, ["fine"])
    moves = Transitions(redis_connection)
    held = moves.pull(QUEUE, "w", 1, 60)[0].lease
    redis_connection.zadd(wip, {lease: 0, f"{held.job_id}:{held.execution}": 1})
    assert moves.reap(QUEUE) == (1, 0)
    assert redis_connection.zcard(wip) == 0
    burst(redis_connection)
    assert_reconciled(redis_connection, batch)


@pytest.mark.parametrize("mark", ["", "x", "01", "1 ", "\xff", "9" * 400, "1" * 100_000])
def test_a_mark_of_having_begun_that_is_none(redis_connection: Redis, mark: str) -> None:
    """It counts no death, the lease is still taken back, and the mark is gone with it."""
    key = f"rq:job:{submit(redis_connection, ['fine'])}-1"
    redis_connection.hset(key, "bkv_begun", mark)
    moves = Transitions(redis_connection)
    moves.pull(QUEUE, "w", 1, 60, num_begin=0)
    redis_connection.hset(key, "bkv_begun", mark)
    assert moves.reap(QUEUE, "w") == (1, 0)
    assert redis_connection.hmget(key, "bkv_begun", "bkv_deaths") == [None, None]
    redis_connection.hset(key, "bkv_begun", mark)
    burst(redis_connection)
    assert redis_connection.hget(key, "bkv_begun") is None
    assert redis_connection.zcard(redis_keys.registry("wip", QUEUE)) == 0


@pytest.mark.parametrize("deaths", ["x", "1e400", "nan", "9" * 400, "-1", ""])
def test_a_count_of_deaths_that_is_none(redis_connection: Redis, deaths: str) -> None:
    """It makes no suspect, and the leases of this row and of others are still taken back."""
    batch = submit(redis_connection, ["planted", "fine"])
    redis_connection.hset(f"rq:job:{batch}-1", "bkv_deaths", deaths)
    moves = Transitions(redis_connection)
    run = moves.pull_run(QUEUE, "w", 2, 60, knows_suspects=True, may_be_apart=True)
    assert [job.num_deaths for job in run.jobs] == [0, 0]
    assert moves.reap(QUEUE, "w") == (2, 0)
    burst(redis_connection)
    assert_reconciled(redis_connection, batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("timeout", "bkv_deaths") for value in ("1e400", "nan", "x")),
        *((name, "9" * 400) for name in ("timeout", "bkv_deaths")),
        ("timeout", "-1"),
        ("status", "\x1b[31m"),
        ("bkv_exec", "\n"),
        ("worker_name", "\xff"),
    ],
)
def test_giant_numbers_in_a_hash(redis_connection: Redis, field: str, value: str) -> None:
    """A timeout or a count that is no number, or an impossible one, ends no worker."""
    batch = submit(redis_connection, ["planted", "fine"])
    redis_connection.hset(f"rq:job:{batch}-1", field, value)
    burst(redis_connection)
    assert results_of(redis_connection, batch)[2].outcome == "ok"


COMMANDS = [
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"command": "stop-job", "job_id": ["a"]}',
    b'{"command": "stop-job"}',
    b'{"command": "kill-horse"}',
    b'{"command": "os.system", "args": ["x"]}',
    pickle.dumps(Evil(Path("/made-by-a-payload"))),
    b"",
    b"1e400",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_none_leaves_the_worker_alone(
    redis_connection: Redis, command: bytes
) -> None:
    """A wrong message on a worker's channel raises nothing, so that the thread goes on."""
    worker = BatchWorker([QUEUE], connection=redis_connection, settings=WorkerSettings(MODEL))
    worker.handle_payload({"data": command})


def test_what_others_unpickle_is_no_pickle(redis_connection: Redis, sentinel: Trap) -> None:
    """Unpickling any value of batchkv's keys fails, even for a prompt with pickle's bytes.

    A msgpack map of ten keys begins with 0x8a, which pickle reads as a number, and then reads the
    text after it. The first byte of JSON and of zlib is no opcode.
    """
    text = pickle.dumps(Evil(sentinel.mark), 0).decode("latin-1")
    rows = [{"custom_id": text, "prompt": "\x8a" + text}, {"custom_id": "2", "prompt": text}]
    batch = submit(
        redis_connection,
        ["0", "1"],
        data=lambda n: encode_job(Request(endpoint="completion", **rows[int(n)])),
    )
    before = _all_values(redis_connection)
    burst(redis_connection)
    values = before + _all_values(redis_connection)
    num_inflated = 0
    for value in values:
        forms = [value]
        try:
            forms.append(zlib.decompress(value))
            num_inflated += 1
        except zlib.error:
            pass
        for form in forms if forms[-1][:1] in (b"[", b"{") else forms[:1]:
            with pytest.raises(
                (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError)
            ):
                pickle.loads(form)
            assert not sentinel.mark.exists()
    assert num_inflated >= 4
    assert results_of(redis_connection, batch)[1].outcome == "ok"


def _all_values(connection: Redis) -> list[bytes]:
    """Fields of all hashes, as stored."""
    found: list[bytes] = []
    for key in connection.scan_iter():
        if connection.type(key) == b"hash":
            found += [value for value in connection.hgetall(key).values() if len(value) > 20]
    return found


def test_rqs_own_eyes_see_a_call_of_a_word(redis_connection: Redis) -> None:
    """RQ's tools read the name of a function from a job that no module has, and no prompt."""
    batch = submit(redis_connection, ["a secret prompt"])
    job = Job.fetch(f"{batch}-1", connection=redis_connection, serializer=JSONSerializer)
    assert job.func_name == "batchkv.generate"
    assert job.description == f"batchkv {batch}"
    with pytest.raises((ImportError, AttributeError, ValueError)):
        _ = job.func


def test_commands_survive_what_a_producer_planted(redis_connection: Redis, redis_url: str) -> None:
    """status, list and workers end with exit code 0 on a server with broken records."""
    batch = submit(redis_connection, ["a"])
    redis_connection.sadd("rq:workers", b"rq:worker:\xff", "rq:worker:w")
    redis_connection.hset("rq:worker:w", mapping={"birth": "x", "queues": QUEUE, "pid": "9" * 5000})
    redis_connection.hset("rq:worker:w", "last_heartbeat", "0001-01-01T00:00:00+23:59")
    redis_connection.zadd(redis_keys.registry("wip", QUEUE), {b"\xff:\xff": 1})
    redis_connection.zadd(redis_keys.BATCHES, {b"\xff": 1})
    for arguments in (["status"], ["list"], ["workers"], ["status", batch]):
        found = batchkv(*arguments, url=redis_url)
        assert found.exit_code == 0, found.output
        assert found.exception is None or isinstance(found.exception, SystemExit)


@pytest.mark.parametrize("field", ["total", "created", "ok", "failed", "saved_ms", "chunks"])
@pytest.mark.parametrize("value", ["9" * 400, "1e400", "nan", "-" + "9" * 400, "\x1b[31m", ""])
def test_a_batch_with_a_broken_number_is_told(
    redis_connection: Redis, redis_url: str, field: str, value: str
) -> None:
    """A counter that is no number, or an impossible one, gives one line and exit code 1."""
    batch = submit(redis_connection, ["a"])
    redis_connection.hset(redis_keys.batch(batch), field, value)
    found = batchkv("status", batch, url=redis_url)
    assert found.exit_code == 1 and "cannot be read" in found.stderr
    assert found.stderr.count("\n") == 1 and "\x1b" not in found.stderr


def test_a_broken_counter_of_what_runs_is_not_read(redis_connection: Redis, redis_url: str) -> None:
    """Running rows are counted from the held ones; the field exists for older versions."""
    batch = submit(redis_connection, ["a"])
    redis_connection.hset(redis_keys.batch(batch), "running", "nan")
    found = batchkv("status", batch, "--json", url=redis_url)
    assert found.exit_code == 0 and json.loads(found.stdout)["running"] == 0


@pytest.mark.parametrize("line", [b"x", b"-1", b"1e9", b"9" * 30, b"\xff", b"0"])
def test_a_finish_order_that_is_none_is_told(
    redis_connection: Redis, redis_url: str, line: bytes
) -> None:
    """A wrong entry in the finish order gives one sentence."""
    batch = submit(redis_connection, ["a"])
    redis_connection.rpush(redis_keys.done(batch), line)
    found = batchkv("results", batch, url=redis_url)
    assert found.exit_code == 1 and "finish order" in found.stderr


def test_a_line_number_out_there_takes_no_memory(redis_connection: Redis, redis_url: str) -> None:
    """Line 999,999,999,999 of a batch of one row is read without a bit for each line before it."""
    batch = submit(redis_connection, ["a"])
    burst(redis_connection)
    stored = redis_connection.hget(redis_keys.results(batch), "1")
    redis_connection.hset(redis_keys.results(batch), "999999999999", stored)
    redis_connection.rpush(redis_keys.done(batch), "999999999999")
    found = batchkv("results", batch, url=redis_url)
    assert found.exit_code == 0 and len(found.stdout.splitlines()) == 2

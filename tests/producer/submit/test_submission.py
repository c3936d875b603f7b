"""From a file to a batch: ids, models, joining, and files that cannot be used."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.errors import BatchkvError, InputFileError, UsageError
from batchkv_producer.intake.fields import BY_NAME, Use
from batchkv_producer.intake.source import Inputs
from batchkv_producer.submit import submission
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import SamplingParams, decode_job
from batchkv_producer.wire.transitions import Transitions

Write = Callable[..., Path]


def prompts(count: int) -> list[dict[str, Any]]:
    """Lazy lines with different prompts."""
    return [{"prompt": f"question {n * 7919 % count}"} for n in range(count)]


def waiting(connection: Redis, queue: str) -> list[str]:
    """The ids in a queue."""
    return [raw.decode() for raw in connection.lrange(redis_keys.queue(queue), 0, -1)]


# ---- what comes out ----


def test_a_file_becomes_a_batch(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """Jobs are queued, bad rows have their result, and the status adds up."""
    path = write_lines({"prompt": "b"}, "{", {"prompt": "a", "custom_id": "x"})
    submitted = client.submit(path, model="demo")
    assert submitted.queue == redis_keys.queue_name("demo")
    assert (submitted.total, submitted.num_jobs, submitted.num_bad) == (3, 2, 1)
    assert not submitted.joined
    assert waiting(redis_connection, submitted.queue) == [
        f"{submitted.batch_id}-3",
        f"{submitted.batch_id}-1",
    ]
    status = client.status(submitted.batch_id)
    assert (status.name, status.model, status.total) == ("prompts.jsonl", "demo", 3)
    assert (status.queued, status.failed, status.is_submitted) == (2, 1, True)
    (bad,) = client.results(submitted.batch_id)
    assert bad.line == 2
    assert bad.result.error is not None and bad.result.error[0] == "invalid_json"
    assert (bad.result.model, bad.result.custom_id) == ("demo", "line-2")


def test_the_hash_of_the_whole_batch_is_kept(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """The id is the beginning of a digest that the server keeps; a false digest is refused."""
    path = write_lines({"prompt": "a"})
    batch = client.submit(path, model="demo").batch_id
    digest = redis_connection.hget(redis_keys.batch(batch), "digest").decode()
    assert len(digest) == 64 and digest.startswith(batch)
    redis_connection.hset(redis_keys.batch(batch), "digest", batch + "0" * 48)
    with pytest.raises(BatchkvError, match="another batch has the id"):
        client.submit(path, model="demo")


def test_defaults_travel_with_the_jobs(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """Generation defaults are merged into what is sent, and the timeout is RQ's."""
    path = write_lines({"prompt": "a", "max_tokens": 3})
    defaults = SamplingParams(max_tokens=9, temperature=0.5)
    submitted = client.submit(path, model="demo", defaults=defaults, job_timeout_seconds=77)
    job = redis_connection.hgetall(redis_keys.job(f"{submitted.batch_id}-1"))
    assert decode_job(job[b"data"]).params == SamplingParams(max_tokens=3, temperature=0.5)
    assert job[b"timeout"] == b"77"


def test_progress_counts_rows(client: Client, write_lines: Write) -> None:
    """Progress tells rows in the queue and rows in all, after each chunk."""
    seen: list[tuple[int, int]] = []
    path = write_lines(*prompts(1100))
    client.submit(path, model="demo", on_progress=lambda *counts: seen.append(counts))
    assert seen == [(500, 1100), (1000, 1100), (1100, 1100)]


def test_standard_input(client: Client, write_lines: Write) -> None:
    """A stream gives the same batch as the file with its bytes, under another name."""
    path = write_lines({"prompt": "a"}, {"prompt": "b"})
    streamed = client.submit(io.BytesIO(path.read_bytes()), model="demo")
    assert client.status(streamed.batch_id).name == "stdin"
    joined = client.submit(str(path), model="demo")  # a string is a path
    assert (joined.batch_id, joined.joined) == (streamed.batch_id, True)


@pytest.mark.skipif(sys.platform == "darwin", reason="file names of macOS are UTF-8")
def test_a_file_with_an_odd_name(client: Client, tmp_path: Path) -> None:
    """A file name that is no UTF-8 is still a batch's name."""
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert client.status(client.submit(path, model="demo").batch_id).name == "caf?.jsonl"


# ---- identity ----


def test_the_same_file_joins(client: Client, redis_connection: Redis, write_lines: Write) -> None:
    """Submitting again adds nothing; name and timeout make no new batch."""
    path = write_lines(*prompts(3))
    first = client.submit(path, model="demo")
    second = client.submit(path, model="demo", name="other", job_timeout_seconds=5)
    assert (second.batch_id, second.joined) == (first.batch_id, True)
    assert len(waiting(redis_connection, first.queue)) == 3
    assert client.status(first.batch_id).name == "prompts.jsonl"


def test_what_makes_another_batch(client: Client, write_lines: Write) -> None:
    """One other byte, another model, other defaults or another format make another batch."""
    path = write_lines({"prompt": "a"})
    longer = write_lines({"prompt": "a"}, "", name="longer.jsonl")
    text = write_lines({"prompt": "a"}, name="same.txt")
    batches = [
        client.submit(path, model="demo"),
        client.submit(longer, model="demo"),
        client.submit(Inputs.of(text, read_as="text"), model="demo"),
        client.submit(path, model="Demo"),
        client.submit(path, model="demo", defaults=SamplingParams(seed=1)),
        client.submit(path, model="demo", defaults=SamplingParams(top_k=1)),
    ]
    assert len({batch.batch_id for batch in batches}) == len(batches)


def test_equal_defaults_are_one_batch(client: Client, write_lines: Write) -> None:
    """1 and 1.0 are the same default, as a row would take them."""
    path = write_lines({"prompt": "a"})
    first = client.submit(path, model="demo", defaults=SamplingParams(temperature=1))
    second = client.submit(path, model="demo", defaults=SamplingParams(temperature=1.0))
    assert first.batch_id == second.batch_id


def test_an_id_that_must_never_change(client: Client, write_lines: Write) -> None:
    """The id of a known file is a constant: a change would orphan every unfinished batch."""
    path = write_lines({"prompt": "a"}, name="golden.jsonl")
    defaults = SamplingParams(max_tokens=5, temperature=0.5, stop=("x",))
    assert client.submit(path, model="demo").batch_id == "1606ad2f34ec6ce0"
    assert client.submit(path, model="demo", defaults=defaults).batch_id == "9407c5efb2c5b085"


# ---- interruptions ----


class Interrupted(Exception):
    """Stands for a kill in the middle of a submit."""


def test_an_interrupted_submit_is_completed(
    client: Client,
    redis_connection: Redis,
    write_lines: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next submit of the file adds what is missing; every job is queued once."""
    path = write_lines(*prompts(2300))
    real = Transitions.submit

    def stops_at_chunk_two(
        self: Transitions, batch: str, queue: str, chunk: int, *rest: Any, **more: Any
    ) -> int:
        if chunk == 2:
            raise Interrupted
        return real(self, batch, queue, chunk, *rest, **more)

    monkeypatch.setattr(Transitions, "submit", stops_at_chunk_two)
    with pytest.raises(Interrupted):
        client.submit(path, model="demo")
    monkeypatch.setattr(Transitions, "submit", real)
    (half,) = client.list_batches()
    assert (half.is_submitted, half.is_done, half.total) == (False, False, 2300)
    assert len(waiting(redis_connection, half.queue)) == 1000

    seen: list[tuple[int, int]] = []
    second = client.submit(path, model="demo", on_progress=lambda *counts: seen.append(counts))
    assert second.joined
    assert seen == [(1500, 2300), (2000, 2300), (2300, 2300)]
    ids = waiting(redis_connection, half.queue)
    assert len(ids) == len(set(ids)) == 2300
    assert client.status(half.batch_id).is_submitted


@pytest.mark.parametrize("num_wrong", [0, 1])
def test_a_submit_of_older_rules_is_finished_only_if_no_row_would_be_lost(
    client: Client,
    redis_connection: Redis,
    write_lines: Write,
    monkeypatch: pytest.MonkeyPatch,
    num_wrong: int,
) -> None:
    """A row that an older version refused moves all others. Then the file has to be begun anew."""
    real = Transitions.submit

    def stops_at_chunk_one(self: Transitions, *args: Any, **more: Any) -> int:
        if args[2] == 1:
            raise Interrupted
        return real(self, *args, **more)

    rows = prompts(700)
    rows[0] = {"prompt": "z", "ignore_eos": True}  # the last in the order
    path = write_lines(*rows)
    with monkeypatch.context() as older:
        if num_wrong:
            field = ("completion", "ignore_eos")
            older.setitem(BY_NAME, field, replace(BY_NAME[field], use=Use.REFUSED))
        older.setattr(Transitions, "submit", stops_at_chunk_one)
        with pytest.raises(Interrupted):
            client.submit(path, model="demo")
    (half,) = client.list_batches()
    redis_connection.hdel(redis_keys.batch(half.batch_id), "rules")
    if num_wrong:
        with pytest.raises(BatchkvError, match="refused other rows of this file"):
            client.submit(path, model="demo")
        return
    client.submit(path, model="demo")
    assert len(set(waiting(redis_connection, half.queue))) == 700


def test_two_submits_at_once(
    client: Client,
    redis_connection: Redis,
    write_lines: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two producers that send the same chunks in turn queue every job once, both succeed."""
    path = write_lines(*prompts(1700))
    real = Transitions.submit

    def sends_twice(self: Transitions, *args: Any, **more: Any) -> int:
        real(self, *args, **more)
        return real(self, *args, **more)

    monkeypatch.setattr(Transitions, "submit", sends_twice)
    submitted = client.submit(path, model="demo")
    assert len(set(waiting(redis_connection, submitted.queue))) == 1700
    assert len(waiting(redis_connection, submitted.queue)) == 1700


def test_a_batch_that_vanishes(
    client: Client,
    redis_connection: Redis,
    write_lines: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that loses the batch in the middle is an error, not a half batch."""
    real = Transitions.create

    def create_and_lose(self: Transitions, *args: Any, **options: Any) -> Any:
        answer = real(self, *args, **options)
        redis_connection.flushall()
        return answer

    monkeypatch.setattr(Transitions, "create", create_and_lose)
    with pytest.raises(BatchkvError, match="vanished"):
        client.submit(write_lines({"prompt": "a"}), model="demo")


def test_a_batch_that_was_cut_differently(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """Chunks of another version do not fit, and are not mixed with ours."""
    path = write_lines({"prompt": "a"})
    batch = client.submit(path, model="demo").batch_id
    redis_connection.hset(redis_keys.batch(batch), "num_chunks", 7)
    with pytest.raises(BatchkvError, match="orders rows differently"):
        client.submit(path, model="demo")


def test_an_interrupted_submit_of_another_order_is_not_mixed_with_ours(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """What another version began it has to finish; what is all there is joined as it is."""
    path = write_lines({"prompt": "a"})
    batch = client.submit(path, model="demo").batch_id
    redis_connection.hdel(redis_keys.batch(batch), "order")
    assert client.submit(path, model="demo").joined
    redis_connection.hset(redis_keys.batch(batch), "chunks", 0)
    with pytest.raises(BatchkvError, match="orders rows differently"):
        client.submit(path, model="demo")


# ---- the model ----


def model_line(model: str | None) -> dict[str, Any]:
    """A batch line that names a model."""
    return {"body": {"prompt": f"for {model}", "model": model}}


def test_the_model_of_the_lines(write_lines: Write) -> None:
    """Lines decide when all say the same; ``model=`` overrides."""
    path = write_lines("{", model_line("theirs"), model_line("theirs"))
    assert submission.check(path).model == "theirs"
    assert submission.check(path, model="mine").model == "mine"


def test_one_line_chooses_for_no_other(client: Client, write_lines: Write) -> None:
    """What only some lines name is refused, or not heeded, with a note, when there is a default."""
    path = write_lines(model_line(None), model_line("/some/folder"), model_line(None))
    with pytest.raises(UsageError, match=r'only some lines .*"/some/folder" \(line 2\).*-m MODEL'):
        client.submit(path)
    with pytest.raises(UsageError, match="only some lines"):
        submission.check(path)
    assert client.list_batches() == []
    submitted = client.submit(path, default_model="ours")
    assert submitted.model == "ours"
    assert re.search('"/some/folder" .line 2.*for ours', submitted.model_note)
    assert submission.check(path, default_model="ours").model_note == submitted.model_note
    assert client.submit(path, model="mine").model_note == ""


@pytest.mark.parametrize("name", ["/some/folder", "~/m", "./m", "../m", "a/b/c"])
def test_lines_name_no_folder(write_lines: Write, name: str) -> None:
    """A folder is read only when the command names it, even if all lines do."""
    path = write_lines(model_line(name), model_line(name))
    for default in (None, "ours"):
        with pytest.raises(UsageError, match="-m FOLDER"):
            submission.check(path, default_model=default)
    assert submission.check(path, model=name).model == name


def test_lines_that_disagree(write_lines: Write) -> None:
    """Two models in a file are an error that names both; an explicit model settles it."""
    path = write_lines(model_line("one"), model_line("two"), model_line("three"))
    with pytest.raises(UsageError, match=r'"one" \(line 1\) and "two" \(line 2\)'):
        submission.check(path)
    assert submission.check(path, model="mine").num_jobs == 3


def test_no_model_at_all(client: Client, write_lines: Write) -> None:
    """Without a model anywhere nothing is queued, and the error says where to put one."""
    with pytest.raises(UsageError, match="-m MODEL or BATCHKV_MODEL"):
        client.submit(write_lines({"prompt": "a"}))
    assert client.list_batches() == []
    checked = submission.check(write_lines({"prompt": "a"}))
    assert (checked.model, checked.batch_id, checked.num_jobs) == ("", "", 1)


def test_a_default_model_comes_last(client: Client, write_lines: Write) -> None:
    """It serves when neither the caller nor the lines name a model, and is held to be a name."""
    named, plain = write_lines({"prompt": "a", "model": "theirs"}), {"prompt": "a"}
    assert client.submit(named, default_model="last").model == "theirs"
    assert client.check(write_lines(plain), default_model="last").model == "last"
    assert client.submit(write_lines(plain), default_model="last").model == "last"
    assert client.submit(write_lines(plain), model="mine", default_model="last").model == "mine"
    with pytest.raises(UsageError, match="the model's name"):
        client.submit(write_lines(plain), default_model="caf\udce9")


def test_a_batch_can_be_refused_by_its_id(client: Client, write_lines: Write) -> None:
    """The caller learns id and model before anything is changed, and may end it there."""
    path = write_lines({"prompt": "a"})

    def refuse(batch_id: str, model: str, _: frozenset[str]) -> None:
        raise UsageError(f"not {batch_id} of {model}")

    batch_id = client.check(path, model="m").batch_id
    with pytest.raises(UsageError, match=f"not {batch_id} of m"):
        client.submit(path, model="m", on_identified=refuse)
    assert client.list_batches() == []
    assert client.submit(path, model="m").batch_id == batch_id


@pytest.mark.parametrize("model", [" ", "caf\udce9"])
def test_a_model_that_is_no_name(write_lines: Write, model: str) -> None:
    """A blank name, or one that no UTF-8 can hold, is refused."""
    with pytest.raises(UsageError, match="the model's name"):
        submission.check(write_lines({"prompt": "a"}), model=model)


# ---- dry run ----


def test_check_counts_without_a_server(write_lines: Write) -> None:
    """A dry run counts rows and characters, and shows the first bad rows."""
    bad = ["{"] * 30
    checked = submission.check(write_lines({"prompt": "four"}, *bad), model="demo")
    assert (checked.total, checked.num_jobs, checked.num_bad) == (31, 1, 30)
    assert (checked.num_chars, checked.model) == (4, "demo")
    assert [row.line for row in checked.errors] == list(range(2, 22))


def test_check_has_the_rules_of_submit(write_lines: Write) -> None:
    """Defaults out of range are refused in a dry run, too."""
    path = write_lines({"prompt": "a"})
    with pytest.raises(UsageError, match="max_tokens must be a whole number >= 1, got 0"):
        submission.check(path, model="demo", defaults=SamplingParams(max_tokens=0))
    with pytest.raises(UsageError, match="temperature must be a number"):
        submission.check(path, model="demo", defaults=SamplingParams(temperature=float("nan")))
    with pytest.raises(UsageError, match="stop: each string"):
        submission.check(path, model="demo", defaults=SamplingParams(stop=("",)))


def test_a_timeout_is_at_least_a_second(client: Client, write_lines: Write) -> None:
    """A timeout of nothing is refused before the file is read."""
    with pytest.raises(UsageError, match="at least 1 second"):
        client.submit(write_lines({"prompt": "a"}), model="demo", job_timeout_seconds=0)


# ---- files that cannot be used ----


def test_a_missing_file(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(InputFileError, match=r"nothing\.jsonl does not exist"):
        submission.check(tmp_path / "nothing.jsonl", model="demo")


def test_a_directory(tmp_path: Path) -> None:
    """A directory is no input."""
    with pytest.raises(InputFileError, match="is a directory"):
        submission.check(tmp_path, model="demo")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(write_lines: Write) -> None:
    """A file that may not be read is named."""
    path = write_lines({"prompt": "a"})
    path.chmod(0)
    with pytest.raises(InputFileError, match="permission denied"):
        submission.check(path, model="demo")


def test_a_refused_read_is_named(write_lines: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails in the middle is a fault of the file, with its name."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = write_lines({"prompt": "a"})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputFileError, match=r"prompts\.jsonl cannot be read: permission denied"):
        submission.check(path, model="demo")


@pytest.mark.parametrize("data", [b"", b"\n\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path: Path, data: bytes) -> None:
    """A file without rows is an error, not a batch of nothing."""
    path = tmp_path / "empty.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputFileError, match=r"empty\.jsonl has no rows"):
        submission.check(path, model="demo")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"{}", mtime=0), "gzip-compressed"),
        ('{"prompt": "a"}'.encode("utf-16"), "is UTF-16 text: save it as UTF-8$"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x7fELF\x00\x00", "binary"),
    ],
)
def test_a_file_that_is_no_text(data: bytes, message: str) -> None:
    """Compressed and binary input is refused as a whole, with what it is."""
    with pytest.raises(InputFileError, match=message):
        submission.check(io.BytesIO(data), model="demo")


def test_latin_1_fails_row_by_row() -> None:
    """Text in another encoding fails the rows that show it, and no other."""
    data = json.dumps({"prompt": "a"}).encode() + b'\n{"prompt": "caf\xe9"}\n'
    checked = submission.check(io.BytesIO(data), model="demo")
    assert (checked.num_jobs, checked.num_bad) == (1, 1)
    assert checked.errors[0].code == "invalid_json"


def test_another_identity_is_another_batch(
    redis_connection: Redis, write_lines: Callable[..., Path]
) -> None:
    """A caller's own identity separates equal files, and joins its own batch again."""
    path = write_lines({"prompt": "x"})

    def submit(*identity: bytes) -> submission.Submitted:
        return submission.submit(redis_connection, path, model="demo", identity=identity)

    plain, one, two = submit(), submit(b"a", b"1"), submit(b"a", b"2")
    assert len({plain.batch_id, one.batch_id, two.batch_id}) == 3
    again = submit(b"a", b"1")
    assert again.joined and again.batch_id == one.batch_id


def test_rows_of_another_endpoint_are_wrong_if_one_is_given(
    redis_connection: Redis, write_lines: Callable[..., Path]
) -> None:
    """Each of them fails alone, with the endpoint of its batch in its message."""
    chat = {"custom_id": "c", "messages": [{"role": "user", "content": "x"}]}
    path = write_lines(chat, {"custom_id": "p", "prompt": "x"})
    found = submission.submit(redis_connection, path, model="demo", endpoint="completion")
    assert (found.total, found.num_bad) == (2, 1)
    (error,) = found.errors
    assert (error.line, error.custom_id, error.code) == (1, "c", "invalid_request")
    assert "/v1/completions" in error.message

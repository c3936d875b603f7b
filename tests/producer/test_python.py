"""batchkv from Python: rows as dicts, and a client without arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis import Redis

import batchkv_producer
from batchkv_producer import BatchOptions, Client, SamplingParams, UsageError, connect
from batchkv_producer.intake.given_rows import as_source
from batchkv_producer.wire.job import decode_job

ROWS = [
    {"custom_id": "a", "prompt": "one", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "ü"}]},
]


def test_dicts_are_rows(client: Client, tmp_path: Path) -> None:
    """A list of dicts is queued like the lines of a file, with their keys in any order."""
    submitted = client.submit(ROWS, model="m")
    assert (submitted.total, submitted.num_bad, submitted.joined) == (2, 0, False)
    turned = [dict(reversed(row.items())) for row in ROWS]
    again = client.submit(iter(turned), model="m")
    assert (again.batch_id, again.joined) == (submitted.batch_id, True)
    assert client.status(submitted.batch_id).name == "rows"
    assert client.submit(ROWS[:1], model="m").batch_id != submitted.batch_id
    assert client.check(ROWS, model="m").batch_id == submitted.batch_id
    assert client.submit(ROWS, model="m", options=BatchOptions(dedupe=True)).joined


def test_defaults_are_checked_and_stored_like_fields(
    client: Client, redis_connection: Redis
) -> None:
    """Values that change nothing are no defaults; others are stored as those of a row are."""
    nothing = SamplingParams(n=1, ignore_eos=False, presence_penalty=0, skip_special_tokens=True)
    plain = client.check(ROWS, model="m").batch_id
    assert client.check(ROWS, model="m", defaults=nothing).batch_id == plain
    lists: Any = {"stop_token_ids": [7, 5], "logit_bias": {5: 1}, "bad_words": ["no"]}
    given = SamplingParams(n=2, frequency_penalty=1, logprobs=3, **lists)
    batch = client.submit(ROWS, model="m", defaults=given).batch_id
    assert batch != plain
    data = redis_connection.hget(f"rq:job:{batch}-2", "data")
    assert isinstance(data, bytes) and decode_job(data).params == SamplingParams(
        n=2,
        frequency_penalty=1.0,
        logprobs=3,
        stop_token_ids=(5, 7),
        logit_bias=((5, 1.0),),
        bad_words=("no",),
    )
    for wrong in ({"n": 129}, {"ignore_eos": 1}, {"logit_bias": ((5, 101),)}, {"logprobs": 21}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            client.check(ROWS, model="m", defaults=SamplingParams(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a"}, "b"], "row 2 is a str"),
        ([{"prompt": {1, 2}}], "row 1 cannot be written as JSON"),
        ([{"prompt": "a", "temperature": float("nan")}], "row 1 cannot be written as JSON"),
        ({"prompt": "a"}, r"put the one row into \[...\]"),
        ([], "rows has no rows"),
    ],
)
def test_what_is_no_row_is_refused(client: Client, rows: object, words: str) -> None:
    """Before anything is queued, one sentence names the row and its fault."""
    with pytest.raises(UsageError, match=words):
        client.submit(rows, model="m")  # type: ignore[arg-type]
    assert client.list_batches() == []


def test_a_wrong_row_fails_as_in_a_file(client: Client) -> None:
    """A dict that is no request fails alone, by its number."""
    submitted = client.submit([*ROWS, {"prompt": 5}], model="m")
    assert (submitted.total, submitted.num_bad) == (3, 1)
    assert submitted.errors[0].line == 3


def test_files_and_streams_pass_as_they_are(tmp_path: Path) -> None:
    """A file or stream is passed on unchanged."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    with path.open("rb") as stream:
        for source in (str(path), path, stream):
            assert as_source(source) is source


def test_names_of_before_still_work(client: Client) -> None:
    """``Terms``, ``submit(terms=...)`` and ``num_twins`` are the names up to 0.1.0."""
    rows = [{"custom_id": name, "prompt": "p", "seed": 1} for name in "ab"]
    submitted = client.submit(rows, model="m", terms=batchkv_producer.Terms(dedupe=True))
    assert batchkv_producer.Terms is BatchOptions
    assert client.status(submitted.batch_id).is_deduped
    assert submitted.num_twins == submitted.num_duplicates == 1


def test_connect_obeys_the_variable(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, redis_connection: Redis
) -> None:
    """BATCHKV_REDIS_URL, or the URL that is given, says which server it is."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    batch = connect().submit(ROWS, model="m").batch_id
    assert Client(redis_connection).status(batch).total == 2
    with pytest.raises(batchkv_producer.ServerError, match="cannot be reached"):
        connect("redis://127.0.0.1:1/0")

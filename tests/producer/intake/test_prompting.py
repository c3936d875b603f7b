"""Plain prompts: which rows they are, how a batch says what becomes of them, and what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.errors import BatchkvError, UsageError, WireError
from batchkv_producer.intake import formats, plain
from batchkv_producer.intake.prompting import AUTO, Prompting, kept
from batchkv_producer.intake.source import Inputs
from batchkv_producer.order.canonical import canonical_text
from batchkv_producer.order.duplicates import request_digest
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Request, SamplingParams, decode_job, encode_job
from batchkv_producer.wire.maker import needs_of

Write = Callable[..., Path]
SYSTEM = Prompting(system="Answer in one word.")
NO_THINKING = Prompting(no_thinking=True)
KINDS: list[dict[str, Any]] = [
    {"prompt": "plain"},
    {"prompt": "plain and careful", "stop": ["x"]},
    {"body": {"prompt": "a body"}},
    {"url": "/v1/completions", "body": {"prompt": "a url", "stop": ["x"]}},
    {"messages": [{"role": "user", "content": "a chat"}]},
]


def requests_of(connection: Redis, batch_id: str) -> dict[int, Request]:
    return {
        int(key.decode().rpartition("-")[2]): decode_job(connection.hget(key, "data"))
        for key in connection.keys(f"rq:job:{batch_id}-*")
    }


def forget_styles(connection: Redis, batch_id: str) -> None:
    """Make a batch one of a version that had no styles, with nothing in the queue yet."""
    key = redis_keys.batch(batch_id)
    connection.hdel(key, "style", "system")
    connection.hset(key, "chunks", 0)
    connection.delete(*connection.keys("rq:*"))


@pytest.mark.parametrize(
    ("prompting", "style", "system"),
    [(AUTO, "auto", None), (Prompting(raw=True), "raw", None), (SYSTEM, "auto", SYSTEM.system)],
)
def test_only_plain_prompts_have_a_style(
    client: Client,
    redis_connection: Redis,
    write_lines: Write,
    prompting: Prompting,
    style: str,
    system: str | None,
) -> None:
    """Lines of text and lines with neither url nor body are plain; all others stay as they are."""
    inputs = Inputs.of(write_lines(*KINDS), write_lines("of text", name="p.txt"))
    submitted = client.submit(inputs, model="m", prompting=prompting)
    found = requests_of(redis_connection, submitted.batch_id)
    styled = {line: (request.style, request.system) for line, request in found.items()}
    plain, other = (style, system), ("raw", None)
    assert styled == {1: plain, 2: plain, 3: other, 4: other, 5: other, 6: plain}
    has_needs = {line: b"bkv_needs" in redis_connection.hkeys(f"rq:job:{submitted.batch_id}-{line}")
                 for line in found}  # fmt: skip
    assert has_needs == {line: request.style == "auto" for line, request in found.items()}
    fields = redis_connection.hgetall(redis_keys.batch(submitted.batch_id))
    assert fields[b"style"].decode() == style
    assert fields.get(b"system", b"").decode() == (system or "")
    assert submitted.style_note == prompting.sentence()


def test_jobs_without_a_style_are_as_they_were() -> None:
    """A row that is raw says nothing of styles, so that workers of any version read it."""
    request = Request("c", "completion", prompt="x")
    assert decode_job(encode_job(request)) == request and needs_of(request) == ()
    styled = Request("c", "completion", prompt="x", style="auto", system="s")
    assert decode_job(encode_job(styled)) == styled and needs_of(styled) == ("style",)


@pytest.mark.parametrize(
    "request_",
    [
        Request("c", "completion", prompt="x", style="loud"),  # type: ignore[arg-type]
        Request("c", "completion", prompt="x", system="s"),
        Request("c", "chat", messages=[], style="auto"),
        Request("c", "chat", messages=[], system="s"),
    ],
)
def test_styles_that_nobody_writes_are_refused(request_: Request) -> None:
    """A job from anywhere has a known style, and a system message only beside a plain prompt."""
    with pytest.raises(WireError, match="style or a system message"):
        decode_job(encode_job(request_))


def test_what_is_said_is_identity_and_what_is_not_is_none(
    client: Client, write_lines: Write
) -> None:
    """--raw and each --system make batches of their own; saying nothing leaves the id alone."""
    path = write_lines({"prompt": "a"})
    said = [AUTO, Prompting(raw=True), SYSTEM, Prompting(system="Another."), NO_THINKING]
    said += [Prompting(raw=False, system="Another.", no_thinking=True)]
    ids = [client.check(path, model="m", prompting=one).batch_id for one in said]
    assert len(set(ids)) == len(ids)
    assert ids[0] == client.check(path, model="m").batch_id


def test_no_thinking_is_for_rows_that_do_not_say(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """It sets the template's variable of chat rows and plain prompts, and a batch stores it."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    says = [{"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "low"}]
    lines = [
        *({**chat, "chat_template_kwargs": variables} for variables in says),
        {**chat, "chat_template_kwargs": {"date_string": "today"}},
        chat,
        {"prompt": "plain"},
        {"url": "/v1/completions", "body": {"prompt": "raw"}},
        {"prompt": [1, 2]},
    ]
    off = {"enable_thinking": False}
    wanted = [*says, {"date_string": "today", **off}, off, off, {}, {}]
    path = write_lines(*lines)
    for prompting, of_plain in ((NO_THINKING, off), (Prompting(raw=True, no_thinking=True), {})):
        batch = client.submit(path, model="m", prompting=prompting).batch_id
        found = requests_of(redis_connection, batch)
        variables = [found[line].chat_template_kwargs for line in sorted(found)]
        assert variables == [*wanted[:5], of_plain, *wanted[6:]]
        assert kept(redis_connection, batch) == (prompting, prompting.identity())


def test_no_thinking_of_what_cannot_think_is_refused(client: Client, write_lines: Write) -> None:
    """Without a row that a template renders it changes nothing; and it excludes a budget."""
    raw = write_lines({"url": "/v1/completions", "body": {"prompt": "raw"}})
    with pytest.raises(UsageError, match="--no-thinking is for chat templates"):
        client.check(raw, model="m", prompting=NO_THINKING)
    path = write_lines({"prompt": "a"}, name="plain.jsonl")
    with pytest.raises(UsageError, match="--no-thinking is for chat templates"):
        client.check(path, model="m", prompting=Prompting(raw=True, no_thinking=True))
    with pytest.raises(UsageError, match=r"exclude each other|not supported"):
        client.check(
            path, model="m", prompting=NO_THINKING, defaults=SamplingParams(thinking_budget=5)
        )


def test_what_cannot_be_meant_is_refused(client: Client, write_lines: Write) -> None:
    """--raw with --system, an empty system message, and one that no row would get."""
    path = write_lines({"prompt": "a"})
    for wrong, why in (
        (Prompting(raw=True, system="s"), "excludes --system"),
        (Prompting(system=" "), "needs a text"),
        (Prompting(system="\ud800"), "not UTF-8"),
    ):
        with pytest.raises(UsageError, match=why):
            client.check(path, model="m", prompting=wrong)
    chat = write_lines({"messages": [{"role": "user", "content": "a"}]}, name="chat.jsonl")
    with pytest.raises(UsageError, match=r"no row of chat\.jsonl is one"):
        client.check(chat, model="m", prompting=SYSTEM)


def test_a_batch_that_was_raw_stays_so(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """What another version began without styles is finished and joined as it was begun."""
    path = write_lines(*KINDS)
    first = client.submit(path, model="m")
    forget_styles(redis_connection, first.batch_id)
    again = client.submit(path, model="m")
    assert again.batch_id == first.batch_id
    assert "as when it was begun" in again.style_note
    found = requests_of(redis_connection, first.batch_id)
    assert len(found) == len(KINDS)
    assert {request.style for request in found.values()} == {"raw"}
    needs = [
        redis_connection.hget(f"rq:job:{first.batch_id}-{line}", "bkv_needs") for line in found
    ]
    assert not any(needs)
    joined = client.submit(path, model="m")
    assert "as when it was begun; --fresh" in joined.style_note
    anew = client.submit(path, model="m", options=BatchOptions(fresh=True))
    assert anew.batch_id != first.batch_id
    assert "through the model's chat template" in anew.style_note
    styles = {request.style for request in requests_of(redis_connection, anew.batch_id).values()}
    assert "auto" in styles


def test_duplicates_of_two_styles_cannot_be_finished_as_raw(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """Where styles part what were duplicates, the submit of the other version is not mixed up."""
    path = write_lines({"prompt": "a", "seed": 1}, {"body": {"prompt": "a", "seed": 1}})
    first = client.submit(path, model="m", options=BatchOptions(dedupe=True))
    assert first.num_duplicates == 0
    forget_styles(redis_connection, first.batch_id)
    with pytest.raises(BatchkvError, match="finish the submit with that version"):
        client.submit(path, model="m", options=BatchOptions(dedupe=True))


def test_styles_are_a_part_of_what_is_asked() -> None:
    """Rows of two styles or system messages are no duplicates; a raw row's digest is as it was."""
    raw = Request("c", "completion", prompt="x")
    styled = [
        raw,
        Request("c", "completion", prompt="x", style="auto"),
        Request("c", "completion", prompt="x", style="auto", system="s"),
        Request("c", "completion", prompt="x", style="auto", system="t"),
    ]
    assert len({request_digest(request) for request in styled}) == len(styled)


def test_the_order_sees_the_system_message() -> None:
    """A style changes no order; a system message is a prefix that all plain prompts share."""
    raw = Request("c", "completion", prompt="x")
    assert canonical_text(Request("c", "completion", prompt="x", style="auto")) == "x"
    assert canonical_text(raw) == "x"
    chat = Request("c", "chat", messages=[{"role": "system", "content": "s"},
                                          {"role": "user", "content": "x"}])  # fmt: skip
    styled = Request("c", "completion", prompt="x", style="auto", system="s")
    assert canonical_text(styled) == canonical_text(chat)


def test_rows_are_restored_with_the_style_of_their_batch(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """retry --from makes plain prompts anew as the batch sends them, without being told again."""
    path = write_lines({"prompt": "a"})
    for prompting in (AUTO, SYSTEM, Prompting(raw=True)):
        batch = client.submit(path, model="m", prompting=prompting).batch_id
        before = requests_of(redis_connection, batch)
        client.cancel(batch)
        redis_connection.delete(f"rq:job:{batch}-1")
        assert client.retry(batch, True, source=path) == 1
        assert requests_of(redis_connection, batch) == before


def test_rows_of_a_later_generation_are_restored(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """retry --from knows the file of a batch that was made again with --fresh."""
    path = write_lines({"prompt": "a"})
    client.submit(path, model="m")
    again = client.submit(path, model="m", options=BatchOptions(fresh=True))
    assert again.generation == 2
    client.cancel(again.batch_id)
    redis_connection.delete(f"rq:job:{again.batch_id}-1")
    assert client.retry(again.batch_id, True, source=path) == 1


def test_both_ways_of_reading_agree_about_styles() -> None:
    """The quick and the careful way of reading agree about what is plain."""
    for line in KINDS:
        raw = json.dumps(line).encode()
        careful = formats._careful_row(1, "line-1", raw)
        quick = plain.read_plain(raw, "line-1")
        assert isinstance(careful, formats.Row)
        assert quick is None or quick[0] == careful.request

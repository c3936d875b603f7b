"""The facts of a batch, and its report as one HTML file: sums, escaping, texts."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.report.counting import Counting
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.reading import read_facts
from batchkv_producer.report.sections import summary, workers
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.choice import ToolCall
from batchkv_producer.wire.job import Result, SamplingParams, Usage, decode_job, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions

MODEL = "some/model"
QUEUE = redis_keys.queue_name(MODEL)
EVIL = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m \U0001f642 \ud800 שלום"
NOTE = CacheNote(b"n" * 8, 6, 2, 3, key=b"k" * 16, parent=b"p" * 16, marks=b"m")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)


def end(connection: Redis, worker: str, *results: Result) -> None:
    """A worker pulls as many jobs as there are results, and ends them so, in this order."""
    moves, endings = Transitions(connection), []
    for row, result in zip(moves.pull(QUEUE, worker, len(results), 60), results, strict=True):
        name, usage = decode_job(row.data).custom_id, result.usage
        values = {"custom_id": name, "worker": worker, "model": MODEL}
        stored = encode_result(Result(**{**_fields(result), **values}))
        counts = (usage.prompt, usage.completion, usage.cached, result.busy_ms)
        endings.append(JobResult(row.lease, result.outcome, stored, *counts))
    assert set(moves.finish(QUEUE, worker, endings)) == {"ok"}


def _fields(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__dataclass_fields__}


def ok(created: int, busy_ms: int = 2000, **values: Any) -> Result:
    usage = values.pop("usage", Usage(1000, 10, 500))
    return Result("", "completion", "ok", text="forty-two", finish_reason="stop", created=created,
                  busy_ms=busy_ms, usage=usage, scheme="affine8", **values)  # fmt: skip


def broken(created: int, code: str, message: str) -> Result:
    return Result("", "completion", "failed", error=(code, message), created=created, busy_ms=9)


@pytest.fixture
def batch(redis_connection: Redis, client: Client, write_lines: Callable[..., Path]) -> str:
    """Two workers, one slow; duplicates, a wrong line, two codes of failures, canceled rows."""
    lines: list[Any] = [{"custom_id": f"row-name-{n}", "prompt": f"ask-{n}"} for n in range(1, 9)]
    lines += [{"custom_id": f"twin-{n}", "prompt": "ask-1", "temperature": 0} for n in (1, 2)]
    lines.append("{broken")
    lines[0]["temperature"] = 0
    source = write_lines(*lines)
    options = BatchOptions(dedupe=True)
    defaults = SamplingParams(max_tokens=9, stop=("secret stop",))
    found = client.submit(source, model=MODEL, defaults=defaults, options=options).batch_id
    now = client.status(found).created
    end(
        redis_connection,
        "fast",
        ok(now + 2, note=replace(NOTE, tiers=(("disk", 2), ("s3", 1)))),
        ok(now + 4),
    )
    end(redis_connection, "slow", ok(now + 8, 8000, note=NOTE))
    end(
        redis_connection,
        "slow",
        broken(now + 8, "timeout", "late"),
        broken(now + 9, "timeout", "x"),
    )
    end(redis_connection, "fast", broken(now + 9, "engine_error", EVIL))
    client.cancel(found)
    return found


def test_the_facts_have_the_sums_of_status(
    redis_connection: Redis, client: Client, batch: str
) -> None:
    """Counts by outcome and tokens, added up from the results, are those of ``status``."""
    facts, status = read_facts(redis_connection, batch[:8]), client.status(batch)
    assert facts.status == status and facts.is_complete
    assert (status.total, status.ok, status.failed, status.canceled) == (11, 5, 4, 2)
    bins = facts.throughput.bins
    assert sum(one.ok for one in bins) == status.ok - facts.num_copies == 3
    assert (sum(one.failed for one in bins), sum(one.canceled for one in bins)) == (4, 2)
    assert round(sum(one.completion_tokens for one in bins)) == status.completion_tokens == 30
    assert sum(one.tokens for one in facts.sources) == status.prompt_tokens == 3000
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(getattr(one, name) for one in facts.workers) == getattr(status, name)
    assert sum(group.count for group in facts.failures) == status.failed


def test_cached_tokens_are_divided_by_tier(redis_connection: Redis, batch: str) -> None:
    """By blocks of each tier. A result that names no tier counts for the store as a whole."""
    sources = {one.name: one.tokens for one in read_facts(redis_connection, batch).sources}
    memory = 200 + 500 + 200
    assert sources == {
        "computed": 1500, "worker's memory": memory, "disk": 200, "s3": 100, "store": 300
    }  # fmt: skip


def test_the_slow_worker_is_named(redis_connection: Redis, batch: str) -> None:
    """Tokens a second of the time in which a worker had rows; the fastest has the speed 1."""
    workers = {one.name: one for one in read_facts(redis_connection, batch).workers}
    assert workers["fast"].relative_speed == 1.0 > workers["slow"].relative_speed > 0
    assert (workers["slow"].ok, workers["slow"].failed, workers["slow"].p50_ms) == (1, 2, 8000)
    assert workers["no worker"].canceled == 2


def test_speeds_of_a_moment_are_not_compared(redis_connection: Redis, batch: str) -> None:
    """A worker that had rows for less than five seconds is named, and is not the slowest.

    Nor is it the fastest, of whose speed those of others are shares.
    """
    facts = read_facts(redis_connection, batch)

    def told(**seconds: float) -> str:
        shares = [replace(one, active_seconds=seconds.get(one.name, 0.0)) for one in facts.workers]
        return workers(replace(facts, workers=tuple(shares)))

    assert "The slowest, slow, has" in told(fast=5.0, slow=9.0)
    text = told(fast=5.0, slow=4.9)
    assert "The slowest" not in text and "Rows of slow took less than 5 s" in text
    counting = Counting(0.0, 100.0)
    for name, busy_ms in (("long", 9000), ("short", 4000)):
        row = Result("", "chat", "ok", usage=Usage(1, 10), worker=name, created=20, busy_ms=busy_ms)
        counting.add(1, row, is_copy=False)
    shares = {one.name: one for one in counting.facts(facts.status, {}, ()).workers}
    assert (shares["long"].relative_speed, shares["short"].relative_speed) == (1.0, 0.0)


def test_the_time_in_which_nobody_computed_is_told_apart(
    redis_connection: Redis, batch: str
) -> None:
    """Rows of a retry may end long after the others, and the speed is not that of the pause."""
    facts = read_facts(redis_connection, batch)
    assert facts.started_at is not None and facts.ended_at is not None
    assert 0 < facts.active_seconds <= facts.ended_at - facts.started_at
    busy = replace(facts, started_at=0.0, ended_at=100.0, active_seconds=95.0)
    assert "under way</dt>" not in summary(busy) and "<dd>0.3</dd>" in summary(busy)
    text = summary(replace(busy, ended_at=1000.0, active_seconds=100.0))
    assert "of it with rows under way" in text and "<dd>0.3</dd>" in text


def test_failures_have_lines_and_messages(redis_connection: Redis, batch: str) -> None:
    """By code, the most frequent first, with the first lines and different messages."""
    groups = {one.code: one for one in read_facts(redis_connection, batch).failures}
    assert next(iter(groups)) == "timeout"
    assert groups["timeout"].lines == (4, 5)
    assert [(one.line, one.message) for one in groups["timeout"].examples] == [
        (4, "late"),
        (5, "x"),
    ]
    assert groups["invalid_json"].lines == (11,)


class _Page(HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def run(*arguments: object) -> click.testing.Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def test_the_report_is_one_file_that_loads_nothing(
    client: Client, batch: str, tmp_path: Path
) -> None:
    """No script, no address, no style but the one that the policy names by its digest. The sums
    are those of ``status``. No prompt, no answer, no name of a row."""
    found = run(batch[:8], "-o", tmp_path / "r.html")
    assert found.exit_code == 0 and "wrote" in found.stderr and found.stdout == ""
    text = (tmp_path / "r.html").read_text("utf-8")
    page = _Page(text)
    assert not {"script", "img", "link", "iframe", "form", "object"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "style", "onerror", "onclick", "srcset", "action"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    (sheet,) = re.findall("<style>(.*)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    policy = next(value for name, value in page.attributes if name == "content" and "src" in value)
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    status = client.status(batch)
    assert status.whole_sum() in page.text and "All rows have ended" in page.text
    for absent in ("ask-1", "forty-two", "row-name", "twin", "secret stop", "\x1b", "\u202e"):
        assert absent not in page.text
    assert "</script><img src=x onerror=alert(1)>" in page.text  # the message, as text
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_folder_that_is_not_there_is_named(batch: str, tmp_path: Path) -> None:
    """Before anything is read, like that of ``results -o``."""
    found = run(batch, "-o", tmp_path / "none" / "r.html")
    assert found.exit_code == 2 and f"there is no folder {tmp_path}/none" in found.stderr


def test_a_full_disk_is_named_and_nothing_is_left(
    batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file was written, and the user reads which one."""

    def half(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    target = tmp_path / "full.html"
    found = run(batch, "-o", target)
    assert found.exit_code == 4 and f"the disk is full: cannot write {target}" in found.stderr
    assert not list(tmp_path.glob("*full*")) and not list(tmp_path.glob(".*full*"))


def test_a_batch_under_way_is_reported_as_it_is(
    redis_connection: Redis, client: Client, write_lines: Callable[..., Path]
) -> None:
    """The report says so and how many rows are open, also before any row has run."""
    lines = [{"prompt": f"{n}"} for n in range(4)]
    found = client.submit(write_lines(*lines), model=MODEL).batch_id
    for num_open in (4, 3):
        page = _Page(run(found, "-o", "-").stdout)
        assert f"under way: {num_open} of 4 rows are open" in page.text
        assert client.status(found).whole_sum() in page.text
        if num_open == 4:
            end(redis_connection, "w", ok(client.status(found).created))
    again = run(found)
    assert "3 rows are open" in again.stderr
    assert Path(f"{found}.report.html").read_text("utf-8").endswith("</html>\n")


def test_texts_only_on_request(redis_connection: Redis, batch: str, tmp_path: Path) -> None:
    """--with-text shows answers and errors, cut and escaped. Prompts of ok rows need the file."""
    answer = Result("c1", "completion", "ok", text="<b>" + "y" * 1_000_000,
                    finish_reason="length", reasoning="I think " + EVIL,
                    tool_calls=(ToolCall("1", "look<", "{}"),))  # fmt: skip
    redis_connection.hset(redis_keys.results(batch), "1", encode_result(answer))
    text = run(batch, "-o", "-", "--with-text").stdout
    page = _Page(text)
    assert len(text) < 200_000
    assert "Cut: the first 10,000 of 1,000,003 characters are shown." in page.text
    assert "Call of look<" in page.text and "I think" in page.text and "<b>yyy" in page.text
    assert "\x1b" not in page.text and "b" not in page.tags
    assert "ask-2" not in page.text and "--from FILE shows them" in page.text
    assert "ask-4" in page.text  # a failed row: its job still has the prompt
    full = _Page(run(batch, "-o", "-", "--with-text", "--from", tmp_path / "prompts.jsonl").stdout)
    assert "ask-2" in full.text
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    wrong = run(batch, "-o", "-", "--with-text", "--from", tmp_path / "other.jsonl")
    assert wrong.exit_code == 2 and "does not make batch" in wrong.stderr


def test_json_has_the_facts(batch: str) -> None:
    """The same facts for programs, with the fields of ``status --json``."""
    facts = json.loads(run(batch, "--json").stdout)
    assert facts["status"]["ok"] == 5 and facts["status"]["is_done"]
    assert {one["name"] for one in facts["workers"]} == {"fast", "slow", "no worker"}
    assert set(facts) == set(Facts.__dataclass_fields__)


@pytest.mark.parametrize("flags", [("--from", "f"), ("--json", "-o", "x"), ("--as", "text")])
def test_flags_that_would_do_nothing_are_refused(flags: tuple[str, ...], redis_url: str) -> None:
    """Each combination that has no effect ends with exit code 2, and so does an unknown batch."""
    assert run("abcdef", *flags).exit_code == 2
    assert "no batch" in run("abcdef").stderr


def test_results_that_nobody_can_read_are_counted(redis_connection: Redis, batch: str) -> None:
    """Foreign bytes in the place of a result stop no report, and the report says how many."""
    redis_connection.hset(redis_keys.results(batch), "2", b"foreign")
    assert read_facts(redis_connection, batch).num_unreadable == 1
    assert "1 results cannot be read" in _Page(run(batch, "-o", "-").stdout).text

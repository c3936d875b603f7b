"""Batches of OpenAI's API after their end: rows from their files, a report, and a retry."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from httpx2 import Client as HttpClient
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches.steps import Steps
from batchkv_gateway.files.folder import Folder
from batchkv_gateway.files.records import Files
from batchkv_gateway.ids import BATCH, new_id
from batchkv_gateway.kept_facts import stored_facts
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.native.stream import in_file, line_of
from batchkv_gateway.settings import GatewaySettings
from batchkv_producer.cli import cli
from batchkv_producer.client import Client
from batchkv_producer.errors import AwayError, NotFoundError, UsageError
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.remote.opening import connect_gateway
from batchkv_producer.remote.rows import RowReader
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire import redis_keys as queue_keys
from batchkv_producer.wire.job import Result
from support.gateway import Gateway, chat_file, chat_line, working
from support.worker_harness import wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def http(gateway: Gateway, redis_connection: Redis) -> Iterator[HttpClient]:
    """A client of the native API, on an empty server."""
    root = gateway.url.removesuffix("/v1") + "/batchkv/v1"
    with HttpClient(base_url=root, timeout=20) as found:
        yield found


def made(client: OpenAI, body: bytes, **more: Any) -> Batch:
    """A batch of a file."""
    file = client.files.create(file=body, purpose="batch")
    terms = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, **terms)  # type: ignore[arg-type]


def gone(http: HttpClient, batch_id: str) -> dict[str, Any]:
    """The facts of a batch, once its rows have left the queue."""
    until = time.monotonic() + 20
    while True:
        found: dict[str, Any] = http.get(f"/batches/{batch_id}").json()
        if found["is_done"] and not found["in_queue"]:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.05)


def lines(answer: Any) -> list[int]:
    return [row["line"] for row in answer.json()["data"]]


@pytest.fixture
def ended(http: HttpClient, client: OpenAI, redis_url: str, monkeypatch: Any) -> Batch:
    """A batch of five lines, one of them blank: ``b`` failed, ``d`` is wrong in the input."""
    monkeypatch.setenv("FAKE_FAIL", "b")
    wrong = chat_line("d", temperature="hot").encode() + b"\n"
    body = b"\xef\xbb\xbf" + chat_file("a") + b"\n" + chat_file("b", "c") + wrong
    terms = {"metadata": {"of": "me"}, "extra_headers": {"x-batchkv-validation": "per-row"}}
    with working(redis_url):
        batch = made(client, body, **terms)
        gone(http, batch.id)
    return batch


def test_rows_are_those_of_the_files(http: HttpClient, client: OpenAI, ended: Batch) -> None:
    """Each row has its line, prompt, answer or error. Without the input there is no prompt."""
    url = f"/batches/{ended.id}/rows"
    first, failed, third, wrong = http.get(url).json()["data"]
    assert (first["line"], first["custom_id"], first["prompt"]) == (1, "a", "text of a")
    assert first["answer"] == "answer to text of a" and first["prompt_tokens"] == 5
    assert (failed["line"], failed["outcome"], failed["error"]["code"]) == (
        3,
        "failed",
        "engine_error",
    )
    assert wrong["error"]["code"] == "invalid_request" and wrong["prompt"] is None
    whole = http.get(f"{url}?after=3&limit=1&full=1").json()
    assert whole["data"][0]["messages"] == [{"role": "user", "content": "text of c"}]
    assert whole["has_more"] and whole["next"] == third["line"] == 4
    assert lines(http.get(f"{url}?outcome=ok")) == [1, 4]
    assert lines(http.get(f"{url}?outcome=failed&limit=1")) == [3]
    assert lines(http.get(f"{url}?outcome=canceled")) == []
    groups = http.get(f"/batches/{ended.id}/failures").json()["data"]
    assert [(one["code"], one["lines"]) for one in groups] == [
        ("engine_error", [3]),
        ("invalid_request", [5]),
    ]
    counts = {"failed": 1, "canceled": 0, "wrong": 1, "expired": 0, "refused": 0}
    assert http.get(f"/batches/{ended.id}/unanswered").json() == counts
    client.files.delete(ended.input_file_id)
    assert {row["prompt"] for row in http.get(url).json()["data"]} == {None}
    counts |= {"failed": 0, "expired": 1}
    assert http.get(f"/batches/{ended.id}/unanswered").json() == counts
    assert http.post(f"/batches/{ended.id}/retry").status_code == 404
    output = client.batches.retrieve(ended.id).output_file_id
    client.files.delete(output or "")
    assert "is gone" in http.get(url).json()["error"]["message"]


def test_its_report_outlives_its_rows(gateway: Gateway, http: HttpClient, ended: Batch) -> None:
    """Times and workers are not in the files. They are counted before the rows are deleted."""
    facts = connect_gateway(gateway.url.removesuffix("/v1")).facts(ended.id)
    assert (facts.status.ok, facts.status.failed, facts.num_read) == (2, 2, 4)
    assert any(worker.ok == 2 for worker in facts.workers) and facts.latency_ms is not None
    root = gateway.url.removesuffix("v1")
    page = http.get(f"{root}page/facts/{ended.id}").json()
    assert page["failures"] == http.get(f"/batches/{ended.id}?facts=1").json()["report"]["failures"]
    report = http.get(f"{root}page/report/{ended.id}")
    assert (
        report.headers["content-disposition"].startswith("attachment")
        and "engine_error" in report.text
    )


def test_a_retry_is_a_new_batch(
    gateway: Gateway, http: HttpClient, client: OpenAI, redis_url: str, ended: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It has the failed rows with the same terms, once, and none that is wrong in the input."""
    monkeypatch.delenv("FAKE_FAIL")
    assert http.post(f"/batches/{ended.id}/retry").json()["queued"] == 1
    notes: list[str] = []
    remote = connect_gateway(gateway.url.removesuffix("/v1"), notes.append)
    assert remote.retry(ended.id) == 1
    [newer, older] = client.batches.list().data  # the second retry found the first one's batch
    assert older.id == ended.id and notes == [f"these rows are a new batch, {newer.id}"]
    assert newer.metadata == {"of": "me", "retry_of": ended.id}
    with working(redis_url):
        gone(http, newer.id)
    answer = client.files.content(client.batches.retrieve(newer.id).output_file_id or "").text
    assert [json.loads(line)["custom_id"] for line in answer.splitlines()] == ["b"]
    assert http.post(f"/batches/{newer.id}/retry").json() == {"queued": 0, "openai_id": None}
    refused = http.post(f"/batches/{ended.id}/retry", headers={"x-batchkv-job-timeout": "5"})
    assert refused.status_code == 409


def test_canceled_rows_are_retried_if_asked(http: HttpClient, client: OpenAI) -> None:
    """A cancelled batch has its canceled rows, and a retry takes them only with the header."""
    batch = made(client, chat_file("a", "b"))
    assert lines(http.get(f"/batches/{batch.id}/rows")) in (
        [],
        [1, 2],
    )  # none before they are queued
    until = time.monotonic() + 20
    while not http.get(f"/batches/{batch.id}").json()["in_queue"]:
        assert time.monotonic() < until
    assert http.post(f"/batches/{batch.id}/cancel").json()["canceled"] == 2
    gone(http, batch.id)
    assert lines(http.get(f"/batches/{batch.id}/rows?outcome=canceled")) == [1, 2]
    assert http.post(f"/batches/{batch.id}/retry").json()["queued"] == 0
    again = http.post(f"/batches/{batch.id}/retry", headers={"x-batchkv-canceled": "1"}).json()
    assert again["queued"] == 2
    client.batches.cancel(again["openai_id"])


def test_an_admin_retries_for_the_owner(
    http: HttpClient, gateway: Gateway, redis_url: str, redis_connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The new batch belongs to the key that made the old one. Another key finds neither."""
    monkeypatch.setenv("FAKE_FAIL", "a")
    keys = KeyStore(redis_connection)
    one, other, admin = keys.add("one"), keys.add("other"), keys.add("admin", is_admin=True)
    http.headers["Authorization"] = f"Bearer {one}"
    with gateway.client(one) as client, working(redis_url):
        batch = made(client, chat_file("a"))
        gone(http, batch.id)
    for key, status in ((other, 404), (admin, 200)):
        http.headers["Authorization"] = f"Bearer {key}"
        answer = http.post(f"/batches/{batch.id}/retry")
        assert answer.status_code == status
        assert http.get(f"/batches/{batch.id}/rows").status_code == status
    with gateway.client(one) as client:
        assert client.batches.cancel(answer.json()["openai_id"]).status == "cancelling"


def test_an_ended_batch_can_be_deleted(
    http: HttpClient, client: OpenAI, redis_connection: Redis, ended: Batch
) -> None:
    """Its record, its facts and the files that it made are gone; its input is not. The same create
    makes a new batch. One that is open must be cancelled first."""
    over = client.batches.retrieve(ended.id)
    client.files.delete(over.error_file_id or "")  # as a user may have done
    assert http.delete(f"/batches/{ended.id}").json()["deleted"]
    assert http.get(f"/batches/{ended.id}").status_code == 404
    assert [file.id for file in client.files.list()] == [ended.input_file_id]
    assert list(client.batches.list()) == []
    assert not redis_connection.exists(redis_keys.facts(ended.id), redis_keys.batch(ended.id))
    terms = {"metadata": {"of": "me"}, "extra_headers": {"x-batchkv-validation": "per-row"}}
    again = client.batches.create(
        input_file_id=ended.input_file_id, endpoint=CHAT, completion_window="24h", **terms
    )  # type: ignore[call-overload]
    assert again.id != ended.id
    assert http.delete(f"/batches/{again.id}").status_code == 409
    client.batches.cancel(again.id)


def test_wrong_lines_are_facts_of_the_batch(http: HttpClient, client: OpenAI) -> None:
    """A batch that was not queued says which lines are wrong."""
    batch = made(client, b'{"a": 1}\n')
    found = gone(http, batch.id)
    assert found["openai_status"] == "failed" and found["openai_errors"][0]["line"] == 1
    assert lines(http.get(f"/batches/{batch.id}/rows")) == []


def test_rows_leave_once_the_facts_are_kept(redis_connection: Redis, tmp_path: Path) -> None:
    """After a kill the facts that are kept stay, and the rest of the rows leaves."""
    client, batch_id = Client(redis_connection), new_id(BATCH)
    queued_id = client.submit([{"prompt": "a"}], model="fake").batch_id
    steps = Steps(redis_connection, Files(redis_connection, Folder(tmp_path)), GatewaySettings())
    redis_connection.hset(redis_keys.batch(batch_id), "status", "completed")
    for is_half_deleted in (False, True, True):  # the third time nothing is left
        if is_half_deleted and redis_connection.exists(queue_keys.batch(queued_id)):
            redis_connection.hset(queue_keys.batch(queued_id), "forgotten", 1)
        redis_connection.hset(redis_keys.SPENT, batch_id, queued_id)
        steps.forget(batch_id)
        assert not redis_connection.exists(redis_keys.SPENT, queue_keys.batch(queued_id))
        kept = stored_facts(redis_connection, batch_id)
        assert kept is not None and kept.status.total == 1
        assert redis_connection.ttl(redis_keys.facts(batch_id)) > 29 * 86_400
        if not is_half_deleted:
            queued_id = client.submit([{"prompt": "b"}], model="fake").batch_id
    steps.forget(batch_id)


def test_its_results_are_read_from_its_files(
    gateway: Gateway, http: HttpClient, client: OpenAI, ended: Batch
) -> None:
    """The client's calls that read results know no difference, whichever id they are given."""
    queued_id = http.get(f"/batches/{ended.id}").json()["batch_id"]
    remote = connect_gateway(gateway.url.removesuffix("/v1"))
    for name in (ended.id, queued_id):
        found = list(remote.results(name))
        assert [(row.line, row.result.custom_id, row.result.outcome) for row in found] == [
            (1, "a", "ok"), (3, "b", "failed"), (4, "c", "ok"), (5, "d", "failed"),
        ]  # fmt: skip
        assert found[0].result.text == "answer to text of a"
        assert list(remote.results(name, order="input", after=3)) == found[2:]
        assert list(remote.results(name, after=1)) == found[1:]
        assert list(remote.results(name, follow=True)) == found
        lines_asked = remote.results_of(found[0].job_id.split("-")[0], [4, 9])
        assert list(lines_asked) == [(4, found[2].result), (9, None)]
        assert list(remote.job_ids(name)) == [f"{queued_id}-{n}" for n in (1, 3, 4, 5)]
    job = remote.job(f"{queued_id}-3")
    assert (job.status, job.custom_id, job.error[:13]) == ("failed", "b", "engine_error:")
    with pytest.raises(NotFoundError, match=r"line 9 .* is no row"):
        remote.job(f"{queued_id}-9")
    missing = MissingLines()
    (again,) = remote.failed_lines(remote.status(ended.id), missing)
    assert json.loads(again)["custom_id"] == "b"
    assert (missing.num_wrong, missing.num_gone) == (1, 0)
    assert [each.total for each in remote.list_batches()] == [4]
    assert list(remote.each_batch(in_queue=True)) == []
    assert remote.count_batches() >= 1
    output = client.batches.retrieve(ended.id).output_file_id or ""
    answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    shown = http.get(f"/batches/{ended.id}/results?outcome=ok&limit=1").text.splitlines()
    (first,) = map(json.loads, shown)
    assert first.pop("in_file") and (first.pop("line"), first.pop("position")) == (1, 0)
    assert first.pop("outcome") == "ok" and first == answers[0]


def test_commands_know_an_ended_batch(
    gateway: Gateway,
    redis_url: str,
    http: HttpClient,
    ended: Batch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """``status``, ``results``, ``failed``, ``list`` and ``wait`` of the README's examples."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    url = ("--url", gateway.url.removesuffix("/v1"))

    def said(*words: str) -> Any:
        return CliRunner().invoke(cli, [*words, *url], prog_name="batchkv")

    status = said("status", ended.id)
    assert status.exit_code == 0 and "4 = 2 ok + 2 failed + 0 canceled" in status.stdout
    assert "tok/s" not in status.stdout, "files have no times"
    assert said("wait", ended.id).stdout.startswith("4 = 2 ok + 2 failed + 0 canceled")
    results = said("results", ended.id)
    names = [json.loads(line)["custom_id"] for line in results.stdout.splitlines()]
    assert names == ["a", "b", "c", "d"]
    assert json.loads(said("failed", ended.id).stdout)["custom_id"] == "b"
    assert "100 %" in said("list").stdout
    without = CliRunner().invoke(cli, ["status", ended.id], prog_name="batchkv")
    assert (
        "is an id of OpenAI's API, which gateways know: add --url http://GATEWAY" in without.stderr
    )


def test_a_batch_that_failed_its_check_is_no_success(
    gateway: Gateway, http: HttpClient, client: OpenAI
) -> None:
    """Who waits for it learns which lines are wrong."""
    batch = made(client, b'{"a": 1}\n')
    gone(http, batch.id)
    remote = connect_gateway(gateway.url.removesuffix("/v1"))
    for ask in (remote.wait, remote.results, remote.retry):
        with pytest.raises(UsageError, match=r"^nothing was queued; line 1: .* make a new batch$"):
            ask(batch.id)
    url = ("--url", gateway.url.removesuffix("/v1"))
    for command in (["status", batch.id], ["list"]):
        said = CliRunner().invoke(cli, [*command, *url], prog_name="batchkv").stdout
        assert "no rows" in said and "100 %" not in said
        assert "not queued" in said
    shown = CliRunner().invoke(cli, ["status", batch.id, *url], prog_name="batchkv").stdout
    assert f"`batchkv wait {batch.id}` says why" in " ".join(shown.split())


def test_canceled_rows_are_counted_as_such(http: HttpClient, client: OpenAI) -> None:
    """OpenAI's object counts them as failed, and has no other word."""
    batch = made(client, chat_file("a", "b"))
    wait_until(lambda: http.get(f"/batches/{batch.id}").json()["in_queue"])
    client.batches.cancel(batch.id)
    found = gone(http, batch.id)
    assert (found["ok"], found["failed"], found["canceled"]) == (0, 0, 2)
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and counts.failed == 2


def test_a_reader_begins_anew_when_the_rows_have_left_the_queue() -> None:
    """Files have them in another order. Each row comes once."""
    rows = [Result(str(number), "chat", "ok", text=f"t{number}") for number in range(1, 6)]

    def line(number: int, position: int) -> StoredRow:
        return StoredRow(f"{'a' * 16}-{number}", number, position, rows[number - 1])

    queue = [line_of(line(number, place), "stored") for place, number in enumerate((4, 1, 5))]
    files = [in_file(line(number, number - 1), "stored") for number in range(1, 6)]
    asked: list[int] = []

    class Cut:
        def lines(self, path: str, *, after: int, **_: Any) -> Iterator[bytes]:
            asked.append(after)
            if len(asked) == 1:
                yield from queue
                raise AwayError("cut")
            yield from files[after:]

    transport: Any = Cut()
    reader = RowReader(transport, "a" * 16, "finish", 0, is_followed=True)
    assert [row.line for row in reader.each()] == [4, 1, 5, 2, 3]
    assert asked == [0, 3, 0]

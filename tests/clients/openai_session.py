"""One whole session of OpenAI's own client, in which each step once meets a fault.

``make clients`` runs it with the newest client in an environment of its own; the suite runs it
with the locked one. It imports nothing of the project but helpers that need OpenAI's client alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from openai.types import Batch

from support.http_faults import Fault, HttpFaults
from support.openai_objects import check_response

CHAT = "/v1/chat/completions"
NUM_ROWS = 3  # that a session has computed
WAIT_SECONDS = 120.0
ONE = "[^/]+"
NUM_AT_ONCE = 20  # batches that are made or polled at the same time
LEDGER = "Ledger of codes:\n- amber falcon: 4821\n- quiet harbor: 0937\n\n"

FAULTS = {
    "unsent": Fault("unsent"),
    "lost": Fault("lost"),
    "cut": Fault("cut"),
    "429": Fault("refused", 429, "0.05"),
    "500": Fault("refused", 500, "0.05"),
    "503 after": Fault("failed", 503, "0.05"),
}


def strict_client(url: str, key: str = "any", **more: Any) -> OpenAI:
    """OpenAI's client as it is. Each answer that it gets is checked strictly."""
    http = DefaultHttpxClient(event_hooks={"response": [check_response]})
    return OpenAI(base_url=url, api_key=key, timeout=60, http_client=http, **more)


def rows(model: str, *texts: str, **more: Any) -> bytes:
    """A batch's file. The custom_ids are ``r0``, ``r1`` and so on."""
    found = []
    for number, text in enumerate(texts):
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        line = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}
        found.append(json.dumps(line))
    return "\n".join(found).encode()


def wait(client: OpenAI, batch_id: str, until: Callable[[Batch], bool]) -> Batch:
    """Poll until the batch is as asked."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not until(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def is_over(batch: Batch) -> bool:
    """Whether nothing more happens to a batch."""
    return batch.status in ("completed", "failed", "expired", "cancelled")


def lines(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a batch's file."""
    text = client.files.content(file_id).text if file_id else ""
    return [json.loads(line) for line in text.splitlines()]


def faulted_session(url: str, proxy: HttpFaults, name: str, model: str) -> None:
    """Upload, create, poll, content, error file, pages, cancel, delete: ``name``'s fault in each.

    ``url`` is the gateway's own, for what must be seen without faults. Raises AssertionError if
    anything happens twice or is lost.
    """
    fault = FAULTS[name]
    tag = {"session": name}
    with strict_client(proxy.url) as client, strict_client(url) as plain:
        wrong = rows(model, *map(str, range(NUM_ROWS))) + b'\n{"custom_id": "wrong"}'
        proxy.plan("POST", "/v1/files", fault)
        file = client.files.create(file=("rows.jsonl", wrong), purpose="batch")
        assert plain.files.content(file.id).content == wrong
        proxy.plan("POST", "/v1/batches", fault)
        made = _create(client, file.id, tag)
        assert _create(plain, file.id, tag).id == made.id
        proxy.plan("GET", f"/v1/batches/{ONE}", fault)
        done = wait(client, made.id, is_over)
        assert done.status == "completed", done
        proxy.plan("GET", f"/v1/files/{ONE}/content", fault, fault)
        answers, errors = (lines(client, one) for one in (done.output_file_id, done.error_file_id))
        ids = Counter(line["custom_id"] for line in [*answers, *errors])
        assert ids == Counter(["r0", "r1", "r2", "wrong"]), ids
        assert [line["custom_id"] for line in errors] == ["wrong"]

        long = client.files.create(file=rows("nobody", "never"), purpose="batch")
        open_batch = _create(client, long.id, tag)
        proxy.plan("POST", f"/v1/batches/{ONE}/cancel", fault)
        assert client.batches.cancel(open_batch.id).status in ("cancelling", "cancelled")
        proxy.plan("GET", "/v1/batches", fault, fault)
        pages = client.batches.list(limit=1)
        found = [batch.id for batch in pages if batch.metadata == tag]
        assert found == [open_batch.id, made.id], found
        wait(client, open_batch.id, is_over)
        for file_id in (file.id, long.id, done.output_file_id):
            proxy.plan("DELETE", f"/v1/files/{ONE}", fault)
            assert client.files.delete(str(file_id)).deleted
        assert file.id not in [one.id for one in plain.files.list()]
    assert proxy.is_done


def many_batches(url: str, num_batches: int, num_rows: int) -> None:
    """As inspect_ai does it: many batches at once, of few rows each.

    Needs a worker that echoes as model ``fake``. Raises AssertionError unless each batch has all
    answers, its own and in its own order.
    """

    def make(number: int) -> Batch:
        texts = [f"{number}/{row}" for row in range(num_rows)]
        file = client.files.create(file=rows("fake", *texts), purpose="batch")
        return _create(client, file.id, {"number": str(number)})

    def check(number: int) -> None:
        done = wait(client, made[number].id, is_over)
        counts = done.request_counts
        assert done.status == "completed" and done.error_file_id is None, done
        assert counts and (counts.total, counts.completed) == (num_rows, num_rows), done
        found = [
            (line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"])
            for line in lines(client, done.output_file_id)
        ]
        assert found == [(f"r{row}", f"answer to {number}/{row}") for row in range(num_rows)]

    with strict_client(url) as client, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        made = list(pool.map(make, range(num_batches)))
        assert len({batch.id for batch in made}) == num_batches
        list(pool.map(check, range(num_batches)))
        listed = {batch.id for batch in client.batches.list(limit=7)}
    assert {batch.id for batch in made} <= listed


def thoughtful_batch(url: str, model: str, **fields: Any) -> None:
    """A batch's usage has the sums of its rows, with reasoning tokens.

    ``model`` must think in rows with these fields. Raises AssertionError.
    """
    texts = [f"{LEDGER}What is the code of {name}?" for name in ("amber falcon", "quiet harbor")]
    with strict_client(url) as client:
        content = rows(model, *texts, temperature=0, max_tokens=200, **fields)
        file = client.files.create(file=content, purpose="batch")
        done = wait(client, _create(client, file.id, {"thinks": "yes"}).id, is_over)
        answers = [line["response"]["body"] for line in lines(client, done.output_file_id)]
    assert len(answers) == len(texts), done
    details = [each["usage"]["completion_tokens_details"] for each in answers]
    thoughts = [each["choices"][0]["message"]["reasoning_content"] for each in answers]
    sums = sum(each["reasoning_tokens"] for each in details)
    usage = done.usage
    assert usage is not None and all(thoughts) and sums > 0, answers
    assert usage.output_tokens_details.reasoning_tokens == sums, (usage, details)
    assert usage.output_tokens == sum(each["usage"]["completion_tokens"] for each in answers)
    assert usage.output_tokens > sums


def _create(client: OpenAI, file_id: str, tag: dict[str, str]) -> Batch:
    return client.batches.create(
        input_file_id=file_id,
        endpoint=CHAT,
        completion_window="24h",
        metadata=tag,
        extra_headers={"x-batchkv-validation": "per-row"},
    )

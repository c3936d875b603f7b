"""litellm: files and batches with its ``openai`` provider, calls and streams."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import litellm

from clients.openai_session import rows

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
PLACE = {"api_base": URL, "api_key": "none"}
WAIT_SECONDS = 120


def batches() -> None:
    """Upload, create, poll, content, list, cancel, delete."""
    where = {"custom_llm_provider": "openai", **PLACE}
    Path("rows.jsonl").write_bytes(rows(MODEL, "one", "two", max_tokens=8))
    with Path("rows.jsonl").open("rb") as content:
        file = litellm.create_file(file=content, purpose="batch", **where)
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        metadata={"by": "litellm"},
        **where,
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := litellm.retrieve_batch(batch_id=batch.id, **where)).status != "completed":
        assert time.monotonic() < deadline and found.status != "failed", found
        time.sleep(0.2)
    assert found.request_counts and found.request_counts.completed == 2
    content = litellm.file_content(file_id=str(found.output_file_id), **where).text
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == ["r0", "r1"]
    assert batch.id in [each.id for each in litellm.list_batches(**where).data]
    waiting = litellm.create_file(
        file=("w.jsonl", rows("nobody", "never")), purpose="batch", **where
    )
    other = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=waiting.id,
        **where,
    )
    cancelled = litellm.cancel_batch(batch_id=other.id, **where)
    assert cancelled.status in ("cancelling", "cancelled")
    assert litellm.file_delete(file_id=file.id, **where).deleted
    print("ok: files and batches")


def calls() -> None:
    """``completion`` whole and as a stream, ``text_completion``, and an error."""
    ask = {"model": f"openai/{MODEL}", "messages": [{"role": "user", "content": "What is it?"}]}
    ask |= {"temperature": 0, "max_tokens": 16, **PLACE}
    whole = litellm.completion(**ask)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(**ask, stream=True, stream_options={"include_usage": True})
        if chunk.choices
    ]
    assert "".join(pieces) == whole.choices[0].message.content, (pieces, whole)
    assert whole.usage.completion_tokens
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One and", max_tokens=4, **PLACE
    )
    assert text.choices
    try:
        litellm.completion(**{**ask, "model": "openai/nobody"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that nobody serves has an answer")
    print("ok: calls and streams")


if __name__ == "__main__":
    batches()
    calls()

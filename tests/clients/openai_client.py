"""OpenAI's client: a session under each fault, many calls at once, streams, strict objects."""

from __future__ import annotations

import asyncio
import os
import time

import httpx2
from openai import APIConnectionError, AsyncOpenAI, NotFoundError

from clients.openai_session import (
    FAULTS,
    faulted_session,
    many_batches,
    strict_client,
    thoughtful_batch,
)
from support.http_faults import HttpFaults
from support.openai_objects import check_chunk

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
PORT = int(os.environ["GATEWAY_PORT"])
NUM_CALLS, NUM_STREAMS = 200, 50
NUM_BATCHES, NUM_ROWS = 100, 100


def question(text: str) -> list[dict[str, str]]:
    """The messages of one question."""
    return [{"role": "user", "content": text}]


def sessions() -> None:
    """A session under each fault, with the client's own delays and number of retries."""
    for name in FAULTS:
        with HttpFaults(PORT) as proxy:
            faulted_session(URL, proxy, name, MODEL)
            print(f"ok: a batch, start to end, with {proxy.num_faults} times the fault {name}")


def faulted_calls() -> None:
    """A call under each fault has its answer; a stream that is cut does not look whole."""
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 24, "messages": question("What is it?")}
    with strict_client(URL) as client:
        right = client.chat.completions.create(**ask).choices[0].message.content
    for name, fault in FAULTS.items():
        with HttpFaults(PORT) as proxy, strict_client(proxy.url) as client:
            proxy.plan("POST", "/v1/chat/completions", fault)
            found = client.chat.completions.create(**ask)
            assert found.choices[0].message.content == right, found
            proxy.plan("POST", "/v1/chat/completions", fault)
            pieces = []
            try:
                for chunk in client.chat.completions.create(**ask, stream=True):
                    pieces += [choice.delta.content or "" for choice in chunk.choices]
            except (APIConnectionError, httpx2.TransportError):
                assert name == "cut", name
            else:
                assert name != "cut" and "".join(pieces) == right, pieces
            assert proxy.is_done
    print("ok: calls and streams with each fault")


def calls() -> None:
    """Synchronous calls and streams: strict objects, and the same answer in both ways."""
    with strict_client(URL) as client:
        ask = {"model": MODEL, "temperature": 0, "max_tokens": 24}
        whole = client.chat.completions.create(messages=question("What is the code?"), **ask)
        pieces, usage = "", None
        stream = client.chat.completions.create(
            messages=question("What is the code?"),
            stream=True,
            stream_options={"include_usage": True},
            **ask,
        )
        for chunk in stream:
            check_chunk(chunk.model_dump(exclude_unset=True))
            pieces += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert pieces == whole.choices[0].message.content, (pieces, whole)
        assert usage and whole.usage
        assert usage.completion_tokens == whole.usage.completion_tokens
        prompt = {"model": MODEL, "prompt": "One and one is", "max_tokens": 4, "temperature": 0}
        text = client.completions.create(**prompt)
        assert text.object == "text_completion" and text.usage
        pieces = ""
        for piece in client.completions.create(**prompt, stream=True):
            check_chunk(piece.model_dump(exclude_unset=True))
            pieces += "".join(choice.text for choice in piece.choices)
        assert pieces == text.choices[0].text
        two = client.chat.completions.create(messages=question("Hi"), n=2, **ask)
        assert [choice.index for choice in two.choices] == [0, 1]
        try:
            client.chat.completions.create(model="nobody/serves-this", messages=question("Hi"))
        except NotFoundError as fault:
            assert fault.code == "model_not_found", fault
        else:
            raise AssertionError("a model that nobody serves has an answer")
    print("ok: calls and streams, strictly as OpenAI's")


def batches() -> None:
    """Many batches at once, and one whose rows think."""
    began = time.monotonic()
    many_batches(URL, NUM_BATCHES, NUM_ROWS)
    seconds = time.monotonic() - began
    print(f"ok: {NUM_BATCHES} batches at once, of {NUM_ROWS} rows each, in {seconds:.1f} s")
    thoughtful_batch(URL, MODEL, reasoning_effort="low")
    print("ok: a batch's usage has its reasoning tokens")


async def at_once() -> None:
    """Many calls and streams at once, over one client."""
    async with AsyncOpenAI(base_url=URL, api_key="any", timeout=300) as client:

        async def call(number: int) -> str:
            found = await client.chat.completions.create(
                model=MODEL, messages=question(f"Say {number}"), temperature=0, max_tokens=8
            )
            return found.choices[0].message.content or ""

        async def stream(number: int) -> str:
            text = ""
            async for chunk in await client.chat.completions.create(
                model=MODEL,
                messages=question(f"Say {number}"),
                temperature=0,
                max_tokens=8,
                stream=True,
            ):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            return text

        began = time.monotonic()
        answers = await asyncio.gather(*map(call, range(NUM_CALLS)))
        middle = time.monotonic()
        streamed = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
        assert list(answers[:NUM_STREAMS]) == list(streamed)
        ended = time.monotonic()
    print(f"ok: {NUM_CALLS} calls at once in {middle - began:.1f} s, "
          f"{NUM_STREAMS} streams in {ended - middle:.1f} s")  # fmt: skip


if __name__ == "__main__":
    sessions()
    faulted_calls()
    calls()
    batches()
    asyncio.run(at_once())

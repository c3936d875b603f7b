"""The feed: what viewers share, and what each of them gets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.page import feed as feed_module
from batchkv_gateway.page.feed import Feed, Snapshot
from batchkv_gateway.page.reading import Speeds, rounded, soonest
from batchkv_gateway.stopping import Stopping

EVERYBODY = Caller("local", True)
SECONDS = 20.0


class Source:
    """Snapshots that a test chooses, and who asked for them."""

    def __init__(self) -> None:
        self.now = Snapshot({"a": '{"n":1}'}, "[]")
        self.is_down = False
        self.asked: list[str] = []

    def read(self, caller: Caller) -> Snapshot:
        self.asked.append(caller.owner)
        if self.is_down:
            raise RedisConnectionError("down")
        return self.now


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks come fast."""
    monkeypatch.setattr(feed_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(feed_module, "QUIET_SECONDS", 0.05)


def run(test: Callable[[Source, Feed, Stopping], Awaitable[None]]) -> None:
    async def main() -> None:
        source, stopping = Source(), Stopping()
        await asyncio.wait_for(test(source, Feed(source.read, lambda: "{}", stopping), stopping),
                               SECONDS)  # fmt: skip

    asyncio.run(main())


async def event(stream: AsyncIterator[bytes], name: str) -> object:
    """The data of the next event of this name."""
    async for piece in stream:
        for one in piece.decode().split("\n\n"):
            if one.startswith(f"event: {name}\n"):
                return json.loads(one.partition("data: ")[2])
    raise AssertionError("the stream has ended")


def test_viewers_of_one_owner_share_what_is_read() -> None:
    """Ten viewers cause as many reads as one, and all get the change."""

    async def main(source: Source, feed: Feed, _: Stopping) -> None:
        streams = [feed.stream(EVERYBODY) for _ in range(10)]
        for stream in streams:
            await event(stream, "batches")
        before = len(source.asked)
        source.now = Snapshot({"b": '{"n":2}', "a": '{"n":1}'}, "[]")
        changes = [await event(stream, "batches") for stream in streams]
        assert changes == [{"order": ["b", "a"], "trouble": "", "changed": [{"n": 2}]}] * 10
        assert len(source.asked) - before <= 2
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]

    run(main)


def test_nothing_is_read_when_nobody_looks() -> None:
    """The last viewer's end is the end of reading, and the next viewer begins it again."""

    async def main(source: Source, feed: Feed, _: Stopping) -> None:
        for _ in range(2):
            stream = feed.stream(EVERYBODY)
            await event(stream, "workers")
            await stream.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
            before = len(source.asked)
            await asyncio.sleep(0.1)
            assert len(source.asked) == before > 0

    run(main)


def test_trouble_with_redis_is_told_and_ends() -> None:
    """Viewers keep what they have, read that there is trouble, and then that there is none."""

    async def main(source: Source, feed: Feed, _: Stopping) -> None:
        stream = feed.stream(EVERYBODY)
        await event(stream, "batches")
        source.is_down = True
        told = await event(stream, "batches")
        assert isinstance(told, dict) and "does not answer" in told["trouble"]
        assert told["order"] == ["a"]
        source.is_down = False
        told = await event(stream, "batches")
        assert isinstance(told, dict) and told["trouble"] == ""

    run(main)


def test_streams_end_when_the_gateway_stops() -> None:
    """A stream does not hold the gateway back."""

    async def main(_: Source, feed: Feed, stopping: Stopping) -> None:
        stream = feed.stream(EVERYBODY)
        await event(stream, "workers")
        stopping.begin()
        began = time.monotonic()
        with pytest.raises(AssertionError, match="ended"):
            await event(stream, "batches")
        assert time.monotonic() - began < feed_module.STREAM_SECONDS / 2  # not by its age

    run(main)


def test_the_time_left_follows_the_batch_where_its_workers_tell_less() -> None:
    """The sooner of two estimates, and a second at least; without a speed that of the workers."""
    item = {"ok": 50, "total": 100, "num_ended": 60, "completion_tokens": 500}
    assert soonest(item, 47.0, 100) == 4.0 and soonest(item, 2.0, 100) == 2.0
    assert soonest(item, 47.0, 1000) == 1.0
    assert soonest(item, 47.0, None) == soonest(item, 47.0, 0) == 47.0
    assert soonest({**item, "ok": 0}, 47.0, 9) == 47.0


def test_speed_and_time_left_are_rounded() -> None:
    """The speed is that of the last minute; an estimate does not change with every look."""
    speeds, item = Speeds(), {"batch_id": "a", "is_done": False, "running": 1}
    found = [speeds.of({**item, "completion_tokens": 100 * n}, 10.0 * n) for n in range(20)]
    assert found[0] is None and set(found[1:]) == {10}
    assert speeds.of({**item, "is_done": True, "completion_tokens": 0}, 300.0) is None
    assert [rounded(s) for s in (7.4, 59.6, 61.0, 64.0, 3601.0)] == [7, 60, 60, 65, 3625]

"""Wrong data in place of results: each gives one sentence, and none of it is executed."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import decode_result
from hostile.test_jobs import Evil, bomb
from hostile.traps import Trap, batchkv
from support.worker_harness import submit

MIB = 2**20


def stored(**fields: Any) -> bytes:
    """A stored result with these fields."""
    return zlib.compress(msgpack.packb({"o": "ok", "c": "c", "e": "chat", **fields}))


def nested(depth: int) -> bytes:
    """Arrays in arrays, as msgpack."""
    return b"\x91" * depth + b"\xc0"


HOSTILE: dict[str, Any] = {
    "pickle": lambda m: pickle.dumps(Evil(m)),
    "pickle, compressed": lambda m: zlib.compress(pickle.dumps(Evil(m))),
    "a bomb": lambda m: bomb(65 * MIB),
    "a bomb of nesting": lambda m: zlib.compress(nested(100_000)),
    "an array of 2**32 that is not there": lambda m: zlib.compress(b"\xdd\xff\xff\xff\xff"),
    "a text of 4 GB that is not there": lambda m: zlib.compress(b"\xdb\xff\xff\xff\xff"),
    "a map of 2**32 that is not there": lambda m: zlib.compress(b"\xdf\xff\xff\xff\xff"),
    "an extension type": lambda m: zlib.compress(msgpack.packb(msgpack.ExtType(42, b"x"))),
    "a list": lambda m: zlib.compress(msgpack.packb([1, 2])),
    "keys that are lists": lambda m: zlib.compress(b"\x81\x91\x01\x01"),
    "an outcome nobody knows": lambda m: stored(o="os.mkdir"),
    "an endpoint nobody knows": lambda m: stored(e="/etc/passwd"),
    "counts that are lists": lambda m: stored(u=[[1], [2], [3]]),
    "a count too many": lambda m: stored(u=[1, 2, 3, 4]),
    "counts that are infinite": lambda m: stored(u=[float("inf")] * 3),
    "time that is no number": lambda m: stored(a=float("nan")),
    "an error that is a number": lambda m: stored(o="failed", x=5),
    "log-probabilities that are a text": lambda m: stored(l="abc"),
    "a note that is a text": lambda m: stored(n="abc"),
    "a note of 4 GB": lambda m: stored(n=[b"", 1, 1, 1, "", 2**32, b"", b""]),
    "cut short": lambda m: stored()[:-4],
    "nothing": lambda m: b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_result_that_is_none_is_told(
    redis_connection: Redis, redis_url: str, name: str, sentinel: Trap, tmp_path: Path
) -> None:
    """`result`, `results`, `status` of the job and `results -o`: exit code 1 and one sentence."""
    batch = submit(redis_connection, ["a"])
    redis_connection.hset(redis_keys.results(batch), "1", HOSTILE[name](sentinel.mark))
    redis_connection.rpush(redis_keys.done(batch), 1)
    commands: list[list[object]] = [["result", f"{batch}-1"]]
    if name in ("pickle", "a bomb of nesting"):  # all of them read by one function
        commands += [["results", batch], ["status", f"{batch}-1"]]
        commands += [["results", batch, "-o", tmp_path / "out"], ["cache", "why", f"{batch}-1"]]
    for arguments in commands:
        found = batchkv(*arguments, url=redis_url)
        assert found.exit_code == 1, found.output
        assert found.stderr.startswith("batchkv: ") and "Traceback" not in found.output
        assert len(found.stderr.strip().splitlines()) == 1


def test_giant_numbers_in_a_result_are_printed_or_refused(
    redis_connection: Redis, redis_url: str
) -> None:
    """Counts and times of 64 bits, NaN and infinite log-probabilities give JSON all the same."""
    batch = submit(redis_connection, ["a"])
    logprobs = [("t", float("nan"), [("u", float("inf")), ("v", -float("inf"))])]
    blob = stored(u=[2**64 - 1] * 3, a=2**64 - 1, b=-(2**63), l=logprobs, t="x")
    redis_connection.hset(redis_keys.results(batch), "1", blob)
    redis_connection.rpush(redis_keys.done(batch), 1)
    redis_connection.hset(redis_keys.batch(batch), "completion_tokens", 5)
    for arguments in (["result", f"{batch}-1"], ["results", batch], ["status", batch]):
        found = batchkv(*arguments, url=redis_url)
        assert found.exit_code == 0, found.output
        assert "NaN" not in found.stdout and "Infinity" not in found.stdout


def test_a_custom_id_is_no_path(redis_connection: Redis, redis_url: str, tmp_path: Path) -> None:
    """Ids, names and models that contain paths are written into OUT, and into no other file."""
    folder = tmp_path / "work"
    folder.mkdir()
    batch = submit(redis_connection, ["a", "b"])
    for line, custom_id in enumerate(("../../../escaped", "/tmp/escaped\0x"), 1):
        blob = stored(c=custom_id, m="../m", t="../../t", w="../w", f="../f")
        redis_connection.hset(redis_keys.results(batch), str(line), blob)
        redis_connection.rpush(redis_keys.done(batch), line)
    before = sorted(tmp_path.rglob("*"))
    assert batchkv("results", batch, "-o", folder / "out", url=redis_url).exit_code == 0
    assert sorted(tmp_path.rglob("*")) == sorted([*before, folder / "out"])
    assert "../../../escaped" in (folder / "out").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "a/b", "..", "", "0123456789abcdef-0", "0123456789abcdef-01"),
        *("0123456789ABCDEF-1", "0123456789abcdef-1\n", "*", "0123456789abcdef-" + "9" * 40),
        *("\x1b[31m-1", "batchkv:batch:x", "--help\0", "${HOME}-1", "$(id)-1", "{{7*7}}-1"),
    ],
)
def test_an_id_that_is_none_is_told(redis_connection: Redis, redis_url: str, name: str) -> None:
    """The form of batch ids and job ids is checked before the server gets them."""
    before = redis_connection.info("commandstats")
    for command in ("status", "result", "results", "cancel", "retry", "wait"):
        found = batchkv(command, "--", name, url=redis_url)
        assert found.exit_code == 2, (command, found.output)
        assert "\x1b" not in found.output and "Traceback" not in found.output
    asked = redis_connection.info("commandstats").keys() - before.keys()
    assert not {name for name in asked if "keys" in name or "scan" in name}


@pytest.mark.parametrize("value", [b"", b"\x00" * 100, b"\x78\x9c", b"x" * 200])
def test_a_result_of_noise_is_a_wire_error(value: bytes) -> None:
    """For any bytes, the decoder raises its own error."""
    with pytest.raises(WireError):
        decode_result(value)

"""Commands with the URL of a gateway: the same output, exit codes and files as with Redis."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.cli import cli
from batchkv_producer.client import Client
from batchkv_producer.wire import redis_keys
from support.gateway import Gateway, running_gateway, working
from support.redis_server import RedisServer

LINES = '{"custom_id": "a", "prompt": "a"}\n{"custom_id": "b", "prompt": "b"}\n{"prompt": 3}\n'


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """One gateway for all tests."""
    home = tmp_path_factory.mktemp("gateway") / "home"
    with running_gateway(redis_server.url, home, "--max-file", "100KB") as found:
        yield found


@pytest.fixture
def urls(gateway: Gateway, redis_url: str, tmp_path: Path, monkeypatch: Any) -> tuple[str, str]:
    """The URLs of an empty Redis and of its gateway. The current folder is a new one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINES)
    return redis_url, gateway.url.removesuffix("/v1")


def run(url: str, *words: str, stdin: str | None = None) -> Result:
    """A command in this process."""
    return CliRunner().invoke(cli, [*words, "--url", url], input=stdin, prog_name="batchkv")


def both(urls: tuple[str, str], *words: str, code: int = 0) -> str:
    """The output of a command, which is the same by both ways, but for times."""
    found = [run(url, *words) for url in urls]
    texts = [
        re.sub(r'"read_at": [0-9.]+|"(used|silent)_[a-z]+": [0-9.]+|[0-9.]+ [kM]B', "", one.output)
        for one in found
    ]
    assert texts[0] == texts[1]
    assert [one.exit_code for one in found] == [code, code], found[1].output
    return found[1].output


def test_reading_commands_print_the_same(urls: tuple[str, str], redis_connection: Redis) -> None:
    """status, list, workers, wait and results print the same by both ways, also as JSON."""
    redis_url, http_url = urls
    batch = run(http_url, "submit", "in.jsonl", "-m", "fake", "--name", "mine").stdout.strip()
    assert len(batch) == 16, batch
    both(urls, "status", batch)
    both(urls, "results", batch)
    both(urls, "wait", batch, "--timeout", "0", code=6)
    with working(redis_url):
        assert run(http_url, "wait", batch).exit_code == 1
        for words in (("status", batch), ("status",), ("list",), ("list", "--limit", "1")):
            both(urls, *words)
            both(urls, *words, "--json")
        both(urls, "workers", "--json")
    assert batch in both(urls, "status", batch[:7])
    assert "a" in both(urls, "status", f"{batch}-1")
    both(urls, "wait", batch, "--json", code=1)
    for more in ((), ("--ordered",), ("--follow",), ("--errors",), ("--json",)):
        both(urls, "results", batch, *more)
    both(urls, "results", batch, "--format", "text")
    both(urls, "result", f"{batch}-1")
    both(urls, "result", f"{batch}-3", code=1)
    both(urls, "report", batch[:7], "--json")
    page = run(http_url, "report", batch, "-o", "-")
    assert page.exit_code == 0 and page.stdout.endswith("</html>\n")
    assert run(http_url, "report", batch, "--with-text").exit_code == 2
    both(urls, "status", "0123456789abcdef", code=2)
    both(urls, "status", "../workers", code=2)
    both(urls, "wait", "zz", code=2)


def test_files_of_results_are_the_same(urls: tuple[str, str], redis_connection: Redis) -> None:
    """OUT and OUT.errors.jsonl have the same bytes; a second command adds what they lack."""
    redis_url, http_url = urls
    batch = Client(redis_connection).submit(Path("in.jsonl"), model="fake").batch_id
    assert "2 have not ended yet" in run(http_url, "results", batch, "-o", "h.jsonl").output
    with working(redis_url):
        assert run(http_url, "results", batch, "-o", "h.jsonl", "--follow").exit_code == 0
    for name, more in (("r", ()), ("o", ("--ordered",)), ("t", ("--format", "text"))):
        assert run(redis_url, "results", batch, "-o", f"{name}.jsonl", *more).exit_code == 0
        assert run(http_url, "results", batch, "-o", f"{name}2.jsonl", *more).exit_code == 0
        assert Path(f"{name}.jsonl").read_bytes() == Path(f"{name}2.jsonl").read_bytes()
    for end in ("", ".errors.jsonl"):
        assert sorted(Path(f"h.jsonl{end}").read_text().splitlines()) == sorted(
            Path(f"r.jsonl{end}").read_text().splitlines()
        )


def test_a_submit_makes_the_same_batch(urls: tuple[str, str], redis_connection: Redis) -> None:
    """Options, several files and standard input reach the queue as they do by Redis."""
    redis_url, http_url = urls
    Path("more.txt").write_text("c\nd\n")
    options = (
        *("-m", "fake", "--temperature", "0.5", "--stop", "ü\n", "--system", "Be kurz. 100 %"),
        *("--priority", "high", "--keep", "7d", "--max-tokens", "9", "--seed", "3"),
    )
    first = run(http_url, "submit", "in.jsonl", "more.txt", *options)
    again = run(redis_url, "submit", "in.jsonl", "more.txt", *options)
    assert first.exit_code == again.exit_code == 1
    assert first.stdout == again.stdout and "joined a batch of 5 rows" in again.stderr
    assert "queued 4 of 5 rows" in first.stderr and "in.jsonl:3" in first.stderr
    ids = run(http_url, "submit", "more.txt", "-m", "fake", "--ids").stdout.split()
    assert len(ids) == 2 and ids[0].endswith("-1")
    piped = [run(u, "submit", "-", "-m", "fake", stdin=LINES).stdout for u in reversed(urls)]
    assert piped[0] == piped[1]
    mended = run(http_url, "submit", "more.txt", "-m", "fake", "--from", piped[0].strip()).output
    assert f"no answer of batch {piped[0].strip()} can be kept" in mended
    assert "neither" not in run(http_url, "submit", "in.jsonl", "-m", "x", "--expires", "8h").output
    for words, text in (
        (("in.jsonl", "-m", "x", "--adapter", "a=/tmp"), "Give the name alone"),
        (("in.jsonl",), "model"),
        (("none.jsonl", "-m", "x"), "does not exist"),
        (("in.jsonl", "-m", "x", "--system", "a" * 20_000), "too long for HTTP"),
    ):
        refused = run(http_url, "submit", *words)
        assert refused.exit_code == 2 and text in refused.output, refused.output
    Path("large.jsonl").write_text('{"prompt": "' + "a" * 100_001 + '"}\n')
    refused = run(http_url, "submit", "large.jsonl", "-m", "x")
    assert refused.exit_code == 2 and "larger than 100,000 bytes" in refused.output


def test_rows_are_canceled_retried_and_forgotten(
    urls: tuple[str, str], redis_connection: Redis
) -> None:
    """cancel, retry, retry --from, failed and forget say what they say by Redis."""
    _, http_url = urls
    batch = run(http_url, "submit", "in.jsonl", "-m", "fake").stdout.strip()
    assert "1 row was canceled" in run(http_url, "cancel", f"{batch}-1").output
    assert "1 row was canceled" in run(http_url, "cancel", batch).output
    assert "no row was canceled" in both(urls, "cancel", batch)
    assert "2 rows are canceled" in both(urls, "retry", batch)
    printed = both(urls, "failed", batch, "--canceled", code=1)
    assert '{"custom_id": "a", ' in printed and '{"custom_id": "b", ' in printed
    assert "1 row is wrong in the input" in printed and "printed 2 rows" in printed
    assert "printed 0 rows" in both(urls, "failed", batch, code=1)
    redis_connection.delete(redis_keys.job(f"{batch}-1"))
    assert "1 row was queued" in run(http_url, "retry", batch, "--canceled").output
    found = run(http_url, "retry", batch, "--canceled", "--from", "in.jsonl")
    assert "1 row was queued" in found.output, found.output
    Path("other.jsonl").write_text("{}\n")
    found = run(http_url, "retry", batch, "--from", "other.jsonl")
    assert found.exit_code == 2 and "other.jsonl with these generation flags" in found.output
    assert "nothing was deleted" in run(http_url, "forget", batch).output.lower()
    assert f"deleted batch {batch} with 3 rows" in run(http_url, "forget", batch, "--yes").output
    both(urls, "status", batch, code=2)
    assert "no batch on this server fits" in both(urls, "forget", "--all-done", "--yes")


def test_other_commands_name_the_url_that_they_need(
    urls: tuple[str, str], gateway: Gateway
) -> None:
    """A command that needs Redis says so in a sentence, and so do flags for workers."""
    http_url = urls[1]
    for words in (("top", "--once"), ("ask", "-m", "m", "hi"), ("keys", "list")):
        found = run(http_url, *words)
        assert found.exit_code == 2 and "needs the Redis URL" in found.output, found.output
    for flag in (("--workers", "2"), ("--slots", "4"), ("--trace", "t")):
        found = run(http_url, "run", "in.jsonl", "-m", "fake", *flag)
        assert found.exit_code == 2 and "this machine starts no worker" in found.output


def test_a_run_by_a_gateway_writes_the_same_files(
    urls: tuple[str, str], redis_connection: Redis
) -> None:
    """run starts no worker, follows, and writes OUT; again it is finished; OUT of another batch is
    refused before rows are queued; a mended file keeps answers."""
    redis_url, http_url = urls
    with working(redis_url):
        found = run(http_url, "run", "in.jsonl", "-m", "fake", "-o", "out.jsonl")
        assert found.exit_code == 1 and "this machine starts none" in found.output
        assert "3 = 2 ok + 1 failed" in found.output
        again = run(http_url, "run", "in.jsonl", "-m", "fake", "-o", "out.jsonl")
        assert "is finished, nothing is computed" in again.output
        printed = run(http_url, "run", "in.jsonl", "-m", "fake", "-o", "-")
        assert len(printed.stdout.splitlines()) == 3
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == ["a", "b"]
    batch = rows[0]["id"][:16]
    other = run(redis_url, "run", "in.jsonl", "-m", "other", "-o", "out.jsonl", "--workers", "0")
    Path("other.jsonl").write_text('{"prompt": "z"}\n')
    refused = [
        run(url, "run", "other.jsonl", "-m", "fake", "-o", "out.jsonl", *more)
        for url, more in ((redis_url, ("--workers", "0")), (http_url, ()))
    ]
    assert refused[0].exit_code == refused[1].exit_code == 2 and "batch" in other.output
    assert refused[0].output == refused[1].output, refused[1].output
    assert Client(redis_connection).count_batches() == 1
    assert batch in refused[1].output
    Path("foreign.jsonl").write_text("not a result\n")
    foreign = run(http_url, "run", "in.jsonl", "-m", "fake", "-o", "foreign.jsonl")
    assert foreign.exit_code == 2 and Path("foreign.jsonl").read_text() == "not a result\n"


def test_a_key_is_needed_where_there_is_one(
    urls: tuple[str, str], redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key, with a wrong one, and with one in the URL there is a sentence each."""
    http_url = urls[1]
    key = KeyStore(redis_connection).add("laptop")
    needed = run(http_url, "list")
    assert needed.exit_code == 3 and "needs a key: ask its operator for one," in needed.output
    monkeypatch.setenv("BATCHKV_API_KEY", key)
    batch = run(http_url, "submit", "in.jsonl", "-m", "fake").stdout.strip()
    assert batch in run(http_url, "list").output and len(batch) == 16
    monkeypatch.setenv("BATCHKV_API_KEY", key[:-1] + "x")
    refused = run(http_url, "list")
    assert (
        refused.exit_code == 3
        and "refuses the key in BATCHKV_API_KEY: ask its operator for another" in refused.output
    )
    named = run(http_url.replace("//", f"//{key}@"), "list")
    assert named.exit_code == 2 and "Put the key into BATCHKV_API_KEY" in named.output
    assert key not in named.output

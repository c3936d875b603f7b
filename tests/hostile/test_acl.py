"""The users of deploy/hub: each does all of its work, and none gets beyond it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from batchkv_cache_store.errors import TierMisconfigured
from batchkv_cache_store.lease import RedisLeases
from batchkv_cache_store.opening import open_store, open_tiers, parse_tiers
from batchkv_cache_store.tiers.redis import RedisTier
from batchkv_producer.local.presence import Presence, reclaim_dead
from batchkv_producer.manage import forget as forgetting
from batchkv_producer.server.home import Home
from batchkv_producer.wire import redis_keys, suspects
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import encode_result
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transitions import JobLease, JobResult, Transitions
from batchkv_worker.queue.maintenance import Maintenance
from batchkv_worker.queue.redis_side import RedisSide
from batchkv_worker.settings import WorkerSettings
from cache_store.blocks import encoded, make_block
from hostile.traps import batchkv
from support.hub import HUB_SOURCE, Hub, running_hub
from support.worker_harness import (
    MODEL,
    QUEUE,
    WorkerProcess,
    counts_of,
    num_ended,
    results_of,
    wait_until,
    workers,
)

PATIENCE = 60.0  # seconds; a busy machine is slow at times
PROMPTS = (
    "\n".join(f'{{"prompt": "p{i}"}}' for i in range(4)) + '\n{"prompt": "slow:1000000"}\n{}\n'
)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """The hub's servers on its own configurations and users."""
    with running_hub(HUB_SOURCE) as found:
        yield found


def test_each_role_does_all_its_work(hub: Hub, tmp_path: Path) -> None:
    """A batch from submit to retry with the producer's URL; a real worker with the worker's."""
    source, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    source.write_text(PROMPTS)
    url = hub.url("producer")

    def ok(*arguments: object, code: int = 0) -> str:
        found = batchkv(*arguments, url=url)
        assert found.exit_code == code, (arguments, found.output)
        return found.stdout.strip()

    batch = ok("submit", source, "-m", MODEL, code=1)
    assert ok("submit", source, "-m", MODEL, code=1) == batch
    settings: dict[str, object] = {"HEARTBEAT_SECONDS": 0.1, "LEASE_SECONDS": 60}
    settings |= {"MAINTENANCE_SECONDS": 0.1, "DRAIN_SECONDS": 0, "SLOTS": 8}
    log = tmp_path / "log"
    plan: dict[str, object] = {"step_seconds": 0.001}
    worker = WorkerProcess(hub.url("worker"), log, settings=settings, plan=plan)
    with workers(worker), hub.connect("admin") as admin:
        wait_until(lambda: num_ended(admin, batch) == 5, PATIENCE)
        ok("status")
        assert "served by" in ok("status", batch)
        assert ok("status", f"{batch}-5", "--json").count('"running"') == 1
        ok("list")
        assert "busy" in ok("workers")
        ok("result", f"{batch}-1")
        ok("cancel", batch)
        ok("retry", batch, "--canceled")
        wait_until(lambda: admin.hget(f"rq:job:{batch}-5", "status") == b"started", PATIENCE)
        # A lease that lapsed, for the maintenance to take back.
        admin.zadd(redis_keys.registry("wip", QUEUE), {f"{batch}-9:x": 1})
        wait_until(
            lambda: not admin.zscore(redis_keys.registry("wip", QUEUE), f"{batch}-9:x"), PATIENCE
        )
        ok("cancel", f"{batch}-5")
        ok("wait", batch, code=1)
        ok("results", batch, "--ordered", "-o", out)
        worker.process.terminate()
        assert worker.wait(PATIENCE) == 0
        assert counts_of(admin, batch)["running"] == 0
        assert not admin.zcard(redis_keys.registry("wip", QUEUE))
        found = results_of(admin, batch)
    outcomes = [row.outcome for _, row in sorted(found.items())]
    assert outcomes == ["ok"] * 4 + ["canceled", "failed"]
    assert "NOPERM" not in log.read_text() and "Traceback" not in log.read_text()


def test_duplicates_and_terms_need_no_further_rights(hub: Hub, tmp_path: Path) -> None:
    """Duplicates, a deadline, an urgent batch and a leader that is canceled, each with its role."""
    source, url = tmp_path / "duplicates.jsonl", hub.url("producer")
    line = '{"prompt": "same", "temperature": 0, "max_tokens": 4}\n'
    source.write_text(line * 4)
    terms = ("--dedupe", "--priority", "high", "--expires", "8h", "--keep", "1d")
    found = batchkv("submit", source, "-m", MODEL, *terms, url=url)
    assert found.exit_code == 0, found.output
    batch = found.stdout.strip()
    found = batchkv("cancel", f"{batch}-1", url=url)
    assert found.exit_code == 0, found.output
    log = tmp_path / "log"
    settings: dict[str, object] = {"HEARTBEAT_SECONDS": 0.1, "MAINTENANCE_SECONDS": 0.1}
    settings |= {"LEASE_SECONDS": 60, "DRAIN_SECONDS": 0}
    worker = WorkerProcess(hub.url("worker"), log, settings=settings, plan={"step_seconds": 0.001})
    with workers(worker), hub.connect("admin") as admin:
        wait_until(lambda: num_ended(admin, batch) == 4, PATIENCE)
        assert batchkv("status", batch, url=url).exit_code == 0
        outcomes = [row.outcome for _, row in sorted(results_of(admin, batch).items())]
        assert outcomes == ["canceled", "ok", "ok", "ok"]
        found = batchkv("retry", batch, "--canceled", url=url)
        assert found.exit_code == 0, found.output
        wait_until(lambda: num_ended(admin, batch) == 4, PATIENCE)
        assert results_of(admin, batch)[1].outcome == "ok"
    assert "NOPERM" not in log.read_text() and "permission" not in log.read_text()


def test_forgetting_needs_no_further_rights(hub: Hub, tmp_path: Path) -> None:
    """A producer forgets its batch and sees what is large; a worker ends what was cut off."""
    source, url = tmp_path / "forgotten.jsonl", hub.url("producer")
    source.write_text('{"prompt": "of a model that nobody has"}\n' * 3)

    def submit() -> str:
        found = batchkv("submit", source, "-m", "another", url=url)
        assert found.exit_code == 0, found.output
        return found.stdout.strip()

    batch, queue = submit(), redis_keys.queue_name("another")
    assert f"{batch} (" in batchkv("status", url=url).stdout  # with what it holds
    found = batchkv("forget", batch, "--yes", url=url)
    assert found.exit_code == 0, found.output
    assert submit() == batch
    with hub.connect("producer") as producer, hub.connect("worker") as connection:
        forgetting._step(producer, batch, queue, "mark")
        Maintenance(connection, queue, "w").run(1)
        assert not producer.exists(redis_keys.batch(batch), redis_keys.job(f"{batch}-1"))
        assert producer.zscore(redis_keys.BATCHES, batch) is None


def test_remembered_answers_need_no_further_rights(hub: Hub, tmp_path: Path) -> None:
    """A worker remembers and finds answers; a producer uses and forgets them, and forges none."""
    source, url, log = tmp_path / "reused.jsonl", hub.url("producer"), tmp_path / "log"

    def ok(*arguments: object) -> str:
        found = batchkv(*arguments, url=url)
        assert found.exit_code == 0, (arguments, found.output)
        return found.stdout.strip()

    def submit(*prompts: str) -> str:
        source.write_text("".join(f'{{"prompt": "{each}", "seed": 1}}\n' for each in prompts))
        return ok("submit", source, "-m", MODEL, "--reuse")

    settings: dict[str, object] = {"HEARTBEAT_SECONDS": 0.1, "LEASE_SECONDS": 60}
    plan: dict[str, object] = {"fingerprint": "a" * 32}
    worker = WorkerProcess(hub.url("worker"), log, settings=settings, plan=plan)
    with workers(worker), hub.connect("admin") as admin:
        first = submit("ra", "rb")
        wait_until(lambda: num_ended(admin, first) == 2, PATIENCE)
        second = submit("ra", "rb", "rc")
        wait_until(lambda: num_ended(admin, second) == 3, PATIENCE)
        assert "2 reused" in ok("status", second)
        with hub.connect("producer") as producer:
            (entry,) = producer.lrange(f"batchkv:reuse:of:{second}", 0, -1)
            key = entry.decode().partition(":")[0]
            script = "return redis.call('SET', KEYS[1], ARGV[1])"
            digest = producer.script_load(script)
            with pytest.raises(ResponseError, match=r"(?i)ACL failure|NOPERM|permission"):
                producer.evalsha(digest, 1, f"batchkv:reuse:a:{key}", "-forged")
        ok("forget", first, second, "--yes")
        assert not admin.keys("batchkv:reuse:*")
    assert "NOPERM" not in log.read_text() and "Traceback" not in log.read_text()


def test_a_mended_file_and_failed_rows_need_no_further_rights(hub: Hub, tmp_path: Path) -> None:
    """A producer keeps an earlier batch's answers, prints failed rows, and makes lost ones anew."""
    first, mended, url = tmp_path / "first.jsonl", tmp_path / "mended.jsonl", hub.url("producer")
    lines = ['{"prompt": "a", "max_tokens": 2}\n', '{"prompt": "b", "max_tokens": 2}\n']
    first.write_text("".join(lines))
    mended.write_text("".join(lines) + '{"prompt": "c"}\n')

    def ok(*arguments: object) -> str:
        found = batchkv(*arguments, url=url)
        assert found.exit_code == 0, (arguments, found.output)
        return f"{found.stdout.strip()} {found.stderr}"

    batch = ok("submit", first, "-m", "third").split()[0]
    queue, maker = redis_keys.queue_name("third"), Maker("a" * 32, "affine8", "half")
    with hub.connect("worker") as connection, hub.connect("admin") as admin:
        moves = Transitions(connection)
        jobs = moves.pull_run(queue, "w", 2, 60, maker=maker).jobs
        results = [encode_result(RowResult("x", "completion", end)) for end in ("failed", "ok")]
        endings = [
            JobResult(job.lease, end, result)
            for job, end, result in zip(jobs, ("failed", "ok"), results, strict=True)
        ]
        assert moves.finish(queue, "w", endings, maker=maker) == ["ok", "ok"]
        failed_line = int(jobs[0].lease.job_id.split("-")[1])
        told = ok("submit", mended, "-m", "third", "--from", batch)
        assert f"kept 1 answer of batch {batch}" in told
        assert "1 row of batch" in ok("failed", batch)
        admin.delete(redis_keys.job(f"{batch}-{failed_line}"))
        assert "1 row was queued again" in ok("retry", batch, "--from", first)


def test_a_stopped_worker_gives_back_and_reaps_with_its_rights(hub: Hub) -> None:
    """give_back, reap, renew and settle as a worker; none of them is refused."""
    with hub.connect("worker") as connection, hub.connect("producer") as producer:
        moves, queue = Transitions(connection), "batchkv:other"
        sender = Transitions(producer)
        sender.create("ab" * 8, {"digest": "0", "total": 2, "num_chunks": 1, "queue": queue})
        sender.submit("ab" * 8, queue, 0, [(1, b"x", 0), (2, b"x", 0)], [], 60)
        held = [row.lease for row in moves.pull(queue, "w", 2, 60)]
        assert moves.renew(queue, "w", held, 60, 60) == {}
        assert moves.give_back(queue, held[:1], died=True) == 1
        assert moves.reap(queue, dead_worker="w") == (1, 0)
        run = moves.pull_run(queue, "w", 2, 60, num_begin=0, knows_suspects=True)
        assert (run.jobs, run.num_passed) == ([], 2)
        held = [row.lease for row in moves.pull(queue, "w", 2, 60, num_begin=0)]
        assert moves.finish(queue, "w", [], held) == []
        assert moves.give_back(queue, held) == 2
        assert moves.settle(queue, "failed", [(f"{'ab' * 8}-1", b"")]) == [""]
        sender.sweep(queue, "ab" * 8)


def test_a_worker_looks_after_suspects_and_dead_neighbours_with_its_rights(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emptying itself for suspects, signing off a dead worker; a producer may count suspects."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    queue = "batchkv:apart"
    with hub.connect("worker") as connection, hub.connect("producer") as producer:
        side = RedisSide(
            *(connection, queue, "w", WorkerSettings(model=MODEL)),
            register=lambda: None,
            set_state=lambda state: None,
        )
        assert side.claim_suspects() and not side.claim_suspects()
        assert not side.is_next_suspect()
        side.release_suspects()
        assert side.claim_suspects()
        connection.sadd("rq:workers", redis_keys.worker("dead"))
        Presence(connection, "dead", queue, 15.0)
        (record,) = (tmp_path / "home" / "workers").iterdir()
        record.write_text(record.read_text().replace('"started": "', '"started": "no '))
        assert reclaim_dead(connection, Home(tmp_path / "home")) == 0
        assert not record.exists()
        assert redis_keys.worker("dead").encode() not in connection.smembers("rq:workers")
        assert suspects.count_waiting(producer, queue) == 0


REFUSED = {
    "producer": [
        *("FLUSHALL", "FLUSHDB", "CONFIG GET *", "KEYS *", "SCAN 0", "ACL LIST", "SHUTDOWN"),
        *("MONITOR", "SAVE", "REPLICAOF a 1", "CLIENT LIST", "CLIENT KILL a:1"),
        *("GET rq:job:x", "SET other 1", "HSET other a 1", "HGETALL other", "SUBSCRIBE secret"),
        *("PUBLISH other x", "LPOP rq:queue:q", "BLMOVE rq:queue:q rq:queue:q LEFT LEFT 1"),
        *("HSET rq:worker:w state x", "SADD rq:workers rq:worker:w", "DEL rq:workers"),
        *("ZADD rq:wip:q 1 a", "LPOP batchkv:done:x", "SET batchkv:lock:q w"),
        *("SET rq:suspended 1", "EVAL return 1 0", "FUNCTION LIST", "MODULE LIST"),
        "SUBSCRIBE rq:pubsub:w",
        *("SET batchkv:reuse:a:k x", "GET batchkv:reuse:a:k", "RPUSH batchkv:reuse:of:b k"),
        *(
            "ZADD batchkv:reuse:order 1 k",
            "EXPIRE batchkv:reuse:a:k 9",
            "HSET batchkv:reuse:a:k a b",
        ),
    ],
    "worker": [
        *("FLUSHALL", "CONFIG SET maxmemory 1", "KEYS *", "SCAN 0", "ACL WHOAMI", "SHUTDOWN"),
        *("MONITOR", "REPLICAOF a 1", "CLIENT KILL a:1", "GET other"),
        *("ZADD batchkv:batches 1 x", "DEL batchkv:batches", "SET rq:suspended 1"),
        *("PUBLISH rq:pubsub:w x", "SUBSCRIBE other", "EVAL return 1 0", "HSET other a 1"),
    ],
    "admin": ["FLUSHALL", "FLUSHDB", "MODULE LIST", "REPLICAOF a 1"],
    "cache": [
        *("FLUSHALL", "CONFIG GET *", "KEYS *", "SET other 1", "GET other", "ACL LIST"),
        *("HSET batchkv-block:1:x a 1", "DEL batchkv:batches", "SET rq:queues 1", "MONITOR"),
        *("EVAL return 1 0", "CLIENT LIST", "PUBLISH a b"),
    ],
}


@pytest.mark.parametrize("role", REFUSED)
def test_what_a_role_should_not_have_is_refused(hub: Hub, role: str) -> None:
    """Every command and key beyond a role's own is refused by the server itself."""
    with hub.connect(role) as connection:
        for line in REFUSED[role]:
            with pytest.raises(NoPermissionError):
                connection.execute_command(*line.split())


def test_a_script_has_no_more_rights_than_its_user(hub: Hub) -> None:
    """What a role may not do, no script that it sends in does for it."""
    forbidden = "return redis.call('SET', KEYS[1], 'x')"
    with hub.connect("worker") as connection:
        digest = connection.script_load(forbidden)
        with pytest.raises(ResponseError, match=r"(?i)ACL failure|NOPERM|permission"):
            connection.evalsha(digest, 1, "other")
        # Nor when it does not say beforehand which key it is going to use.
        hidden = connection.script_load("return redis.call('SET', 'rq:suspended', 'x')")
        with pytest.raises(ResponseError, match=r"(?i)ACL failure|NOPERM|permission"):
            connection.evalsha(hidden, 0)
    with hub.connect("admin") as connection:
        assert not connection.exists("rq:suspended", "other")


def test_a_producer_takes_no_leases_and_ends_no_job_it_was_not_given(hub: Hub) -> None:
    """Neither pull nor finish as a producer; what it can do all the same is in SECURITY.md."""
    with hub.connect("producer") as connection:
        moves = Transitions(connection)
        sent = {"digest": "0", "total": 1, "num_chunks": 1, "queue": "batchkv:q"}
        moves.create("cd" * 8, sent)
        moves.submit("cd" * 8, "batchkv:q", 0, [(1, b"x", 0)], [], 60)
        with pytest.raises(ResponseError):
            moves.pull("batchkv:q", "w", 1, 60)
        connection.hset(f"rq:job:{'cd' * 8}-1", "bkv_exec", "e")
        with pytest.raises(ResponseError):
            moves.finish(
                "batchkv:q", "w", [JobResult(JobLease(f"{'cd' * 8}-1", "e"), "ok", b"forged")]
            )


def test_an_unnamed_user_gets_nothing(hub: Hub) -> None:
    """Without a name and a password even PING is refused; the health check may do that alone."""
    for port in hub.ports.values():
        with Redis(port=port, retry=Retry(NoBackoff(), 0)) as nobody, pytest.raises(RedisError):
            nobody.ping()
        health = Redis(port=port, username="health", password="any", retry=Retry(NoBackoff(), 0))
        with health:
            assert health.ping()
            with pytest.raises(NoPermissionError):
                health.get("rq:job:x")


def test_a_refusal_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    """A command with the wrong role's URL is one sentence: what was refused, and which to use."""
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "another"}\n')
    found = batchkv("submit", source, "-m", MODEL, url=hub.url("worker"))
    assert found.exit_code == 3
    assert "does not let its user worker do that (NOPERM)" in found.stderr
    assert "For these use the hub's producer.url" in found.stderr
    assert "deploy/hub/setup.sh" in found.stderr
    log = tmp_path / "log"
    worker = WorkerProcess(
        hub.url("producer"), log, "--burst", command=(sys.executable, "-m", "support.fake_engine")
    )
    with workers(worker):
        assert worker.wait(PATIENCE) == 3
    assert "NOPERM" in worker.said and "A worker needs the hub's worker.url" in worker.said
    assert "Traceback" not in worker.said
    for text in (found.output, worker.said):
        for role in ("worker", "producer"):
            assert (hub.folder / "secrets" / "passwords" / f"queue-{role}").read_text() not in text


def test_run_with_a_producers_url_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    """It may queue rows and run no worker: said before a row is queued or a worker started."""
    source = tmp_path / "mine.jsonl"
    source.write_text('{"prompt": "run with the wrong URL"}\n')
    found = batchkv("run", source, "-m", "demo", url=hub.url("producer"))
    assert found.exit_code == 3
    assert found.stderr.count("\n") == 1 and "does not let this user run workers" in found.stderr
    assert "batchkv submit" in found.stderr and "Traceback" not in found.stderr
    batch = batchkv("submit", source, "--dry-run", "-m", "demo", "--json", url=hub.url("producer"))
    with hub.connect("admin") as admin:
        assert admin.zscore(redis_keys.BATCHES, json.loads(batch.stdout)["batch_id"]) is None
    asked = batchkv("ask", "hello", "-m", "nobody/serves-this", url=hub.url("producer"))
    assert asked.exit_code == 3 and asked.stderr.count("\n") == 1
    assert "`batchkv ask` can start one with the admin's URL only" in asked.stderr


def test_the_cache_user_does_all_that_a_tier_and_leases_do(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """Put, find, fetch, list, delete, count and leases with the cache user's URL."""
    url = hub.url("cache")
    block = make_block()
    name = f"{block.key.hex()}.kv"
    tier = RedisTier(url)
    tier.check()
    assert str(tier.put(name, [encoded(block)])) == "stored" or tier.contains_many([name])
    assert tier.get_many([name]) == {name: encoded(block)}
    assert tier.get_heads([name], 8)[name] == encoded(block)[:8]
    assert [entry.name for entry in tier.iter_names()] == [name]
    assert tier.stats().num_blocks == 1
    tier.delete(name)
    assert tier.contains_many([name]) == {}
    tier.close()
    leases, others = RedisLeases(url), RedisLeases(url)
    try:
        lease = leases.acquire(b"k" * 32)
        assert lease is not None and others.acquire(b"k" * 32) is None
        leases._renew([lease])
        assert not lease.is_lost
        leases.release(lease)
        assert others.acquire(b"k" * 32) is not None
    finally:
        leases.close()
        others.close()
    open_store(url).close(1)
    assert "leases hold in this process only" not in caplog.text  # what a refusal would say


def test_the_queues_url_is_no_cache(hub: Hub) -> None:
    """A tier with a user that may not have it says so, and which server refused."""
    for tier in open_tiers(parse_tiers(hub.url("producer"))):
        with pytest.raises(TierMisconfigured, match=r"refuses the|holds a queue|no memory limit"):
            tier.check()
        tier.close()


def test_no_password_is_an_argument(tmp_path: Path) -> None:
    """While setup.sh makes a hub, every process that it starts is seen, and none has a password."""
    trace = tmp_path / "trace"
    script = f"set -x; exec 9>{trace}; BASH_XTRACEFD=9; . {HUB_SOURCE}/setup.sh"
    subprocess.run(
        ["bash", "-c", f"set -- {tmp_path}/hub studio.local; {script}", f"{HUB_SOURCE}/setup.sh"],
        check=True,
        capture_output=True,
    )
    passwords = [p.read_text() for p in (tmp_path / "hub" / "secrets" / "passwords").iterdir()]
    assert len(passwords) == 5
    # What the shell does itself starts no process.
    own = (" printf ", " [ ", " read ")
    lines = [line.lstrip("+") for line in trace.read_text().splitlines()]
    assert any(line.startswith(" awk ") for line in lines)
    for line in lines:
        if not line.startswith(own):
            assert not any(password in line for password in passwords), line

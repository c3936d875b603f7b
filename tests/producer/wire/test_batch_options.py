"""Priority, deadline, dedupe and keep: what a submit may ask for, on a real server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from batchkv_producer import Client, ExpiredError
from batchkv_producer.errors import BatchkvError, UsageError, WireError
from batchkv_producer.manage import reconcile
from batchkv_producer.monitor.status import read_batch
from batchkv_producer.order.duplicates import can_have_duplicates, request_digest
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys, transitions
from batchkv_producer.wire.batch_options import (
    NEVER,
    BatchOptions,
    Deadline,
    deadline_of,
    seconds_of,
)
from batchkv_producer.wire.job import (
    Request,
    Result,
    SamplingParams,
    decode_job,
    decode_result,
    encode_result,
)
from batchkv_producer.wire.stamp import unstamped
from batchkv_producer.wire.transitions import MAX_DEATHS, JobResult, Pulled, Transitions

Write = Callable[..., Path]
MODEL = "demo"
QUEUE = redis_keys.queue_name(MODEL)
LIVE_MOMENT = 4_000_000_000  # far in the future


class Desk:
    """Batches of one model, and a worker that does what it is told."""

    def __init__(self, connection: Redis, write: Write) -> None:
        self.connection, self.write = connection, write
        self.client, self.moves = Client(connection), Transitions(connection)
        self.num_late = 0

    def submit(self, *rows: Any, name: str = "in.jsonl", **options: Any) -> Submitted:
        lines = [{"prompt": r} if isinstance(r, str) and r != "{" else r for r in rows]
        return self.client.submit(
            self.write(*lines, name=name), model=MODEL, options=BatchOptions(**options)
        )

    def pull(self, count: int = 100, num_workers: int = 1) -> list[Pulled]:
        return self.moves.pull_run(QUEUE, "w", count, 60, num_workers).jobs

    def end(self, pulled: list[Pulled], outcome: str = "ok") -> None:
        endings = []
        for row in pulled:
            request = decode_job(row.data)
            error = None if outcome == "ok" else ("engine_error", "it broke")
            text = f"to {request.prompt}"
            result = Result(request.custom_id, request.endpoint, outcome, text=text, error=error)  # type: ignore[arg-type]
            endings.append(JobResult(row.lease, outcome, encode_result(result), 10, 5, 3, 7))
        self.moves.finish(QUEUE, "w", endings)

    def late(self, batch: str) -> None:
        """Let the batch's deadline be past."""
        self.num_late += 1  # another deadline each time
        self.connection.hset(redis_keys.batch(batch), "expires", self.num_late)

    def outcomes(self, batch: str) -> dict[int, str]:
        return {row.line: row.result.outcome for row in self.client.results(batch)}

    def codes(self, batch: str) -> dict[int, str]:
        rows = self.client.results(batch)
        return {row.line: row.result.error[0] for row in rows if row.result.error}

    def job(self, batch: str, line: int) -> bytes:
        return self.connection.hget(f"rq:job:{batch}-{line}", "status") or b"none"

    def check_books(self, batch: str) -> None:
        """What the counters say is what is there, row by row, in one look at everything."""
        status = self.client.status(batch)
        lines = range(1, status.last_line + 1)
        states = {n: self.job(batch, n) for n in lines}
        results = self.outcomes(batch)
        assert status.num_results == status.num_ended == len(results)
        assert (status.ok, status.failed, status.canceled) == tuple(
            list(results.values()).count(name) for name in ("ok", "failed", "canceled")
        )
        open_lines = [n for n in lines if n not in results]
        assert status.running == sum(states[n] == b"started" for n in open_lines)
        assert status.queued == sum(states[n] in (b"queued", b"deferred") for n in open_lines)


@pytest.fixture
def desk(redis_connection: Redis, write_lines: Write) -> Desk:
    return Desk(redis_connection, write_lines)


def lines_of(pulled: list[Pulled]) -> list[str]:
    return [decode_job(row.data).prompt or "" for row in pulled]


def same(*names: str, text: str = "q", **params: Any) -> list[dict[str, Any]]:
    """Rows that ask for the same, under these ids."""
    said = {"temperature": 0, **params}
    return [{"custom_id": name, "prompt": text, **said} for name in names]


# ---- words ----


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800),
        ("8h", 28800),
        ("2d", 172800),
        ("90s", 90),
        ("1d12h", 129600),
        (" 1W ", 604800),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    """Numbers with units, also several."""
    assert seconds_of(text) == seconds
    assert deadline_of(text) == Deadline(in_seconds=seconds)


@pytest.mark.parametrize("text", ["", "8", "h", "0h", "-1h", "8 h", "1y", "9" * 12 + "s", "8h?"])
def test_what_is_no_duration(text: str) -> None:
    """Refused by name, with an example."""
    with pytest.raises(ValueError, match="8h"):
        seconds_of(text)


def test_a_time_in_iso() -> None:
    """With its zone or in this machine's; one that is past is refused."""
    assert deadline_of("2096-10-02T07:06:40Z") == Deadline(at=LIVE_MOMENT)
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(LIVE_MOMENT))
    assert deadline_of(local) == Deadline(at=LIVE_MOMENT)
    with pytest.raises(ValueError, match="is past"):
        deadline_of("2001-01-01")
    with pytest.raises(ValueError, match="neither a duration"):
        deadline_of("tomorrow")


def test_wrong_terms_are_refused(desk: Desk) -> None:
    """Before anything is queued."""
    with pytest.raises(UsageError, match="priority"):
        BatchOptions(priority="urgent")
    with pytest.raises(UsageError, match="keep"):
        BatchOptions(keep_seconds=0)
    with pytest.raises(UsageError, match="is past"):
        desk.submit("a", expires=Deadline(at=5))
    assert desk.client.list_batches() == []


def test_a_batch_that_is_there_keeps_its_terms(desk: Desk) -> None:
    """Joining changes nothing, and says what stays."""
    first = desk.submit("a", priority="low")
    assert first.notes == ()
    again = desk.submit("a", priority="high", expires=Deadline(60), keep_seconds=9, dedupe=True)
    assert again.batch_id == first.batch_id
    assert [note.split()[1] for note in again.notes] == ["priority", "deadline", "was", "results"]
    status = desk.client.status(first.batch_id)
    assert (status.priority, status.expires, status.keep_seconds) == ("low", 0, 0)


# ---- priority ----


def test_high_before_normal_before_low(desk: Desk) -> None:
    """Whatever came first; each pull takes rows of one priority, in their order."""
    desk.submit("l1", "l2", name="l", priority="low")
    desk.submit("n1", "n2", name="n")
    desk.submit("h1", "h2", name="h", priority="high")
    taken = [lines_of(desk.pull()) for _ in range(4)]
    assert taken == [["h1", "h2"], ["n1", "n2"], ["l1", "l2"], []]


def test_nobody_takes_all_that_is_high(desk: Desk) -> None:
    """Of high rows a worker takes an equal share, so that all work on them."""
    desk.submit(*(f"h{n}" for n in range(9)), priority="high")
    desk.submit("n1", name="n")
    assert [len(desk.pull(100, num_workers=3)) for _ in range(6)] == [3, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_what_comes_back_goes_to_its_own_head(desk: Desk, priority: str) -> None:
    """Given back, reaped, retried: the list is that of the batch's priority."""
    batch = desk.submit("a", "b", "c", priority=priority).batch_id
    key = redis_keys.waiting(QUEUE, priority)
    ids = [f"{batch}-{n}".encode() for n in (1, 2, 3)]
    desk.moves.give_back(QUEUE, [row.lease for row in desk.pull(2)])
    assert desk.connection.lrange(key, 0, -1) == ids
    desk.pull(2)
    assert desk.moves.reap(QUEUE, "w") == (2, 0)
    assert desk.connection.lrange(key, 0, -1) == ids
    desk.end(desk.pull(1), "failed")
    assert desk.client.retry(batch) == 1
    assert desk.connection.lrange(key, 0, -1) == [*ids[1:], ids[0]]
    assert desk.client.cancel(f"{batch}-2") == 1
    assert desk.client.cancel(batch) == 2
    assert desk.connection.exists(key) == 0
    desk.check_books(batch)


def test_rq_sees_the_lists(desk: Desk) -> None:
    """RQ's tools know them as queues and count what waits in each."""
    desk.submit("a", "b", priority="high")
    desk.submit("c", name="n")
    queues = Queue.all(connection=desk.connection, serializer=JSONSerializer)
    assert {queue.name: queue.count for queue in queues} == {QUEUE: 1, f"{QUEUE}:high": 2}


def test_a_high_row_that_rq_requeues_is_run(desk: Desk) -> None:
    """RQ puts it into the queue of its own name: it runs, as one of normal priority."""
    batch = desk.submit("a", priority="high").batch_id
    desk.end(desk.pull(), "failed")
    assert desk.client.retry(batch) == 1
    [row] = desk.pull()
    desk.connection.zadd(redis_keys.registry("wip", QUEUE), {f"{batch}-1:{row.lease.execution}": 1})
    Queue(
        QUEUE, connection=desk.connection, serializer=JSONSerializer
    ).started_job_registry.cleanup()
    assert desk.connection.llen(redis_keys.queue(QUEUE)) == 1
    desk.end(desk.pull())
    assert desk.outcomes(batch) == {1: "ok"}


# ---- deadline ----


def test_rows_that_have_not_started_expire(desk: Desk) -> None:
    """Without any worker: whoever looks ends them. What has started is finished."""
    batch = desk.submit("a", "b", "c", "{", expires=Deadline(3600)).batch_id
    assert abs(desk.client.status(batch).expires - time.time() - 3600) < 60
    [running] = desk.pull(1)
    desk.late(batch)
    status = desk.client.wait(batch, timeout_seconds=0)
    assert (status.queued, status.running, status.failed) == (0, 1, 3)
    assert desk.connection.llen(redis_keys.queue(QUEUE)) == 0
    desk.end([running])
    assert desk.client.wait(batch, timeout_seconds=5).is_done
    assert desk.codes(batch) == {2: "expired", 3: "expired", 4: "invalid_json"}
    assert [row.result.custom_id for row in desk.client.results(batch, order="input")][
        1
    ] == "line-2"
    desk.check_books(batch)


@pytest.mark.parametrize("ask", ["status", "list", "follow", "ordered", "result"])
def test_nothing_waits_for_rows_that_nobody_will_run(desk: Desk, ask: str) -> None:
    """Every way to look at a batch ends what is overdue."""
    batch = desk.submit("a", "b", expires=Deadline(3600)).batch_id
    desk.late(batch)
    if ask == "status":
        assert desk.client.status(batch).is_done
    elif ask == "list":
        assert [found.is_done for found in desk.client.list_batches()] == [True]
    elif ask == "result":
        found = desk.client.result(f"{batch}-1", wait_seconds=5)
        assert found is not None and found.error is not None and found.error[0] == "expired"
    else:
        order: Any = "input" if ask == "ordered" else "finish"
        rows = list(desk.client.results(batch, follow=True, order=order))
        assert [row.result.outcome for row in rows] == ["failed", "failed"]


def test_the_deadline_is_the_servers(desk: Desk) -> None:
    """A move made too early by a wrong clock does nothing."""
    batch = desk.submit("a", expires=Deadline(3600)).batch_id
    row = reconcile.error_row(MODEL, 1, None, ("expired", "too early"))
    assert desk.moves.settle(QUEUE, "expired", [(f"{batch}-1", row)]) == [""]
    desk.connection.hdel(redis_keys.batch(batch), "expires")
    assert desk.moves.settle(QUEUE, "expired", [(f"{batch}-1", row)]) == [""]
    assert desk.outcomes(batch) == {}


def test_a_worker_learns_the_deadline(desk: Desk) -> None:
    """Each row comes with the seconds that are left; infinity when there is no deadline."""
    desk.submit("a", name="a", expires=Deadline(3600), priority="high")
    desk.submit("b", name="b")
    (timed,), (free,) = desk.pull(), desk.pull()
    assert 3500 < timed.seconds_left <= 3600
    assert free.seconds_left == float("inf")


def test_retry_after_the_deadline_needs_another(desk: Desk) -> None:
    """Rows queued again would expire at once: a new deadline is asked for, or none."""
    batch = desk.submit("a", "b", expires=Deadline(3600)).batch_id
    desk.late(batch)
    assert desk.client.status(batch).failed == 2
    with pytest.raises(UsageError, match="--expires"):
        desk.client.retry(batch)
    assert desk.client.retry(batch, expires=Deadline(in_seconds=600)) == 2
    assert abs(desk.client.status(batch).expires - time.time() - 600) < 60
    desk.late(batch)
    assert desk.client.status(batch).failed == 2
    assert desk.client.retry(batch, expires=NEVER) == 2
    assert desk.client.status(batch).expires == 0
    desk.end(desk.pull())
    assert desk.outcomes(batch) == {1: "ok", 2: "ok"}
    desk.check_books(batch)


def test_a_server_that_takes_no_writes_is_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status of an overdue batch on a replica: what is there, not an error."""
    batch = desk.submit("a", expires=Deadline(3600)).batch_id
    desk.late(batch)

    def refuse(*_: object) -> None:
        raise ResponseError("READONLY You can't write against a read only replica.")

    monkeypatch.setattr(Transitions, "settle", refuse)
    assert desk.client.status(batch).queued == 1


def test_overdue_rows_are_ended_a_part_at_a_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker does not stop for as long as a large batch takes: it renews leases in between."""
    monkeypatch.setattr(reconcile, "PAGE_ROWS", 2)
    batch = desk.submit(*(f"p{n}" for n in range(5)), expires=Deadline(600)).batch_id
    desk.late(batch)
    reconciler = reconcile.Reconciler(desk.connection)
    found = []
    for num_rows in reconciler.steps(read_batch(desk.connection, batch)):
        assert num_rows <= 2
        found.append(read_batch(desk.connection, batch).failed)
    assert found[:3] == [2, 4, 5]
    desk.check_books(batch)


# ---- dedupe ----


def test_what_makes_duplicates() -> None:
    """Every field that decides the answer counts; custom_id does not, nor does 0 for 0.0."""
    base = Request("a", "chat", messages=[{"role": "user", "content": "q"}])
    zero = SamplingParams(temperature=0)

    def key(params: SamplingParams = zero, **changes: Any) -> bytes | None:
        fields = {"custom_id": "b", "endpoint": "chat", "messages": base.messages, **changes}
        request = Request(params=params, **fields)
        return request_digest(request) if can_have_duplicates(request) else None

    same_key = key()
    assert same_key == key(custom_id="other") == key(SamplingParams(temperature=0.0))
    differing = [
        key(messages=[{"role": "user", "content": "Q"}]),
        key(messages=[{"role": "system", "content": "q"}]),
        key(tools=[{"type": "function"}]),
        key(chat_template_kwargs={"enable_thinking": False}),
        key(endpoint="completion", messages=None, prompt="q"),
        key(SamplingParams(temperature=0, max_tokens=3)),
        key(SamplingParams(temperature=0, stop=("x",))),
        key(SamplingParams(temperature=0, logprobs=0)),
        key(SamplingParams(temperature=0, seed=2**60)),
        key(SamplingParams(temperature=0, seed=2**60 + 1)),
        key(SamplingParams(temperature=0.5, seed=1)),
    ]
    assert None not in differing and len({same_key, *differing}) == len(differing) + 1
    assert key(SamplingParams()) is None
    assert key(SamplingParams(temperature=0.5)) is None


def test_rows_that_ask_for_the_same_are_computed_once(desk: Desk) -> None:
    """One job runs; each line has its own result under its own id, and the sum is right always."""
    rows = [*same("a", "b", "ü:1"), {"custom_id": "d", "prompt": "q", "temperature": 1}, "{"]
    submitted = desk.submit(*rows, dedupe=True)
    batch = submitted.batch_id
    assert (submitted.total, submitted.num_jobs, submitted.num_duplicates) == (5, 4, 2)
    status = desk.client.status(batch)
    assert (status.queued, status.failed, status.is_deduped) == (4, 1, True)
    pulled = desk.pull()
    assert len(pulled) == 2
    desk.check_books(batch)
    desk.end(pulled)
    found = {row.line: row.result for row in desk.client.results(batch, follow=True)}
    assert [found[n].custom_id for n in range(1, 5)] == ["a", "b", "ü:1", "d"]
    assert {found[n].text for n in range(1, 4)} == {"to q"}
    status = desk.client.status(batch)
    assert (status.ok, status.copied, status.prompt_tokens) == (4, 2, 20)  # tokens: of what ran
    desk.check_books(batch)
    assert desk.connection.keys("batchkv:twins:*") == []
    job = Job.fetch(f"{batch}-2", connection=desk.connection, serializer=JSONSerializer)
    assert job.is_finished


def test_without_the_flag_nothing_is_shared(desk: Desk) -> None:
    """Rows that ask for the same run, all of them."""
    desk.submit(*same("a", "b"))
    assert len(desk.pull()) == 2


def test_defaults_count(desk: Desk) -> None:
    """What the batch's defaults say is as if the rows had said it."""
    path = desk.write({"prompt": "q"}, {"prompt": "q"})
    submitted = desk.client.submit(
        path, model=MODEL, options=BatchOptions(dedupe=True), defaults=SamplingParams(temperature=0)
    )
    assert submitted.num_duplicates == 1
    assert desk.client.check(path, dedupe=True).num_duplicates == 0


def test_a_leader_that_fails_fails_its_duplicates_and_retry_runs_one(desk: Desk) -> None:
    """They end with the same error; queued again, again one runs for all."""
    batch = desk.submit(*same("a", "b", "c"), dedupe=True).batch_id
    desk.end(desk.pull(), "failed")
    assert desk.outcomes(batch) == dict.fromkeys((1, 2, 3), "failed")
    assert desk.client.retry(batch) == 3
    desk.check_books(batch)
    [pulled] = desk.pull()
    desk.end([pulled])
    rows = {row.line: row.result for row in desk.client.results(batch, follow=True)}
    assert {n: (row.custom_id, row.outcome) for n, row in rows.items()} == {
        1: ("a", "ok"), 2: ("b", "ok"), 3: ("c", "ok"),
    }  # fmt: skip
    desk.check_books(batch)


def test_another_leads_when_the_leader_is_canceled(desk: Desk) -> None:
    """Queued or running: the first that still waits runs for the others; all can come back."""
    batch = desk.submit(*same("a", "b", "c", "d"), dedupe=True).batch_id
    assert desk.client.cancel(f"{batch}-2") == 1  # a follower: nobody else notices
    assert desk.client.cancel(f"{batch}-1") == 1
    [running] = desk.pull()
    assert running.lease.job_id == f"{batch}-3"
    assert desk.client.cancel(f"{batch}-3") == 1
    desk.end([running])  # too late: it was canceled
    [last] = desk.pull()
    desk.check_books(batch)
    assert desk.client.retry(batch, canceled=True) == 3
    desk.check_books(batch)
    again = desk.pull()  # the first never waited, so it runs; the others wait for one that does
    assert [row.lease.job_id for row in again] == [f"{batch}-1"]
    desk.end([last, *again])
    rows = {row.line: row.result for row in desk.client.results(batch, follow=True)}
    assert {n: row.custom_id for n, row in rows.items()} == {1: "a", 2: "b", 3: "c", 4: "d"}
    assert {row.outcome for row in rows.values()} == {"ok"}
    desk.check_books(batch)


def test_a_canceled_batch_runs_nothing(desk: Desk) -> None:
    """Cancel of the whole: leaders, followers, and nobody is promoted into the queue."""
    batch = desk.submit(*same("a", "b", "c"), *same("d", "e", text="r"), dedupe=True).batch_id
    assert desk.client.cancel(batch) == 5
    assert desk.pull() == []
    assert desk.client.status(batch).canceled == 5
    desk.check_books(batch)


def test_duplicates_of_a_row_that_kills_workers_fail_with_it(desk: Desk) -> None:
    """The same request would kill as many again."""
    batch = desk.submit(*same("a", "b"), dedupe=True).batch_id
    for _ in range(MAX_DEATHS + 1):
        desk.pull()
        desk.moves.reap(QUEUE, "w")
    row = reconcile.error_row(MODEL, 1, None, ("engine_error", "died"))
    assert desk.moves.settle(QUEUE, "failed", [(f"{batch}-1", row)]) == ["done"]
    assert desk.codes(batch) == {1: "engine_error", 2: "engine_error"}
    desk.check_books(batch)


def test_duplicates_expire_too(desk: Desk) -> None:
    """A row that waits for another has not started."""
    batch = desk.submit(*same("a", "b", "c"), dedupe=True, expires=Deadline(60)).batch_id
    [running] = desk.pull()
    desk.late(batch)
    assert desk.client.status(batch).failed == 2
    desk.end([running])
    assert desk.outcomes(batch) == {1: "ok", 2: "failed", 3: "failed"}
    assert desk.client.retry(batch, expires=NEVER) == 2
    desk.check_books(batch)
    [second] = desk.pull()
    desk.end([second])
    assert set(desk.outcomes(batch).values()) == {"ok"}
    desk.check_books(batch)


def test_many_duplicates_are_copied_in_steps(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step does so much; the rest is done by whoever looks next, also after a kill."""
    monkeypatch.setattr(transitions, "COPIES", 7)
    batch = desk.submit(*same(*(f"c{n}" for n in range(40))), dedupe=True).batch_id
    desk.end(desk.pull())
    assert desk.connection.hlen(redis_keys.results(batch)) == 8
    assert desk.connection.hlen(redis_keys.due(QUEUE)) == 1
    assert desk.client.status(batch).ok == 40
    assert desk.connection.exists(redis_keys.due(QUEUE)) == 0
    desk.check_books(batch)


def test_an_interrupted_submit_goes_on_the_same_way(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers come first: no leader can end before they are there. Another way is refused."""
    from batchkv_producer.order import planner

    monkeypatch.setattr(planner, "CHUNK_ROWS", 2)
    real, seen = Transitions.submit, []

    def fail(self: Transitions, *arguments: Any, **more: Any) -> int:
        seen.append(arguments)
        raise KeyboardInterrupt

    rows = [*same("a", "b", "c", "d"), *same("e", text="r"), *same("f", text="s")]
    monkeypatch.setattr(Transitions, "submit", fail)
    with pytest.raises(KeyboardInterrupt):
        desk.submit(*rows, dedupe=True)
    monkeypatch.setattr(Transitions, "submit", real)
    assert desk.pull() == []
    [status] = desk.client.list_batches()
    assert not status.is_submitted
    with pytest.raises(BatchkvError, match="begun with --dedupe"):
        desk.submit(*rows)
    batch = desk.submit(*rows, dedupe=True).batch_id
    desk.end(desk.pull())
    assert desk.client.status(batch).ok == 6
    desk.check_books(batch)


@pytest.mark.parametrize("data", [b"=", b"=3", b"=x:abc", b"=9:abc", b"=2:\xff\xff", b"=0:=0:x"])
def test_a_copy_that_nobody_made(data: bytes) -> None:
    """Is a WireError, like any other damaged result."""
    with pytest.raises(WireError):
        decode_result(data)


def test_a_copy_reads_as_its_original() -> None:
    """But for the id, whatever that holds."""
    result = Result("a", "chat", "ok", text="t")
    for name in ("", "ü:\n=", "\udc80", "x" * 5000):
        raw = name.encode("utf-8", "surrogatepass")
        copy = b"=%d:%s%s" % (len(raw), raw, encode_result(result))
        assert unstamped(copy)[0] == name
        assert decode_result(copy) == Result(name, "chat", "ok", text="t")


# ---- keep ----


def test_all_keys_of_a_kept_batch_expire_together(desk: Desk) -> None:
    """Nothing before the end; from then on one moment for all, until a retry."""
    batch = desk.submit("a", "b", "{", keep_seconds=3600).batch_id
    keys = [redis_keys.batch(batch), redis_keys.results(batch), redis_keys.done(batch)]
    desk.end(desk.pull(1), "failed")
    assert [desk.connection.ttl(key) for key in keys] == [-1, -1, -1]
    desk.end(desk.pull())
    status = desk.client.status(batch)
    moments = {desk.connection.expiretime(key) for key in keys}
    assert moments == {status.kept_until} and abs(status.kept_until - time.time() - 3600) < 60
    assert desk.connection.expiretime(f"rq:job:{batch}-1") == status.kept_until
    assert desk.client.retry(batch) == 1
    assert [desk.connection.ttl(key) for key in keys] == [-1, -1, -1]
    assert desk.connection.ttl(f"rq:job:{batch}-1") == -1
    desk.end(desk.pull())
    assert all(desk.connection.ttl(key) > 3500 for key in keys)
    desk.check_books(batch)


@pytest.mark.parametrize("how", ["cancel", "expire", "duplicates", "bad"])
def test_however_a_batch_ends_it_is_kept_from_then(desk: Desk, how: str) -> None:
    """The last row may end by any move."""
    rows: list[Any] = same("a", "b") if how == "duplicates" else ["{"] if how == "bad" else ["a"]
    expires = Deadline(60) if how == "expire" else None
    submitted = desk.submit(*rows, keep_seconds=60, dedupe=how == "duplicates", expires=expires)
    batch = submitted.batch_id
    if how == "cancel":
        desk.client.cancel(batch)
    elif how == "expire":
        desk.late(batch)
    elif how == "duplicates":
        desk.end(desk.pull())
    assert desk.client.status(batch).kept_until > 0
    assert 0 < desk.connection.ttl(redis_keys.results(batch)) <= 60


def test_a_batch_that_says_nothing_stays(desk: Desk) -> None:
    """As it always was: no key expires."""
    batch = desk.submit("a").batch_id
    desk.end(desk.pull())
    assert desk.client.status(batch).kept_until == 0
    assert desk.connection.ttl(redis_keys.batch(batch)) == -1


def test_results_of_an_expired_batch_say_so(desk: Desk) -> None:
    """A named error, told from a batch that never was; the same file makes it anew."""
    batch = desk.submit("a", keep_seconds=60).batch_id
    desk.end(desk.pull())
    keys = [redis_keys.batch(batch), redis_keys.results(batch), redis_keys.done(batch)]
    desk.connection.delete(*keys, f"rq:job:{batch}-1")
    for ask in (
        lambda: list(desk.client.results(batch)),
        lambda: desk.client.status(batch[:8]),
        lambda: desk.client.result(f"{batch}-1"),
        lambda: desk.client.wait(batch),
        lambda: desk.client.cancel(batch),
        lambda: desk.client.retry(batch),
    ):
        with pytest.raises(ExpiredError, match="no longer kept"):
            ask()
    assert desk.client.list_batches() == []
    assert not desk.submit("a", keep_seconds=60).joined
    desk.end(desk.pull())
    assert desk.outcomes(batch) == {1: "ok"}


def test_jobs_of_an_expired_batch_leave_nothing_to_the_new_one(desk: Desk) -> None:
    """Submitted again, rows have no time to live, deaths or lease of the jobs that were there."""
    rows = same("a", "b", "c")
    batch = desk.submit(*rows, keep_seconds=60, dedupe=True).batch_id
    desk.end(desk.pull(), "failed")
    jobs = [f"rq:job:{batch}-{line}" for line in range(1, len(rows) + 1)]
    assert all(desk.connection.ttl(job) > 0 for job in jobs)
    for job in jobs:
        desk.connection.hset(job, mapping={"bkv_died": 1, "bkv_suspect": "g", "bkv_exec": "x"})
    desk.connection.hset(f"batchkv:held:{batch}", "1", "x")
    batch_key = redis_keys.batch(batch)
    for key in (batch_key, redis_keys.rows(batch), redis_keys.results(batch)):
        desk.connection.delete(key)
    desk.connection.delete(redis_keys.done(batch))
    assert desk.submit(*rows, keep_seconds=60, dedupe=True).batch_id == batch
    assert [desk.connection.ttl(job) for job in jobs] == [-1] * len(jobs)
    for job in jobs:
        assert desk.connection.hmget(job, "bkv_died", "bkv_suspect", "bkv_exec") == [None] * 3
    desk.end(desk.pull())
    assert set(desk.outcomes(batch).values()) == {"ok"}
    desk.check_books(batch)


@pytest.mark.parametrize("then", ["pull", "finish", "give back", "reap", "cancel", "heal"])
def test_a_job_that_outlives_its_batch_brings_nothing_back(desk: Desk, then: str) -> None:
    """Whatever is done with a job whose batch has expired, no key of the batch is written."""
    batch = desk.submit("a", keep_seconds=60).batch_id
    job_id, pulled = f"{batch}-1", desk.pull() if then in ("finish", "give back", "reap") else []
    desk.connection.delete(*desk.connection.keys("batchkv:batch:*"))
    if then == "pull":
        assert desk.pull() == []
    elif then == "finish":
        desk.end(pulled)
    elif then == "give back":
        desk.moves.give_back(QUEUE, [row.lease for row in pulled], died=True)
    elif then == "reap":
        desk.moves.reap(QUEUE, "w")
    else:
        if then == "heal":
            desk.connection.hset(redis_keys.job(job_id), "status", "failed")
        error = Result("a", "completions", "failed", error=("engine_error", "it broke"))
        target = "canceled" if then == "cancel" else "failed"
        assert desk.moves.settle(QUEUE, target, [(job_id, encode_result(error))]) == [""]
    assert desk.connection.keys("batchkv:[brdh]*:*") == []
    assert then in ("cancel", "heal") or not desk.connection.exists(redis_keys.job(job_id))


def test_half_a_batch_hides_no_other(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """One without a digest is as good as gone, and one that cannot be read is passed by."""
    half, broken, whole = (
        desk.submit(text, name=f"{text}.jsonl", keep_seconds=60).batch_id for text in "abc"
    )
    desk.connection.delete(redis_keys.batch(half))
    desk.connection.hset(redis_keys.batch(half), "running", 1)
    desk.connection.hset(redis_keys.results(half), "1", b"old")
    desk.connection.hdel(redis_keys.batch(broken), "model")
    assert [found.batch_id for found in desk.client.list_batches()] == [whole]
    assert broken in caplog.text and half not in caplog.text
    with pytest.raises(ExpiredError):
        desk.client.status(half)
    with pytest.raises(WireError, match="model"):
        desk.client.status(broken)
    assert not desk.submit("a", name="a.jsonl", keep_seconds=60).joined
    assert desk.client.status(half).queued == 1


# ---- all at once ----


class Actors:
    """A worker, a client and stock tools that do random things to one batch."""

    def __init__(self, desk: Desk, batch: str, total: int, seed: int) -> None:
        self.desk, self.batch, self.total = desk, batch, total
        self.chance = random.Random(seed)
        self.held: list[Pulled] = []
        self.moves = (
            *(self.pull,) * 3,
            *(self.end,) * 4,
            self.cancel,
            self.retry,
            self.give_back,
            self.reap,
            self.late,
            self.clean_up,
            self.delete,
            self.lose,
        )

    def pull(self) -> None:
        self.held += self.desk.pull(self.chance.randint(1, 4))

    def end(self) -> None:
        if self.held:
            chosen = self.held.pop(self.chance.randrange(len(self.held)))
            self.desk.end([chosen], self.chance.choice(["ok", "failed"]))

    def cancel(self) -> None:
        self.desk.client.cancel(self.line())

    def retry(self) -> None:
        is_all = self.chance.random() < 0.5
        self.desk.client.retry(self.batch, canceled=is_all, expires=Deadline(600))

    def give_back(self) -> None:
        if self.held:
            died = self.chance.random() < 0.3
            self.desk.moves.give_back(QUEUE, [self.held.pop().lease], died=died)

    def reap(self) -> None:
        self.desk.moves.reap(QUEUE, "w", limit=3)

    def late(self) -> None:
        if self.chance.random() < 0.3:
            self.desk.late(self.batch)

    def clean_up(self) -> None:
        queue = Queue(QUEUE, connection=self.desk.connection, serializer=JSONSerializer)
        queue.started_job_registry.cleanup(timestamp=time.time())

    def delete(self) -> None:
        """Somebody presses "delete" in a dashboard, whatever the job does."""
        if self.chance.random() < 0.3:
            self.desk.connection.delete(f"rq:job:{self.line()}")

    def lose(self) -> None:
        """Somebody empties a list."""
        if self.chance.random() < 0.2:
            self.desk.connection.delete(*redis_keys.waiting_lists(QUEUE))

    def line(self) -> str:
        return f"{self.batch}-{self.chance.randint(1, self.total)}"


@pytest.mark.parametrize("seed", range(9))  # each priority three times
def test_random_moves_with_duplicates_and_deadlines(
    desk: Desk, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers, cancels, retries, deadlines, deletions in any order: the books balance, all end."""
    monkeypatch.setattr(reconcile, "REST_SECONDS", 0.0)
    monkeypatch.setattr(transitions, "COPIES", 2)
    rows = [row for n in range(6) for row in same(*(f"{n}-{k}" for k in range(4)), text=f"t{n}")]
    batch = desk.submit(
        *rows, dedupe=True, priority=redis_keys.PRIORITIES[seed % 3], expires=Deadline(600)
    ).batch_id
    actors = Actors(desk, batch, len(rows), seed)
    for _ in range(80):
        actors.chance.choice(actors.moves)()
        status = desk.client.status(batch)
        assert min(status.queued, status.running) >= 0, status.whole_sum()
        assert status.num_results == status.num_ended
    desk.moves.reap(QUEUE, "w", limit=1000)
    for _ in range(10):
        desk.end(desk.pull())
        desk.client.status(batch)
    status = desk.client.status(batch)
    assert status.is_done, status.whole_sum()
    found = list(desk.client.results(batch, follow=True))
    assert sorted(row.line for row in found) == list(range(1, len(rows) + 1))
    named = {row.result.custom_id for row in found if "lost" not in (row.result.error or ())}
    assert len(named) == sum("lost" not in (row.result.error or ()) for row in found)
    desk.check_books(batch)
    desk.moves.copy(QUEUE)  # as maintenance does: lists of rows that have ended
    assert desk.connection.keys("batchkv:twins:*") == []

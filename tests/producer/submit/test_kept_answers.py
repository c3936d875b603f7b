"""A mended file: what was answered before is kept, and only the rest is computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys, row_facts
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import SamplingParams, decode_job, encode_result
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transitions import JobResult, Transitions
from support import fake_worker
from support.redis_server import RedisServer

MODEL = "some/model"
QUEUE = redis_keys.queue_name(MODEL)
QUEUE_LIST = redis_keys.queue(QUEUE)
OURS = Maker("a" * 32, "affine8", "half")
BATCHKV = [sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


def rows(*names: str, prefix: str = "c", **said: Any) -> list[dict[str, Any]]:
    """A row for each name, which is its prompt."""
    return [{"custom_id": f"{prefix}-{name}", "prompt": name, **said} for name in names]


class Desk:
    """Files, their batches, and a worker that answers "to <prompt>"."""

    def __init__(self, connection: Redis, write: Write) -> None:
        self.connection, self.write = connection, write
        self.client, self.moves = Client(connection), Transitions(connection)

    def submit(
        self, lines: Sequence[Any], name: str = "in.jsonl", earlier: str = "", **options: Any
    ) -> Submitted:
        source = self.write(*lines, name=name)
        found = EarlierBatch(earlier) if earlier else None
        return self.client.submit(source, model=MODEL, earlier=found, **options)

    def work(self, maker: Maker = OURS, failing: Sequence[str] = (), count: int = 100) -> list[str]:
        """Take rows of the queue and end them; what they asked, sorted."""
        run = self.moves.pull_run(QUEUE, "w", count, 60, maker=maker)
        endings, prompts = [], []
        for row in run.jobs:
            request = decode_job(row.data)
            prompt = request.prompt or ""
            prompts.append(prompt)
            outcome = "failed" if prompt in failing else "ok"
            error = ("engine_error", "it broke") if outcome == "failed" else None
            text = f"to {prompt}" if outcome == "ok" else ""
            result = RowResult(request.custom_id, "completion", outcome, text=text, error=error)  # type: ignore[arg-type]
            endings.append(JobResult(row.lease, outcome, encode_result(result), 5, 3))
        self.moves.finish(QUEUE, "w", endings, maker=maker)
        return sorted(prompts)

    def answered(self, *names: str, **options: Any) -> str:
        """A batch of these rows, all answered by OURS."""
        batch = self.submit(rows(*names), name="first.jsonl", **options).batch_id
        self.work()
        assert self.client.status(batch).is_done
        return batch

    def results(self, batch: str) -> dict[str, str]:
        found = self.client.results(batch)
        return {row.result.custom_id: row.result.text for row in found}


@pytest.fixture
def desk(redis_connection: Redis, write_lines: Write) -> Desk:
    return Desk(redis_connection, write_lines)


def test_the_first_job_of_a_prefix_is_marked_though_the_first_row_was_kept(desk: Desk) -> None:
    """Runs end before it. The rows before it have answers, so they are not queued."""
    groups = [[f"{name * 600} {row}" for row in range(4)] for name in "xy"]
    prompts = [prompt for group in groups for prompt in group]

    def marks(batch: str) -> list[tuple[str, bool]]:
        """The first letter of each queued prompt, and whether its job is marked, in order."""
        found = []
        for raw in desk.connection.lrange(QUEUE_LIST, 0, -1):
            assert raw.startswith(batch.encode())
            data, shared = desk.connection.hmget(f"rq:job:{raw.decode()}", "data", "bkv_shared")
            assert int(shared) >= 600
            found.append(((decode_job(data).prompt or "")[0], shared.startswith(b"0")))
        return found

    whole = desk.submit(rows(*prompts), name="whole.jsonl").batch_id
    want = [(letter, row == 0) for letter in "xy" for row in range(4)]
    assert sorted(marks(whole), key=lambda one: one[0]) == want
    desk.client.cancel(whole)
    first = desk.answered(groups[0][0], groups[0][1], groups[1][3])
    mended = desk.submit(rows(*prompts, prefix="new"), earlier=first).batch_id
    assert desk.client.status(mended).kept == 3
    want = [("x", True), ("x", False), ("y", True), ("y", False), ("y", False)]
    assert sorted(marks(mended), key=lambda one: one[0]) == want


def test_only_what_changed_is_computed(desk: Desk) -> None:
    """Rows that ask for the same end at once, under their new names; the sum tells how many."""
    first = desk.answered("a", "b", "c")
    mended = [*rows("c", "b2", prefix="new"), "{broken", *rows("a", prefix="new")]
    batch = desk.submit(mended, earlier=first).batch_id
    status = desk.client.status(batch)
    assert (status.ok, status.kept, status.failed, status.queued) == (2, 2, 1, 1)
    assert status.whole_sum() == "4 = 2 ok (2 kept) + 1 failed + 0 canceled + 1 queued + 0 held"
    assert desk.work() == ["b2"]
    assert desk.client.status(batch).is_done
    answers = {"new-c": "to c", "new-b2": "to b2", "new-a": "to a", "line-3": ""}
    assert desk.results(batch) == answers
    assert desk.client.status(first).ok == 3 and len(desk.results(first)) == 3


def test_answers_to_raw_prompts_are_kept_too(desk: Desk) -> None:
    """Under --raw, too, a batch keeps what its rows ask for and what they are called."""
    raw = Prompting(raw=True)
    first = desk.answered("a", "b", prompting=raw)
    assert row_facts.custom_ids(desk.connection, first, [1, 2]) == {1: "c-a", 2: "c-b"}
    batch = desk.submit(rows("a", "b2"), earlier=first, prompting=raw).batch_id
    assert desk.client.status(batch).kept == 1
    assert desk.work() == ["b2"]
    through_template = desk.submit(rows("a", "b3"), name="third.jsonl", earlier=first).batch_id
    assert desk.client.status(through_template).kept == 0


def test_rows_of_the_earlier_batch_that_still_wait_are_told_of(desk: Desk) -> None:
    """Rows of the old file that nobody answered yet stay queued: that is said, with the way out."""
    first = desk.submit(rows("a", "b", "c"), name="first.jsonl").batch_id
    desk.work(count=1)
    found = EarlierBatch(first)
    desk.client.submit(desk.write(*rows("a", "b", "d")), model=MODEL, earlier=found)
    assert "2 rows of it wait to be computed all the same" in found.sentence(1)
    assert f"`batchkv cancel {first}`" in found.sentence(0)


def test_failed_and_canceled_rows_are_computed_again(desk: Desk) -> None:
    """Only answers are kept: what failed, was canceled or never ended in the earlier batch runs."""
    first = desk.submit(rows("a", "b", "c", "d"), name="first.jsonl").batch_id
    desk.client.cancel(f"{first}-4")
    desk.work(failing=["b"], count=2)
    batch = desk.submit(rows("a", "b", "c", "d", prefix="n"), earlier=first).batch_id
    assert desk.client.status(batch).kept == 1
    desk.client.cancel(first)
    assert desk.work() == ["b", "c", "d"]


def test_defaults_and_parameters_tell_rows_apart(desk: Desk) -> None:
    """The same prompt with another temperature is another request; a default said is the same."""
    first = desk.submit(
        [*rows("a", max_tokens=9), *rows("b")],
        name="first.jsonl",
        defaults=SamplingParams(max_tokens=9),
    ).batch_id
    desk.work()
    mended = [*rows("a", prefix="n", max_tokens=9), *rows("b", prefix="n", temperature=0.5)]
    mended += rows("b", prefix="m", max_tokens=9)
    batch = desk.submit(mended, earlier=first).batch_id
    assert desk.client.status(batch).kept == 2
    assert desk.work() == ["b"]


@pytest.mark.parametrize(
    "other", [Maker("b" * 32, "affine8", "half"), Maker("a" * 32, "float", "half")]
)
def test_answers_of_other_weights_or_schemes_are_not_kept(desk: Desk, other: Maker) -> None:
    """A batch that is computed with something else computes all rows itself."""
    first = desk.answered("a", "b")
    source = desk.write(*rows("a", "c"), name="in.jsonl")
    batch = desk.client.check(source, model=MODEL).batch_id
    earlier = EarlierBatch(first)

    def begin(batch_id: str, *_: object) -> None:
        """Somebody begins the batch with other workers, just before its rows come in."""
        fields: dict[str, str | int] = {"digest": _digest(source), "model": MODEL, "queue": QUEUE}
        fields |= {"total": 2, "num_chunks": 1, "last_line": 2, "order": 2}
        desk.moves.create(batch_id, fields, other.fields())

    def _digest(path: Path) -> str:
        from batchkv_producer.order.planner import BatchPlan
        from batchkv_producer.submit.submission import identify

        with BatchPlan(SamplingParams()) as plan:
            return identify(path, plan, SamplingParams(), MODEL)

    desk.client.submit(source, model=MODEL, earlier=earlier, on_identified=begin)
    status = desk.client.status(batch)
    assert (earlier.num_alike, status.kept, status.queued) == (1, 0, 2)
    assert "other weights, KV scheme or dtype" in earlier.sentence(status.kept)
    assert desk.work(other) == ["a", "c"]


def test_the_rest_is_computed_with_what_the_kept_answers_were(desk: Desk) -> None:
    """A batch that keeps answers says with what they were made, and others pass its rows by."""
    first = desk.answered("a", "b")
    desk.submit(rows("a", "c"), earlier=first)
    assert desk.work(Maker("b" * 32, "affine8", "half")) == []
    assert desk.work() == ["c"]


def test_rows_that_end_meanwhile_are_not_mistaken_for_answers(desk: Desk) -> None:
    """A row of the earlier batch that fails between the look and the copy is computed anew."""
    first = desk.submit(rows("a", "b"), name="first.jsonl").batch_id
    desk.work(count=1)
    earlier = EarlierBatch(first)

    def fail(*_: object) -> None:
        desk.work(failing=["a", "b"])

    source = desk.write(*rows("a", "b", prefix="n"), name="in.jsonl")
    batch = desk.client.submit(source, model=MODEL, earlier=earlier, on_identified=fail).batch_id
    assert (earlier.num_alike, desk.client.status(batch).kept) == (2, 0)
    assert desk.work() == ["a", "b"]


def test_an_interrupted_submit_keeps_the_rest_when_it_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk each row is kept or queued, once, however often the submit is repeated."""
    monkeypatch.setattr("batchkv_producer.order.planner.CHUNK_ROWS", 2)
    first = desk.answered(*"abcdef")
    lines = rows(*"abcdefgh", prefix="n")
    sent = Transitions.submit

    def stop(self: Transitions, batch: str, queue: str, chunk: int, *more: Any, **kw: Any) -> int:
        if chunk == 2:
            raise KeyboardInterrupt
        return sent(self, batch, queue, chunk, *more, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(Transitions, "submit", stop)
        with pytest.raises(KeyboardInterrupt):
            desk.submit(lines, earlier=first)
    batch = desk.submit(lines, earlier=first).batch_id
    assert desk.client.status(batch).kept == 6
    assert desk.work() == ["g", "h"]
    assert desk.submit(lines, earlier=first).joined
    assert desk.results(batch) == {f"n-{name}": f"to {name}" for name in "abcdefgh"}


def test_duplicates_of_a_kept_row_are_kept_with_it(desk: Desk) -> None:
    """With --dedupe rows that wait for a kept one end with its answer; copies of copies, too."""
    same = rows("a", temperature=0) + rows("a", prefix="d", temperature=0)
    options = BatchOptions(dedupe=True)
    first = desk.submit(same, name="first.jsonl", options=options).batch_id
    assert desk.work() == ["a"]
    second = desk.submit([*reversed(same), *rows("b")], earlier=first, options=options).batch_id
    assert desk.work() == ["b"]
    third = desk.submit(same[1:] + rows("c"), name="third.jsonl", earlier=second).batch_id
    assert desk.work() == ["c"]
    assert desk.results(second) == {"c-a": "to a", "d-a": "to a", "c-b": "to b"}
    assert desk.results(third) == {"d-a": "to a", "c-c": "to c"}
    assert desk.client.status(second).is_done


@pytest.mark.parametrize("what", ["forgotten", "old", "other model", "nothing alike"])
def test_a_batch_of_which_nothing_can_be_kept_says_why(
    desk: Desk, redis_server: RedisServer, what: str
) -> None:
    """--from BATCH queues all rows then, and one sentence tells the reason."""
    first = desk.answered("a", "b")
    key = redis_keys.batch(first)
    prompts = "xy" if what == "nothing alike" else "ab"
    if what == "forgotten":
        desk.client.forget(first)
    if what == "old":  # as versions left it that knew no fingerprint
        desk.connection.hdel(key, "fingerprint", "scheme", "dtype")
    if what == "other model":
        desk.connection.hset(key, "model", "another")
    source = desk.write(*rows(*prompts, prefix="n"), name="in.jsonl")
    found = _batchkv("submit", source, "-m", MODEL, "--from", first, url=redis_server.url)
    if what == "forgotten":
        assert found.exit_code == 2 and f"no batch {first}" in found.stderr
        return
    reasons = {"old": "are not known", "other model": "its model is another"}
    reasons["nothing alike"] = "none of its rows has the same request"
    assert f"no answer of batch {first} can be kept: " in found.stderr
    assert reasons[what] in found.stderr
    assert desk.client.status(found.stdout.strip()).queued == 2


def test_submit_from_tells_what_it_keeps(desk: Desk, redis_server: RedisServer) -> None:
    """`submit --from` takes a shortened id, and says how many answers the new batch keeps."""
    first = desk.answered("a", "b", "c")
    source = desk.write(*rows("a", "b", "d", prefix="n"), name="in.jsonl")
    found = _batchkv("submit", source, "-m", MODEL, "--from", first[:8], url=redis_server.url)
    assert f"kept 2 answers of batch {first}: these rows have the same request" in found.stderr
    status = desk.client.status(found.stdout.strip())
    assert (status.kept, status.queued) == (2, 1)


def _batchkv(*arguments: object, url: str) -> Result:
    runner = CliRunner(env={"BATCHKV_REDIS_URL": url})
    return runner.invoke(cli, [str(argument) for argument in arguments])


# ---- run ----


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with files that have a fingerprint; nobody loads them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_run_with_a_mended_file_goes_on_from_its_out(
    redis_url: str, tmp_path: Path, model: Path
) -> None:
    """OUT ends as the results of the new file, each id once; only changed and failed rows ran."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(**fake: str) -> subprocess.CompletedProcess[str]:
        command = [*BATCHKV, "run", str(source), "-m", str(model), "-o", str(out)]
        environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url, **fake}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def write(*lines: dict[str, Any]) -> None:
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answers() -> dict[str, str]:
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert len({line["id"] for line in lines}) == len(lines)
        assert len({line["id"].split("-")[0] for line in lines}) == 1
        return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in lines}

    write(*rows("a", "b", "c", "d"))
    first = run(FAKE_FAIL="c-b")
    assert first.returncode == 1, first.stderr
    write(*rows("d", "c2", "b", "a", prefix="n"))
    second = run()
    assert second.returncode == 0, second.stderr
    assert "kept 2 answers of batch" in second.stderr
    assert "4 = 4 ok (2 kept) + 0 failed + 0 canceled" in second.stdout
    wanted = {f"n-{name}": fake_worker.answer(name) for name in ("a", "b", "c2", "d")}
    assert answers() == wanted
    old = tmp_path / "out.jsonl.1.old.jsonl"
    assert f"{out} held the results of batch" in second.stderr and str(old) in second.stderr
    assert len(old.read_text().splitlines()) == 3
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()
    # Another input altogether is refused as ever: nothing of OUT is touched.
    before = out.read_bytes()
    write(*rows("p", "q"))
    refused = run()
    assert refused.returncode == 2 and "holds results of batch" in refused.stderr
    assert out.read_bytes() == before
    # Other weights keep nothing, and OUT makes room all the same.
    (model / "model.safetensors").write_bytes(b"other weights")
    write(*rows("a", "z"))
    last = run()
    assert "can be kept: the model's files have changed since" in last.stderr
    assert last.stdout.startswith("2 = 2 ok + 0 failed")
    assert sorted(answers()) == ["c-a", "c-z"]


def test_a_run_that_was_killed_early_still_names_what_to_keep(
    redis_url: str, tmp_path: Path, model: Path
) -> None:
    """Killed after OUT was moved aside and before its first result: the next mend keeps answers."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = [*BATCHKV, "run", str(source), "-m", str(model), "-o", str(out)]

    def run(*names: str) -> str:
        source.write_text("".join(json.dumps(line) + "\n" for line in rows(*names)))
        environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    run("a", "b")
    assert "kept 2 answers" in run("a", "b", "c")
    out.unlink()
    told = run("a", "b", "d")
    assert "kept 2 answers" in told and "held the results" not in told
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize("is_deduped", [False, True])
def test_answers_that_were_cut_are_counted_when_kept(desk: Desk, is_deduped: bool) -> None:
    """What ended at max_tokens does so in the batch that keeps it, and in copies of it, too."""
    first = desk.submit(rows("a", "b", temperature=0), name="first.jsonl").batch_id
    run = desk.moves.pull_run(QUEUE, "w", 10, 60, maker=OURS)
    endings = []
    for row in run.jobs:
        request = decode_job(row.data)
        reason = "length" if request.prompt == "a" else "stop"
        result = RowResult(request.custom_id, "completion", "ok", text="t", finish_reason=reason)
        is_cut = reason == "length"
        endings.append(JobResult(row.lease, "ok", encode_result(result), is_cut=is_cut))
    desk.moves.finish(QUEUE, "w", endings, maker=OURS)
    again = rows("a", "b", prefix="d", temperature=0) + rows("a", prefix="e", temperature=0)
    options = BatchOptions(dedupe=is_deduped)
    second = desk.submit(again, name="second.jsonl", earlier=first, options=options)
    found = desk.client.status(second.batch_id)
    assert (desk.client.status(first).cut, found.ok, found.cut) == (1, 3, 2)
    assert found.kept + found.copied == 3 and bool(found.copied) == is_deduped

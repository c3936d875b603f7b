"""`--reuse`: rows end with answers that earlier batches got, and are computed never."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.errors import BatchkvError, UsageError, WireError
from batchkv_producer.remote.terms import Terms, read_terms
from batchkv_producer.report.reading import read_facts
from batchkv_producer.report.sections import all_sections
from batchkv_producer.results.output import output_line
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result, Usage, decode_result, encode_result
from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_producer.wire.transition_types import NOTHING_REMEMBERED, ReuseLimits
from batchkv_producer.wire.transitions import JobResult, Transitions
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.queue.in_flight import InFlight
from support.hub import user_of_hub
from support.redis_server import RedisServer

MODEL = "some/model"
OURS = Maker("a" * 32, "affine8", "half")
LIMITS = ReuseLimits()
Row = dict[str, Any]


def rows(*names: str, prefix: str = "c", **said: Any) -> list[Row]:
    """A row for each name, which is its prompt. Its temperature is 0 unless that is said."""
    said = {"temperature": 0, "max_tokens": 9, **said}
    return [{"custom_id": f"{prefix}-{name}", "prompt": name, **said} for name in names]


class Desk:
    """Batches with --reuse, and a worker's main thread without an engine."""

    def __init__(self, connection: Redis, write: Callable[..., Path]) -> None:
        self.connection, self.write = connection, write
        self.client, self.moves = Client(connection), Transitions(connection)
        self.num_files = 0

    def submit(self, lines: Sequence[Row], model: str = MODEL, **options: Any) -> Submitted:
        self.num_files += 1
        source = self.write(*lines, name=f"{self.num_files}.jsonl")
        earlier = options.pop("earlier", None)
        found = BatchOptions(**{"reuse": True, **options})
        return self.client.submit(source, model=model, options=found, earlier=earlier)

    def work(
        self,
        maker: Maker = OURS,
        model: str = MODEL,
        *,
        failing: Sequence[str] = (),
        limits: ReuseLimits = LIMITS,
        reason: str = "stop",
        size: int = 0,
    ) -> list[str]:
        """Compute all rows that wait; their prompts, sorted."""
        queue, prompts, num_reused = redis_keys.queue_name(model), list[str](), 0
        held = InFlight(model, "w")
        held.maker = maker
        while True:
            run = self.moves.pull_run(queue, "w", 100, 60, maker=maker)
            num_reused += run.num_reused
            if not run.jobs and not run.has_more:
                return sorted(prompts)
            held.hold(run.jobs)
            endings = []
            for work in held.start(len(run.jobs)):
                assert isinstance(work, Work)
                prompt = str(work.request.prompt)
                prompts.append(prompt)
                text = f"to {prompt}{'.' * size}"
                event: Completed | Rejected = Completed(work.job_id, text, reason, Usage(5, 3))
                if prompt in failing:
                    event = Rejected(work.job_id, "engine_error", "it broke")
                ended = held.end(event)
                assert ended is not None
                endings.append(ended)
            self.moves.finish(queue, "w", endings, maker=maker, limits=limits)

    def results(self, submitted: Submitted) -> dict[str, Result]:
        found = self.client.results(submitted.batch_id)
        return {row.result.custom_id: row.result for row in found}

    def counts(self, submitted: Submitted) -> tuple[int, int, int]:
        """(ok, reused, queued) rows of a batch."""
        status = self.client.status(submitted.batch_id)
        return status.ok, status.reused, status.queued

    def remembered(self) -> list[bytes]:
        """The answers that the server remembers."""
        return sorted(self.connection.keys("batchkv:reuse:a:*"))


@pytest.fixture
def desk(redis_connection: Redis, write_lines: Callable[..., Path]) -> Desk:
    return Desk(redis_connection, write_lines)


def test_a_second_run_computes_only_the_edited_rows(desk: Desk) -> None:
    """Of 40 rows 4 are edited. Names, custom_ids, order and priority of the others do not count."""
    names = [f"p{n}" for n in range(40)]
    first = desk.submit(rows(*names))
    assert len(desk.work()) == 40
    edited = [name if n % 10 else f"{name} edited" for n, name in enumerate(reversed(names))]
    second = desk.submit(rows(*edited, prefix="n"), priority="high", keep_seconds=3600)
    assert desk.work() == sorted(name for name in edited if "edited" in name)
    status = desk.client.status(second.batch_id)
    assert (status.ok, status.reused, status.is_done) == (40, 36, True)
    assert status.whole_sum().startswith("40 = 40 ok (36 reused) + 0 failed")
    assert (status.prompt_tokens, status.kept_until > 0) == (5 * 4, True)
    before, after = desk.results(first), desk.results(second)
    assert {name[2:] for name in after} == set(edited)
    for name, result in after.items():
        assert result.text == f"to {name[2:]}" and result.usage == Usage(5, 3)
        assert result.reused == ("edited" not in name)
        assert output_line("id-1", result).endswith('"reused":true}') == result.reused
        assert desk.client.job(redis_keys.job_id(second.batch_id, 1)).status == "ok"
    assert not any(result.reused for result in before.values())


@pytest.mark.parametrize(
    "maker",
    [
        Maker("b" * 32, "affine8", "half"),
        Maker("a" * 32, "affine4", "half"),
        Maker("a" * 32, "affine8", "float32"),
        NOBODY,
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_no_answer_of_other_weights_schemes_or_dtypes_is_reused(
    desk: Desk, maker: Maker, mixed: bool
) -> None:
    """Who takes the row decides, also in a batch that several schemes may compute."""
    desk.submit(rows("a", "b"), mixed=mixed)
    desk.work()
    second = desk.submit(rows("a", "c"), mixed=mixed)
    assert desk.work(maker) == ["a", "c"]
    assert desk.counts(second) == (2, 0, 0)


def test_a_reused_row_binds_its_batch_to_its_maker(desk: Desk) -> None:
    """The fleet changes between submit and run: who comes first has the whole batch."""
    other = Maker("b" * 32, "affine8", "half")
    desk.submit(rows("a", "b"))
    desk.work()
    second = desk.submit(rows("a", "c"))
    assert desk.moves.pull_run(second.queue, "w", 0, 60, maker=OURS).jobs == []
    assert desk.work(other) == ["a", "c"]  # nothing was taken before
    third = desk.submit(rows("a", "d"))
    desk.connection.lrem(redis_keys.queue(third.queue), 0, redis_keys.job_id(third.batch_id, 2))
    assert desk.work() == []
    assert desk.client.status(third.batch_id).maker == OURS
    desk.connection.rpush(redis_keys.queue(third.queue), redis_keys.job_id(third.batch_id, 2))
    assert desk.work(other) == []
    assert desk.work() == ["d"]


def test_another_model_or_adapter_has_its_own_answers(desk: Desk) -> None:
    """The same weights under another name, and an adapter, compute the row themselves."""
    desk.submit(rows("a"))
    desk.work()
    for model in ("another/model", f"{MODEL}@support"):
        desk.submit(rows("a"), model)
        assert desk.work(model=model) == ["a"]


def test_every_field_that_decides_an_answer_counts(desk: Desk) -> None:
    """Rows that ask for something else are computed, each once."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    others: list[Row] = [
        {"max_tokens": 8}, {"seed": 1}, {"n": 2}, {"logprobs": 2}, {"stop": "x"}, {"top_k": 3},
        {"logit_bias": {"5": 1}}, {"min_tokens": 2}, {"return_token_ids": True},
        {"repetition_penalty": 1.1},
    ]  # fmt: skip
    lines = [row for said in ({}, *others) for row in rows("a", prefix=str(said), **said)]
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 9}
    lines += [chat, {**chat, "tools": [tool]}]
    lines += [{**chat, "tools": [tool], "tool_choice": "required"}]
    lines += [{**chat, "response_format": {"type": "json_object"}}]
    lines += [{**chat, "chat_template_kwargs": {"enable_thinking": False}}]
    desk.submit(lines)
    assert len(desk.work()) == len(lines) == len(desk.remembered())
    again = desk.submit([*reversed(lines), *rows("new")])
    assert desk.work() == ["new"]
    assert desk.counts(again) == (len(lines) + 1, len(lines), 0)


def test_rows_that_sample_are_computed_each_time(desk: Desk) -> None:
    """Without a seed answers are meant to differ. The submit says how many rows that concerns."""
    sampled = [*rows("a", temperature=0.7), *rows("b", temperature=None)]
    first = desk.submit([*sampled, *rows("c"), *rows("d", temperature=0.7, seed=3)])
    assert "2 rows are computed in spite of --reuse" in first.reuse_note
    desk.work()
    assert len(desk.remembered()) == 2
    desk.submit([*rows("d", temperature=0.7, seed=3), *rows("c"), *sampled])
    assert desk.work() == ["a", "b"]
    assert desk.submit(rows("e")).reuse_note == ""


def test_failed_rows_are_never_remembered_and_batches_without_the_flag_neither(desk: Desk) -> None:
    """A failed row is computed again, by a retry or the next batch. The flag is off by default."""
    first = desk.submit(rows("a", "b"))
    desk.work(failing=["a"])
    plain = desk.submit(rows("b", "p"), reuse=False)
    assert desk.work() == ["b", "p"]
    second = desk.submit(rows("p", "a", "b"))
    assert desk.work(failing=["p"]) == ["a", "p"]
    assert desk.client.retry(first.batch_id) == 1
    assert desk.work() == []  # by now the answer to "a" is remembered
    assert [desk.counts(batch)[1] for batch in (first, plain, second)] == [1, 0, 1]
    assert desk.client.status(first.batch_id).failed == 0


def test_scopes_share_no_answers(desk: Desk) -> None:
    """What one key of the gateway computed ends no row of another key, nor of the command."""
    for scope in ("1a2b3c4d", "99887766"):
        desk.submit(rows("a", scope), reuse_scope=scope)
        assert desk.work() == sorted(["a", scope])
    desk.submit(rows("a", "b"))
    assert desk.work() == ["a", "b"]
    desk.submit(rows("a", "c"), reuse_scope="99887766")
    assert desk.work() == ["c"]


def test_forget_finds_answers_of_workers_with_other_settings(desk: Desk) -> None:
    """The list of a batch's answers lasts as long as the last of them, whoever stored it."""
    batch = desk.submit(rows("a", "b"))
    desk.work(limits=ReuseLimits(keep_seconds=90_000), failing=["b"])
    desk.client.retry(batch.batch_id)
    desk.work(limits=ReuseLimits(keep_seconds=3600))
    assert desk.connection.ttl(f"batchkv:reuse:of:{batch.batch_id}") > 3600
    desk.client.forget(batch.batch_id)
    assert desk.remembered() == []


def test_forget_leaves_an_answer_that_another_batch_stored_again(desk: Desk) -> None:
    """The first batch's answer had expired, and the list of its answers had not."""
    first = desk.submit(rows("a"))
    desk.work()
    desk.connection.delete(*desk.remembered())
    second = desk.submit(rows("a", prefix="d"))
    assert desk.work() == ["a"]
    desk.client.forget(first.batch_id)
    assert len(desk.remembered()) == 1
    desk.client.forget(second.batch_id)
    assert desk.remembered() == []
    assert desk.connection.zcard("batchkv:reuse:order") == 0


def test_forget_deletes_what_the_batch_had_stored(desk: Desk, monkeypatch: Any) -> None:
    """Answers of other batches stay. An expired batch's answers are forgotten with its id."""
    monkeypatch.setattr("batchkv_producer.manage.forget.PAGE_LINES", 2)
    first = desk.submit(rows("a", "b", "c", "d", "e"))
    desk.work()
    second = desk.submit(rows("a", "z"))
    desk.work()
    desk.client.forget(first.batch_id)
    assert len(desk.remembered()) == desk.connection.zcard(redis_keys.REUSE_ORDER) == 1
    assert desk.results(second)["c-a"].text == "to a"
    desk.connection.delete(redis_keys.batch(second.batch_id))  # as if its time were over
    desk.client.forget(second.batch_id)
    assert not desk.connection.keys("batchkv:reuse:*")
    desk.submit(rows("a", "b", "z", "y"))
    assert desk.work() == ["a", "b", "y", "z"]


def test_the_oldest_answers_go_when_there_are_too_many(desk: Desk) -> None:
    """The number is a setting. Answers that stay are still found."""
    limits = ReuseLimits(max_answers=3)
    desk.submit(rows("a", "b"))
    desk.work(limits=limits)
    desk.submit(rows("c", "d", "e"))
    desk.work(limits=limits)
    assert len(desk.remembered()) == desk.connection.zcard(redis_keys.REUSE_ORDER) == 3
    desk.submit(rows("c", "d", "e", "a"))
    assert desk.work(limits=limits) == ["a"]


def test_the_bytes_of_answers_are_bounded(desk: Desk) -> None:
    """All answers together stay below the limit. One that is too large is not remembered."""
    names = [f"p{n}" for n in range(60)]
    desk.submit(rows(*names))
    limits = ReuseLimits(max_bytes=5000)
    desk.work(limits=limits)
    sizes = [desk.connection.strlen(key) for key in desk.remembered()]
    assert 10 < len(sizes) < 60 and 3500 < sum(sizes) <= 5000
    desk.submit(rows("large"))
    desk.work(limits=ReuseLimits(max_bytes=16 * max(sizes)), size=500)
    assert max(map(desk.connection.strlen, desk.remembered())) == max(sizes)
    desk.submit(rows("none"))
    desk.work(limits=NOTHING_REMEMBERED)
    desk.submit(rows("none", "another"))
    assert desk.work() == ["another", "none"]


def test_answers_are_remembered_for_a_time(desk: Desk) -> None:
    """Each expires by itself. The rest of the index goes with the next answer that is stored."""
    desk.submit(rows("a", "b"))
    desk.work(limits=ReuseLimits(keep_seconds=100))
    for key in desk.connection.keys("batchkv:reuse:a:*"):
        assert 0 < desk.connection.ttl(key) <= 100
        desk.connection.delete(key)  # its time is over
    assert all(0 < desk.connection.ttl(key) <= 100 for key in desk.connection.keys("*reuse:of:*"))
    desk.submit(rows("a", "c"))
    assert desk.work() == ["a", "c"]
    assert len(desk.remembered()) == desk.connection.zcard(redis_keys.REUSE_ORDER) == 2


def test_a_cut_answer_counts_as_cut_again(desk: Desk) -> None:
    """An answer that ends at max_tokens is the answer to this request, and says so."""
    desk.submit(rows("a"))
    desk.work(reason="length")
    second = desk.submit([*rows("a"), *rows("b"), *rows("a", prefix="d")], dedupe=True)
    assert desk.work() == ["b"]
    status = desk.client.status(second.batch_id)
    assert (status.cut, status.reused, status.copied, status.ok) == (2, 1, 1, 3)
    assert desk.results(second)["d-a"].finish_reason == "length"


def test_a_duplicate_that_leads_is_reused_too(desk: Desk) -> None:
    """When the leader was canceled, the next one ends with the remembered answer."""
    desk.submit(rows("a"))
    desk.work()
    second = desk.submit([*rows("a"), *rows("a", prefix="d"), *rows("x")], dedupe=True)
    desk.client.cancel(redis_keys.job_id(second.batch_id, 1))
    assert desk.work() == ["x"]
    assert desk.client.status(second.batch_id).reused == 1


def test_an_answer_of_another_batch_may_be_kept_and_the_rest_reused(desk: Desk) -> None:
    """--from and --reuse together: each row gets its answer once, from the one or the other."""
    first = desk.submit(rows("a", "b"), reuse=False)
    desk.work()
    desk.submit(rows("c"))
    desk.work()
    earlier = EarlierBatch(first.batch_id)
    third = desk.submit(rows("a", "c", "d"), earlier=earlier)
    assert desk.work() == ["d"]
    status = desk.client.status(third.batch_id)
    assert (status.kept, status.reused, status.ok) == (1, 1, 3)


def test_a_row_whose_holder_died_is_reused(desk: Desk) -> None:
    """Its lease lapsed; meanwhile another batch got the answer. It ends once, and holds nothing."""
    first = desk.submit(rows("a"))
    (taken,) = desk.moves.pull_run(first.queue, "dead", 1, 1, maker=OURS).jobs
    desk.submit(rows("a", "b"))
    assert desk.work() == ["a", "b"]
    desk.connection.hset(redis_keys.job(taken.lease.job_id), "status", "queued")
    member = f"{taken.lease.job_id}:{taken.lease.execution}"
    desk.connection.zadd(redis_keys.registry("wip", first.queue), {member: 1})
    desk.connection.rpush(redis_keys.queue(first.queue), taken.lease.job_id)
    assert desk.work() == []
    assert desk.counts(first) == (1, 1, 0)
    assert not desk.connection.zcard(redis_keys.registry("wip", first.queue))
    assert desk.client.status(first.batch_id).running == 0
    late = InFlight(MODEL, "dead")
    late.hold([taken])
    (work,) = late.start(1)
    assert isinstance(work, Work)
    ended = late.end(Completed(work.job_id, "late", "stop", Usage(1, 1)))
    assert ended and desk.moves.finish(first.queue, "dead", [ended], maker=OURS) == ["lost"]


def test_finish_itself_remembers_only_answers_of_batches_with_the_flag(desk: Desk) -> None:
    """A worker may give the digest of any row: failed rows and other batches store nothing."""
    batches = [desk.submit(rows(name), reuse=name != "plain") for name in ("plain", "bad", "good")]
    for batch, outcome in zip(batches, ("ok", "failed", "ok"), strict=True):
        (job,) = desk.moves.pull_run(batch.queue, "w", 1, 60, maker=OURS).jobs
        result = encode_result(Result("x", "completion", outcome))  # type: ignore[arg-type]
        ended = JobResult(job.lease, outcome, result, digest=b"d" * 16)
        assert desk.moves.finish(batch.queue, "w", [ended], maker=OURS, limits=LIMITS) == ["ok"]
        assert len(desk.remembered()) == (batch is batches[2])


def test_a_batch_that_is_reused_as_a_whole_is_done(desk: Desk) -> None:
    """Its time to keep begins, and its duplicates have ended too."""
    desk.submit(rows("a", "b"))
    desk.work()
    lines = [*rows("b"), *rows("a"), *rows("a", prefix="d")]
    second = desk.submit(lines, keep_seconds=900, dedupe=True)
    assert desk.work() == []
    status = desk.client.status(second.batch_id)
    assert status.is_done and status.kept_until > 0 and not status.is_untouched
    assert (status.reused, status.copied, status.prompt_tokens) == (2, 1, 0)
    assert all(result.reused for result in desk.results(second).values())


def test_reports_and_status_count_reused_rows_apart(desk: Desk, redis_server: RedisServer) -> None:
    """They are no work of any worker. Both commands, and each row itself, say so."""
    desk.submit(rows("a", "b"))
    desk.work()
    batch = desk.submit(rows("a", "b", "c")).batch_id
    desk.work()
    facts = read_facts(desk.connection, batch)
    assert (facts.num_copies, [worker.ok for worker in facts.workers]) == (2, [1])
    words = "".join(all_sections(facts))
    assert "<dt>ok, reused</dt><dd>2</dd>" in words and "remembered answers" in words
    runner = CliRunner(env={"BATCHKV_REDIS_URL": redis_server.url})
    found = runner.invoke(cli, ["status", batch])
    assert "3 ok (2 reused)" in found.output and "reused         2 rows" in found.output
    shown = runner.invoke(cli, ["status", f"{batch}-1"]).output
    assert re.search(r"^reused +yes$", shown, re.MULTILINE) and "num_deaths" not in shown
    assert "reused" not in runner.invoke(cli, ["status", f"{batch}-3"]).output
    refused = runner.invoke(cli, ["submit", "--reuse", "--fresh", str(desk.write(*rows("a")))])
    assert refused.exit_code == 2 and "give one of them" in refused.output


def test_the_mark_of_a_reused_result_survives_a_gateway() -> None:
    """It is stored before the result, and sent within it. Results of older versions have none."""
    computed = Result("theirs", "chat", "ok", text="t", reasoning="r", finish_reason="stop")
    found = decode_result(b"+2:me" + encode_result(computed))
    assert (found.custom_id, found.reused, found.text) == ("me", True, "t")
    assert decode_result(encode_result(found)) == found
    assert not decode_result(b"=2:me" + encode_result(computed)).reused
    assert decode_result(encode_result(computed)) == computed
    with pytest.raises(WireError):
        decode_result(b"+9:me")


def test_the_flag_travels_over_http() -> None:
    """It is a header like the other options."""
    terms = Terms(options=BatchOptions(reuse=True))
    assert terms.headers() == {"x-batchkv-reuse": "1"}
    assert read_terms(terms.headers()).options.reuse
    assert not read_terms({"x-batchkv-reuse": "0"}).options.reuse


def test_one_pull_ends_a_bounded_number_of_rows(desk: Desk) -> None:
    """A large batch that is all remembered ends in several steps, and each says that more come."""
    names = [f"p{n}" for n in range(1100)]
    desk.submit(rows(*names))
    desk.work()
    second = desk.submit(rows(*names, prefix="n"))
    run = desk.moves.pull_run(second.queue, "w", 10, 60, maker=OURS)
    assert (run.num_reused, run.jobs, run.has_more) == (500, [], True)
    assert desk.work() == []
    assert desk.counts(second) == (1100, 1100, 0)


def test_reuse_and_fresh_exclude_each_other() -> None:
    """The one takes remembered answers, the other computes all rows."""
    with pytest.raises(UsageError, match="--fresh computes all rows"):
        BatchOptions(reuse=True, fresh=True)


def test_a_batch_keeps_what_it_was_submitted_with(desk: Desk) -> None:
    """A joined batch without the flag stays without it, and the submit says so."""
    source = desk.write(*rows("a"), name="in.jsonl")
    desk.client.submit(source, model=MODEL)
    found = desk.client.submit(source, model=MODEL, options=BatchOptions(reuse=True))
    assert found.joined and found.notes == ("it was submitted without --reuse, and stays so",)


def test_a_hub_with_older_rights_is_refused_and_works_without(desk: Desk) -> None:
    """--reuse names setup.sh there. Workers, pulls and forget need none of the new rights."""
    connection, old = desk.connection, "~batchkv:reuse:*"
    batch = desk.submit(rows("a", "b"))
    with user_of_hub(connection, "producer", without=old) as producer:
        sender = Client(producer)
        source = desk.write(*rows("c"), name="c.jsonl")
        with pytest.raises(BatchkvError, match=r"deploy/hub/setup\.sh of this version"):
            sender.submit(source, model=MODEL, options=BatchOptions(reuse=True))
        with user_of_hub(connection, "worker", without=old) as worker:
            desk.moves = Transitions(worker)
            assert desk.work() == ["a", "b"]
        assert desk.counts(batch) == (2, 0, 0) and not desk.remembered()
        sender.forget(batch.batch_id)
        assert not connection.exists(redis_keys.batch(batch.batch_id))

"""The same file with other weights, another KV scheme, or once more: no old answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.client import WorkerInfo
from batchkv_producer.errors import UsageError
from batchkv_producer.local.beginning import with_own_workers
from batchkv_producer.local.run import RunOptions, RunReport, run
from batchkv_producer.monitor.mismatch import find_mismatch
from batchkv_producer.progress import PlainReporter
from batchkv_producer.results.aside import set_aside
from batchkv_producer.results.outfile import errors_path
from batchkv_producer.submit.fingerprint import of_model
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions
from batchkv_producer.wire.maker import ABILITIES, Maker
from batchkv_producer.wire.transitions import Transitions
from support.batchkv_with_fake_worker import FAKE_WORKER

Write = Callable[..., Path]
FLOAT, AFFINE = (
    BatchOptions(maker=Maker(scheme="float")),
    BatchOptions(maker=Maker(scheme="affine8")),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def source(write_lines: Write) -> Path:
    """Three rows."""
    return write_lines(*({"custom_id": f"q{n}", "prompt": f"p{n}"} for n in (1, 2, 3)))


@pytest.fixture
def submit(client: Client, source: Path, model: Path) -> Callable[[BatchOptions], Submitted]:
    """Submits the file under some options."""
    return lambda options=NO_OPTIONS: client.submit(source, model=str(model), options=options)


class Notes(PlainReporter):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Runs:
    """``batchkv run`` with workers that only pretend, again and again."""

    def __init__(self, url: str, source: Path, model: Path) -> None:
        self.url, self.source, self.model = url, source, model
        self.out = source.with_name("out.jsonl")

    def __call__(
        self,
        batch_options: BatchOptions = NO_OPTIONS,
        scheme: str = "affine8",
        command: tuple[str, ...] = FAKE_WORKER,
    ) -> tuple[str, RunReport]:
        notes = Notes()
        arguments = ("--kv-scheme", scheme)
        options = RunOptions(
            self.source,
            self.out,
            str(self.model),
            worker_arguments=arguments,
            batch_options=batch_options,
        )
        with Redis.from_url(self.url) as connection:
            report = run(
                *(Client(connection), connection, self.url, options, notes),
                worker_command=command,
            )
        return " | ".join(notes.notes), report

    def marks(self, path: Path | None = None) -> list[str]:
        lines = (path or self.out).read_text("utf-8").splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return sorted({row["response"]["body"]["system_fingerprint"] for row in rows})


@pytest.fixture
def runs(redis_url: str, source: Path, model: Path) -> Runs:
    """Runs the file."""
    return Runs(redis_url, source, model)


def test_changed_weights_are_another_generation(
    submit: Callable[..., Submitted], model: Path, redis_connection: Redis
) -> None:
    """The first id is as it ever was; other files have the next; the old files the old one."""
    first = submit()
    assert (first.generation, first.base, first.joined) == (1, first.batch_id, False)
    (model / "model.safetensors").write_text("other")
    second = submit()
    assert (second.generation, second.base, second.joined) == (2, first.batch_id, False)
    assert second.batch_id != first.batch_id and second.batch_id in first.relatives
    said = redis_connection.hmget(redis_keys.batch(second.batch_id), "generation", "base")
    assert said == [b"2", first.batch_id.encode()]
    assert "weights" in second.why
    assert (submit().batch_id, submit().joined) == (second.batch_id, True)
    (model / "model.safetensors").write_text("weights")
    assert submit().batch_id == first.batch_id


def test_a_scheme_belongs_to_a_generation_once_it_is_known(
    submit: Callable[..., Submitted],
) -> None:
    """Who names another scheme gets another generation, who names none the newest that fits."""
    first, second = submit(AFFINE), submit(FLOAT)
    assert [first.generation, second.generation] == [1, 2]
    assert submit().batch_id == second.batch_id
    assert submit(AFFINE).batch_id == first.batch_id


def test_fresh_is_always_the_next(submit: Callable[..., Submitted], client: Client) -> None:
    """It takes no number twice while the server remembers it; then the newest goes on."""
    assert [submit(BatchOptions(fresh=True)).generation for _ in range(3)] == [1, 2, 3]
    assert submit().generation == 3
    client.forget(submit().batch_id)
    assert submit().generation == 2


def test_the_file_of_a_later_generation_is_known_again(
    submit: Callable[..., Submitted], client: Client, source: Path, redis_connection: Redis
) -> None:
    """Rows whose jobs are gone come back from it, as in the first generation."""
    submit()
    batch = submit(BatchOptions(fresh=True)).batch_id
    client.cancel(batch)
    redis_connection.delete(*(redis_keys.job(f"{batch}-{line}") for line in (1, 2, 3)))
    assert client.retry(batch, canceled=True, source=source) == 3


def test_a_batch_whose_results_expired_keeps_its_number(
    submit: Callable[..., Submitted], redis_connection: Redis
) -> None:
    """Its id stays known, so that a fresh one has another; without one it is made anew, as ever."""
    first = submit()
    redis_connection.delete(redis_keys.batch(first.batch_id))
    assert submit(BatchOptions(fresh=True)).generation == 2
    assert submit().generation == 2


def test_a_batch_that_says_nothing_is_joined(
    submit: Callable[..., Submitted], redis_connection: Redis
) -> None:
    """One of the first version goes on under its id, and says from then on what is known."""
    first = submit()
    key = redis_keys.batch(first.batch_id)
    redis_connection.hdel(key, "fingerprint")
    again = submit(AFFINE)
    assert (again.batch_id, again.joined, again.generation) == (first.batch_id, True, 1)
    assert redis_connection.hget(key, "scheme") == b"affine8"
    assert redis_connection.hexists(key, "fingerprint")


def test_mixed_lets_other_schemes_in(
    submit: Callable[..., Submitted], redis_connection: Redis
) -> None:
    """The same batch goes on; but who wants one scheme alone does not get answers of several."""
    first = submit(AFFINE)
    assert submit(BatchOptions(mixed=True)).batch_id == first.batch_id
    assert redis_connection.hget(redis_keys.batch(first.batch_id), "mixed") == b"1"
    assert submit().batch_id == first.batch_id
    assert submit(AFFINE).generation == 2


def test_the_loser_of_a_race_makes_the_next_generation(
    submit: Callable[..., Submitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two submits with different schemes at once never share a batch."""
    real = Transitions.create
    others: list[Submitted] = []

    def overtaken(self: Transitions, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Transitions, "create", real)
        others.append(submit(FLOAT))
        return real(self, *args, **options)

    monkeypatch.setattr(Transitions, "create", overtaken)
    ours = submit(AFFINE)
    assert (others[0].generation, ours.generation) == (1, 2)


def test_run_hands_out_no_answers_of_other_weights(runs: Runs, model: Path) -> None:
    """After the files have changed all is computed anew, and the old OUT is kept elsewhere."""
    _, first = runs()
    old = runs.marks()
    told, _ = runs()
    assert "; all 3 answered before (the last 20" in told and "affine8)" in told
    (model / "model.safetensors").write_text("other")
    told, second = runs()
    assert "generation 2 of " + first.status.batch_id in told and "starts: 3 rows" in told
    assert "answers of another generation" in told
    assert second.status.ok == 3 and len(runs.out.read_text().splitlines()) == 3
    assert runs.marks() != old == runs.marks(runs.out.with_name("out.jsonl.1.old.jsonl"))
    assert not errors_path(runs.out).exists()


def test_run_hands_out_no_answers_of_another_scheme(runs: Runs) -> None:
    """One after the other; and going back finds what that scheme had computed."""
    _, first = runs(scheme="float")
    _, second = runs(scheme="affine2")
    assert [mark.rpartition("_")[2] for mark in runs.marks()] == ["affine2"]
    assert first.status.batch_id != second.status.batch_id
    told, third = runs(scheme="float")
    assert third.status.batch_id == first.status.batch_id and "all 3 answered before" in told
    assert [mark.rpartition("_")[2] for mark in runs.marks()] == ["float"]
    assert runs.out.with_name("out.jsonl.2.old.jsonl").exists()


def test_run_says_when_nothing_is_computed(runs: Runs) -> None:
    """Without its OUT it writes what is stored, and says so; --fresh computes."""
    runs()
    runs.out.unlink()
    told, report = runs()
    assert "all 3 answered before" in told and "--fresh computes anew" in told
    assert report.completion_tokens == 0 and len(runs.out.read_text().splitlines()) == 3
    told, report = runs(BatchOptions(fresh=True))
    assert "generation 2 of" in told and "answered before" not in told
    assert report.completion_tokens > 0


def test_an_out_of_other_weights_under_the_same_id_is_moved_aside(
    runs: Runs, model: Path, redis_connection: Redis
) -> None:
    """A forgotten batch is made anew under its id: the file itself says what made its answers."""
    _, report = runs()
    Client(redis_connection).forget(report.status.batch_id)
    (model / "model.safetensors").write_text("other")
    told, again = runs()
    assert again.status.batch_id == report.status.batch_id
    assert "answers of another generation" in told
    assert runs.marks() == [Maker(of_model(str(model)), "affine8").mark()]


def test_a_scheme_that_is_none_is_refused_by_its_name() -> None:
    """Before anything is queued, whether a flag or a variable says it."""
    assert with_own_workers(NO_OPTIONS, (), {}).maker == Maker("", "affine8", "")
    said = {"BATCHKV_KV_SCHEME": "k8v4", "BATCHKV_DTYPE": "bfloat16"}
    assert with_own_workers(NO_OPTIONS, (), said).maker == Maker("", "affine8+affine4", "half")
    with pytest.raises(UsageError, match="BATCHKV_KV_SCHEME nonsense: "):
        with_own_workers(NO_OPTIONS, (), {"BATCHKV_KV_SCHEME": "nonsense"})


def test_rows_that_wait_for_other_weights_are_told_of(
    submit: Callable[..., Submitted], client: Client
) -> None:
    """What they wait for, who has what, and the way out; not while any worker may take them."""
    batch = client.status(submit(AFFINE).batch_id)
    mini = WorkerInfo("mini2", "h", 1, (batch.queue,), "idle", 0.0, 0, 0, 0, scheme="affine8")
    mini = replace(mini, abilities=ABILITIES)
    other = replace(mini, fingerprint="9c11" + "0" * 28)
    found = find_mismatch(batch, [other])
    assert found is not None
    weights = f"weights {batch.fingerprint[:4]}"
    assert f"3 rows wait for {weights}; mini2 has weights 9c11. " in found.note
    assert "--fresh" in found.note
    assert find_mismatch(batch, [other, mini]) is None  # one that does not say what it has
    assert find_mismatch(batch, []) is None
    scheme = replace(mini, fingerprint=batch.fingerprint, scheme="float")
    found = find_mismatch(batch, [scheme])
    assert (
        found is not None and "wait for KV scheme affine8; mini2 has KV scheme float" in found.note
    )
    assert "--kv-scheme affine8" in found.note and "--mixed" in found.note


def test_rows_that_need_more_than_a_worker_can_are_told_of(
    submit: Callable[..., Submitted], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of this version passes them by, an older one fails them: both are said."""
    monkeypatch.setattr("batchkv_producer.wire.maker._NEEDS", (("sing", lambda request: True),))
    batch = client.status(submit().batch_id)
    assert batch.needs == "sing"
    mini = WorkerInfo("mini2", "h", 1, (batch.queue,), "idle", 0.0, 0, 0, 0, abilities=())
    found = find_mismatch(batch, [mini])
    assert found and "3 rows wait for a worker that can do sing; mini2 cannot" in found.note
    assert find_mismatch(batch, [mini, replace(mini, abilities=("sing",))]) is None
    found = find_mismatch(batch, [replace(mini, abilities=None)])
    assert found and "mini2 would fail rows of batch" in found.note


def test_a_worker_without_the_library_of_grammars_is_told_what_to_install(
    submit: Callable[..., Submitted], client: Client
) -> None:
    """A worker that lacks this ability alone needs no newer version."""
    batch = replace(client.status(submit().batch_id), needs="fields grammar")
    mini = WorkerInfo("mini2", "h", 1, (batch.queue,), "idle", 0.0, 0, 0, 0, abilities=("fields",))
    found = find_mismatch(batch, [mini])
    assert found and found.note.endswith("Install llguidance for a worker of this queue: "
                                         "batchkv[worker] has it")  # fmt: skip
    found = find_mismatch(batch, [replace(mini, abilities=())])
    assert found and found.note.endswith("Upgrade a worker of this queue")


def test_a_worker_whose_model_has_changed_is_started_again(runs: Runs, tmp_path: Path) -> None:
    """At once, as no death of anybody's; its rows are done by the next."""
    script = 'if [ -e "$0" ]; then exec "$@"; fi; : > "$0"; exit 72'
    told, report = runs(command=("/bin/sh", "-c", script, str(tmp_path / "mark"), *FAKE_WORKER))
    assert "have changed since it loaded them; it is started again" in told
    assert report.status.ok == 3


def test_status_and_wait_say_what_rows_wait_for(
    submit: Callable[..., Submitted],
    redis_connection: Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them, with the way out, as long as a worker serves the queue that does not fit."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    monkeypatch.setenv("COLUMNS", "500")
    submitted = submit(AFFINE)
    key = redis_keys.worker("mini2")
    about = {"birth": "2026-01-01T00:00:00.000000Z", "queues": submitted.queue, "pid": "1"}
    about |= {"bkv_fingerprint": "9c11" + "0" * 28, "bkv_scheme": "affine8", "bkv_dtype": "half"}
    redis_connection.hset(key, mapping={**about, "bkv_abilities": " ".join(ABILITIES)})
    redis_connection.sadd("rq:workers", key)
    redis_connection.sadd(f"rq:workers:{submitted.queue}", key)
    batch = submitted.batch_id
    for command in (["status"], ["status", batch], ["wait", batch, "--timeout", "0.1"]):
        shown = CliRunner().invoke(cli, command).output
        assert "3 rows wait for weights" in shown, (command, shown)
        assert "mini2 has weights 9c11" in shown and "--fresh" in shown
    assert "weights 9c11, affine8" in CliRunner().invoke(cli, ["workers"]).output


def test_what_a_kill_moved_half_stays_together(tmp_path: Path) -> None:
    """OUT follows the errors file that a process moved aside before it was killed."""
    out = tmp_path / "out.jsonl"
    out.write_text("answers\n")
    moved = tmp_path / "out.jsonl.1.old.jsonl"
    errors_path(moved).write_text("errors\n")  # as a kill between the two moves leaves them
    assert set_aside(out) == moved
    assert (moved.read_text(), errors_path(moved).read_text()) == ("answers\n", "errors\n")
    out.write_text("others\n")
    errors_path(out).write_text("their errors\n")
    errors_path(tmp_path / "out.jsonl.2.old.jsonl").write_text("somebody's\n")
    assert set_aside(out) == tmp_path / "out.jsonl.3.old.jsonl"

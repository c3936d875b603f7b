"""run and wait print why a batch is slow, and why rows of it failed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.cli.outcome import say_end
from batchkv_producer.local.run import RunReport
from batchkv_producer.monitor.delays import Delay, Delays, find_delay, unserved_note
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo, local_name_prefix
from batchkv_producer.progress import PlainReporter, Snapshot
from batchkv_producer.results.failures import MAX_LINES_SHOWN, Failures, failure_lines, grouped
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import decode_job, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions, iso_now

MODEL = "m"
QUEUE = redis_keys.queue_name(MODEL)
Write = Callable[..., Path]


def status(**values: object) -> BatchStatus:
    names = BatchStatus.__dataclass_fields__
    base: dict[str, object] = dict.fromkeys(names, 0)
    base |= {"queue": "batchkv:m-1", "model": "m", "total": 2, "is_submitted": True, **values}
    return BatchStatus(**base)  # type: ignore[arg-type]


def worker(doing: str = "") -> WorkerInfo:
    return WorkerInfo("w", "host", 1, ("batchkv:m-1",), "idle", 0.0, 0, 0, 0, doing=doing)


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_a_batch_that_waits_for_others_says_so(priority: str) -> None:
    """Those before it in its queue, while no worker holds a row of it; and how to go first."""
    found: list[BatchStatus] = []
    said: list[str] = []
    now = [0.0]
    delays = Delays(
        lambda _: [worker()], said.append, clock=lambda: now[0], open_batches=lambda _: found
    )
    own = status(batch_id="own", created=50, priority=priority, total=4)

    def words(**changes: object) -> str:
        now[0] += 2
        return delays.look(replace(own, **changes))  # type: ignore[arg-type]

    later = status(batch_id="later", created=60, priority=priority, total=9)
    low = status(batch_id="low", created=10, priority="low", total=9)
    found[:] = [own, later, low]
    assert words() == "" and not said
    earlier = status(batch_id="earlier", created=40, priority=priority, total=9, ok=2, running=3)
    found.append(earlier)
    assert words() == words() == "rows of other batches come first"
    assert words(running=1) == "" and words(is_submitted=False) == ""
    (note,) = said
    assert note.startswith("rows of batch earlier come first: `batchkv cancel earlier` ends them")
    assert ("--priority high" in note) is (priority == "normal")


class House:
    """Delays of one batch, with workers that come and go and a clock that the test sets."""

    def __init__(self, num_local: int = 0) -> None:
        self.now = 0.0
        self.serving: list[WorkerInfo] = []
        self.said: list[str] = []
        self.delays = Delays(
            lambda _: self.serving, self.said.append, num_local, clock=lambda: self.now
        )

    def after(self, seconds: float, *serving: WorkerInfo) -> str:
        self.now += seconds
        self.serving = list(serving)
        return self.delays.look(status())


def test_nobody_serving_is_said_at_once_and_once() -> None:
    """A queue without workers is reported at the first look, once, with the command that starts a
    worker."""
    house = House()
    assert house.after(0) == "nobody serves the queue"
    assert len(house.said) == 1 and "batchkv worker -m m" in house.said[0]
    for _ in range(100):
        house.after(1)
    assert len(house.said) == 1


def test_a_run_whose_own_workers_do_not_fit_is_hopeless_after_a_while() -> None:
    """A run is hopeless after half a minute in which only its own workers served and none fitted.
    Other workers could still be restarted with what fits."""
    wanted = status(fingerprint="aa", batch_id="b" * 16)
    own = replace(worker(), name=f"{local_name_prefix('b' * 16)}-1", fingerprint="bb")
    for serving, ends in (([own], True), ([own, replace(own, name="mini2")], False)):
        house = House(num_local=1)
        house.serving = serving
        for second in range(40):
            house.now += 1
            house.delays.look(wanted)
            assert house.delays.is_hopeless == (ends and second >= 30)
        house.serving = [replace(own, fingerprint="aa")]  # one that fits
        house.now += 1
        house.delays.look(wanted)
        assert not house.delays.is_hopeless


def test_a_worker_that_was_there_has_time_to_come_back() -> None:
    """The bar shows a missing worker at once; the sentence waits for half a minute."""
    house = House()
    assert house.after(0, worker()) == ""
    for second in range(1, 60):
        assert house.after(1) == "nobody serves the queue"
        assert len(house.said) == (second >= 30)


def test_a_submit_that_brings_nothing_for_a_while_was_interrupted() -> None:
    """A submit that adds nothing for a while is reported as interrupted, with and without workers.
    One that still adds rows is not."""
    for serving in ([worker()], []):
        house = House(num_local=1)
        house.serving = serving
        for second in range(100):
            house.now += 1
            words = house.delays.look(status(is_submitted=False, chunks=min(second // 20, 2)))
            assert (words == "the submit was interrupted") == (second >= 70)
        assert len(house.said) == 1 and "same submit command" in house.said[0]
        house.now += 1
        assert house.delays.look(status(chunks=3)) == ("" if serving else "a worker is starting")


def test_loading_is_shown_while_no_worker_is_ready() -> None:
    """The progress shows the state of the first worker that loads, until one takes rows."""
    house = House(num_local=1)
    assert house.after(0) == "a worker is starting" and not house.said
    assert house.after(2, worker("downloading 1.2 of 7.3 GB")) == "downloading 1.2 of 7.3 GB"
    assert house.after(2, worker("loading 2.1 of 7.3 GB"), worker()) == ""
    assert house.after(0.5, worker("loading 2.1 of 7.3 GB")) == ""  # not looked again so soon
    assert house.after(2, worker("loading 2.1 of 7.3 GB")) == "loading 2.1 of 7.3 GB"
    assert house.delays.look(status(ok=2)) == ""
    assert not house.said


def test_a_run_whose_own_worker_is_starting_asks_for_no_other() -> None:
    """If other workers do not fit but the run's own is starting, there is no note. There is one if
    its own does not fit, or if it has none."""
    batch = status(batch_id="0123456789abcdef", scheme="affine4", needs="")
    other = replace(worker(), scheme="affine8")
    own = replace(other, name="run-01234567-1-ab")

    def found(num_local: int, *serving: WorkerInfo) -> Delay | None:
        return find_delay(batch, serving, num_local)

    assert found(1, other) == Delay("a worker is starting")
    for delay in (found(0, other), found(1, other, own)):
        assert delay is not None and "Start a worker with --kv-scheme affine4" in delay.note


def test_a_worker_that_is_away_is_named_with_its_rows() -> None:
    """The worker that is away and holds most rows is named. One that holds none is no delay."""
    house = House()
    sleepers = [
        replace(worker(), name=name, is_away=True, num_running=held)
        for name, held in (("mini1", 0), ("mini2", 78), ("mini3", 1))
    ]
    assert house.after(0, worker(), *sleepers) == "mini2 is asleep or away and holds 78 rows"
    assert house.after(2, worker(), *sleepers[::2]) == "mini3 is asleep or away and holds 1 row"
    assert house.after(2, worker(), sleepers[0]) == ""


def test_a_pause_of_all_workers_is_a_reason() -> None:
    """It is a delay if every worker is paused or away. It is none if one works."""
    house = House()
    paused = worker("paused: on battery")
    away = replace(worker(), is_away=True)
    assert house.after(0, paused, away) == "w is paused: on battery"
    assert house.after(2, paused, worker()) == ""
    assert house.said == []


def test_a_worker_that_is_short_of_memory_is_a_reason() -> None:
    """It computes fewer rows at once than it could; other reasons come first."""
    short = replace(worker("short of memory"), name="mini")
    found = find_delay(status(), [worker(), short])
    assert found == Delay("mini is short of memory, so fewer rows decode at once")
    assert find_delay(status(), [worker("loading 1 of 2 GB"), worker("loading")]) != found


def test_suspects_that_wait_are_told_of(redis_connection: Redis) -> None:
    """Suspects are reported as long as they wait. Rows that no worker has had are not."""
    client = Client(redis_connection)
    source = io.BytesIO(
        b"".join(b'{"messages": [{"role": "user", "content": "p%d"}]}\n' % n for n in range(9))
    )
    batch = client.submit(source, model=MODEL).batch_id
    moves = Transitions(redis_connection)
    said: list[str] = []
    now = [0.0]
    delays = Delays(
        *(lambda _: [worker()], said.append, 0, lambda: now[0]), count_apart=client.count_apart
    )

    def words() -> str:
        now[0] += 2
        return delays.look(client.status(batch))

    assert words() == ""
    moves.give_back(QUEUE, [job.lease for job in moves.pull(QUEUE, "w", 8, 60)], died=True)
    assert words() == "8 rows wait to run apart: a worker died with them"
    moves.pull(QUEUE, "w", 7, 60)
    assert words() == "1 row waits to run apart: a worker died with it"
    moves.pull(QUEUE, "w", 1, 60)
    assert words() == ""
    redis_connection.set("rq:job:planted", "text")
    redis_connection.lpush(redis_keys.queue(QUEUE), "planted", b"\xff")
    assert words() == "" and not said


def test_a_plain_line_comes_at_once_for_a_new_delay(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line about a delay does not wait for the interval; later ones do."""
    now = [0.0]
    plain = PlainReporter(lambda: now[0])
    for text in ("", "loading 1.0 of 7.3 GB", "loading 2.0 of 7.3 GB", "measuring"):
        now[0] += 0.5
        plain.update(Snapshot(5, delay=text))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["0/5 0 held, loading 1.0 of 7.3 GB", "0/5 0 held, measuring"]


# ---- the command line ----


@pytest.fixture
def at_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)


def batchkv(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def end(connection: Redis, outcomes: dict[str, tuple[str, str] | str]) -> None:
    """End queued rows as a worker would: with an error by custom_id, or with a finish reason."""
    moves = Transitions(connection)
    endings = []
    for row in moves.pull(QUEUE, "w", 100, 60):
        custom_id = decode_job(row.data).custom_id
        how = outcomes.get(custom_id, "stop")
        outcome = "ok" if isinstance(how, str) else "failed"
        result = RowResult(
            custom_id,
            "completion",
            outcome,  # type: ignore[arg-type]
            MODEL,
            error=None if isinstance(how, str) else how,
        )
        is_cut = how == "length"
        endings.append(JobResult(row.lease, outcome, encode_result(result), is_cut=is_cut))
    moves.finish(QUEUE, "w", endings)


@pytest.mark.usefixtures("at_server")
def test_submit_says_at_once_that_nobody_serves(
    write_lines: Write, redis_connection: Redis
) -> None:
    """If no worker serves the queue, submit names the command that starts one. Else it says
    nothing."""
    source = write_lines({"prompt": "a"})
    found = batchkv("submit", source, "-m", MODEL)
    assert found.exit_code == 0 and "nobody serves the queue" in found.stderr
    assert "batchkv worker -m m" in found.stderr
    key = redis_keys.worker("w")
    redis_connection.hset(key, mapping={"birth": "2026-01-01T00:00:00Z", "queues": QUEUE})
    redis_connection.sadd(f"rq:workers:{QUEUE}", key)
    assert "nobody" not in batchkv("submit", source, "-m", MODEL).stderr


@pytest.mark.usefixtures("at_server")
def test_wait_says_at_once_that_nobody_serves(write_lines: Write) -> None:
    """wait reports a queue without workers even if it waits for a tenth of a second only."""
    batch = batchkv("submit", write_lines({"prompt": "a"}), "-m", MODEL).stdout.strip()
    found = batchkv("wait", batch, "--timeout", "0.1")
    assert "nobody serves the queue" in found.stderr and "batchkv worker -m m" in found.stderr


@pytest.mark.usefixtures("at_server")
def test_wait_gives_the_reasons_of_failed_rows(write_lines: Write, redis_connection: Redis) -> None:
    """wait prints reasons by code, with lines and a message, also of rows that are wrong in the
    input. So does --json."""
    rows = [{"custom_id": f"c{n}", "prompt": "p"} for n in range(1, 8)]
    source = write_lines(*rows, {"prompt": 5})
    batch = batchkv("submit", source, "-m", MODEL).stdout.strip()
    long = ("context_length_exceeded", "too\nlong")
    end(redis_connection, {"c2": long, "c4": ("engine_error", "it broke"), "c6": long})
    found = batchkv("wait", batch)
    assert "batchkv: 2 rows context_length_exceeded: lines 2, 6: too long\n" in found.stderr
    assert "batchkv: 1 row engine_error: line 4: it broke\n" in found.stderr
    assert "1 row invalid_request: line 8: " in found.stderr
    as_json = json.loads(batchkv("wait", batch, "--json").stdout)
    first = as_json["failures"][0]
    assert (first["code"], first["count"], first["lines"]) == ("context_length_exceeded", 2, [2, 6])


def test_many_failures_are_a_few_lines() -> None:
    """For a code twenty lines are named and the others counted. The number of codes is limited,
    too."""

    def failed(code: str, why: str = "why") -> RowResult:
        return RowResult("c", "chat", "failed", "m", error=(code, why))

    groups = grouped((line, failed("timeout")) for line in range(100, 0, -1))
    (line, rest) = failure_lines(groups, 103)
    assert line.startswith("100 rows timeout: lines 1, 2, 3, ")
    assert line.endswith(f"{MAX_LINES_SHOWN} and 80 more: why")
    assert rest == "3 rows failed besides these"
    assert len(grouped((n, failed(f"code{n:03}")) for n in range(100))) == 20
    (several,) = grouped((line, failed("timeout", f"why {line}")) for line in (3, 5))
    assert several.text() == "2 rows timeout: lines 3, 5; line 3: why 3"


@pytest.mark.usefixtures("at_server")
def test_answers_that_were_cut_are_counted(write_lines: Write, redis_connection: Redis) -> None:
    """ok rows that were cut at max_tokens are counted in the sum and in --json."""
    source = write_lines(*({"custom_id": f"c{n}", "prompt": "p"} for n in range(3)))
    batch = batchkv("submit", source, "-m", MODEL).stdout.strip()
    end(redis_connection, {"c0": "length", "c2": "length"})
    assert batchkv("wait", batch).stdout == (
        "3 = 3 ok (2 cut at max_tokens) + 0 failed + 0 canceled\n"
    )
    assert json.loads(batchkv("status", batch, "--json").stdout)["cut"] == 2
    assert "3 ok (2 cut at max_tokens)" in batchkv("status", batch).stdout


@pytest.mark.parametrize("copies", [1, 1000])
def test_copies_of_a_cut_answer_are_cut(
    client: Client, write_lines: Write, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Duplicates of a cut row count as cut, also those that get their copy in a later step."""
    monkeypatch.setattr("batchkv_producer.wire.transitions.COPIES", copies)
    lines = [{"prompt": "p", "temperature": 0}] * 4
    batch = client.submit(
        write_lines(*lines), model=MODEL, options=BatchOptions(dedupe=True)
    ).batch_id
    end(client._connection, {"line-1": "length"})
    Transitions(client._connection).copy(QUEUE)
    found = client.status(batch)
    assert (found.ok, found.cut, found.copied) == (4, 4, 3)


@pytest.mark.usefixtures("at_server")
def test_wait_shows_how_far_loading_is(write_lines: Write, redis_connection: Redis) -> None:
    """The first line of the progress shows what the worker of the queue reports."""
    batch = batchkv("submit", write_lines({"prompt": "a"}), "-m", MODEL).stdout.strip()
    key, doing = redis_keys.worker("w"), "loading 2.1 of 7.3 GB"
    about = {"birth": "2026-01-01T00:00:00Z", "queues": QUEUE, "bkv_state": doing}
    about["last_heartbeat"] = iso_now()
    redis_connection.hset(key, mapping=about)  # type: ignore[arg-type]
    redis_connection.sadd(f"rq:workers:{QUEUE}", key)
    found = batchkv("wait", batch, "--timeout", "0.1")
    assert f"0/1 0 held, {doing}\n" in found.stderr and "nobody" not in found.stderr


def hints(
    capsys: pytest.CaptureFixture[str], failures: list[Failures], num_wrong: int, **values: object
) -> str:
    """The last line of ``run``, which says how to go on."""
    found = status(batch_id="b", failed=sum(group.count for group in failures), **values)
    say_end(RunReport(found, Path("out"), 0, 0.0, 0, 0, num_wrong), failures)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "rows failed: " in line)
    return line


def test_the_end_of_a_run_names_a_retry_only_where_it_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No retry is suggested for rows that are too long. After a deadline the retry has another
    one."""
    long = Failures("context_length_exceeded", 2, (1, 2), "")
    wrong, died = Failures("invalid_json", 1, (3,), ""), Failures("engine_error", 1, (4,), "")
    line = hints(capsys, [long, wrong], 1)
    assert "2 rows are too long. Where it is for the model, correct the file; where" in line
    assert "it is for the memory, give the worker more and run `batchkv retry b`" in line
    assert "1 row is wrong in the input: correct the file" in line and "queues" not in line
    line = hints(capsys, [long, died], 0)
    assert "`batchkv retry b` queues the others again, and `batchkv run` of the same" in line
    refused = Failures("unsupported_parameter", 2, (5, 6), "")
    line = hints(capsys, [wrong, refused], 1)
    assert "this model and its worker refuse 2 rows: correct the file, or use another" in line
    assert "1 row is wrong in the input" in line and "queues" not in line
    line = hints(capsys, [Failures("expired", 2, (1, 2), "")], 0, expires=50, read_at=60.0)
    assert "`batchkv retry b --expires never` queues them again" in line


def test_a_host_that_failed_to_load_the_model_is_named() -> None:
    """Nobody waits for it in vain, while another host may still load the model."""
    given = {"models": ("m", "n"), "refused": ("m",)}
    broken = WorkerInfo("studio", "host", 1, (), "busy", 0.0, 0, 0, 0, **given)
    said: list[str] = []
    delays = Delays(lambda _: [], said.append, listed=lambda: [broken])
    assert delays.look(status()) == "the model could not be loaded"
    assert said[0].startswith("studio has tried to load m and failed: its log says why.")
    assert said[0].endswith("on another machine: batchkv worker -m m")
    assert unserved_note(status(), [broken]) == said[0]
    able = replace(broken, name="mini", refused=())
    delays = Delays(lambda _: [], said.append, listed=lambda: [broken, able])
    assert delays.look(status()) == "a worker loads the model when it can"
    assert "no worker holds m now; mini loads it as soon as" in said[1]


def test_a_host_that_may_load_the_model_is_named() -> None:
    """It has no worker now, and needs none: a host serves it when its other rows have ended."""
    host = WorkerInfo("studio", "host", 1, (), "busy", 0.0, 0, 0, 0, models=("m", "n"))
    said: list[str] = []
    delays = Delays(lambda _: [], said.append, listed=lambda: [host])
    assert delays.look(status()) == "a worker loads the model when it can"
    assert "no worker holds m now; studio loads it as soon as" in said[0]
    assert "studio" in unserved_note(status(), [host])

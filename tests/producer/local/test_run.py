"""``batchkv run``: every row is in OUT once, whatever is killed. Its workers end with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from redis import Redis

from batchkv_producer.client import BatchStatus, Client
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.expected import Expected
from batchkv_producer.local import local_workers, worker_checks
from batchkv_producer.local.local_workers import LocalWorkers, WorkerError, WorkerPlan
from batchkv_producer.local.presence import Presence
from batchkv_producer.local.run import Interrupted, RunOptions, RunReport, run
from batchkv_producer.monitor import delays
from batchkv_producer.order import planner
from batchkv_producer.progress import PlainReporter, Snapshot
from batchkv_producer.results import target
from batchkv_producer.results.outfile import errors_path
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import Home
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.suspects import deaths_until_failed
from batchkv_producer.wire.transitions import Transitions
from support import fake_worker
from support.batchkv_with_fake_worker import FAKE_WORKER
from support.redis_server import running_server

BATCHKV = [sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))]
MODEL = f"fake-{os.getpid()}"  # its workers can be told from those of another test session
DEADLINE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, and no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty rows; the input expects a wrong answer of the first."""
    path = tmp_path / "in.jsonl"
    rows = []
    for n in range(1, 41):
        expected = "something else" if n == 1 else fake_worker.answer(f"p{n}") + " "
        rows.append({"custom_id": f"q{n}", "prompt": f"p{n}", "metadata": {"expected": expected}})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text("utf-8").splitlines()]


def all_ids(num_rows: int = 40) -> list[str]:
    return sorted(f"q{n}" for n in range(1, num_rows + 1))


class Notes(PlainReporter):
    """A reporter that stores its notes and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.snapshots: list[Snapshot] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


def run_here(
    url: str,
    source: Path,
    notes: Notes | None = None,
    command: Sequence[str] = FAKE_WORKER,
    **options: object,
) -> RunReport:
    chosen = {"out": source.with_name("out.jsonl"), "model": MODEL, **options}
    with Redis.from_url(url) as connection:
        return run(
            Client(connection),
            connection,
            url,
            RunOptions(source=source, **chosen),  # type: ignore[arg-type]
            notes or Notes(),
            worker_command=command,
        )


def start(url: str, source: Path, *flags: str, **fake: object) -> subprocess.Popen[str]:
    """``batchkv run`` in a process of its own, as a user starts it."""
    environment = {**os.environ, "BATCHKV_REDIS_URL": url}
    environment |= {f"FAKE_{name}": str(value) for name, value in fake.items()}
    out = str(source.parent / "out.jsonl")
    command = [*BATCHKV, "run", str(source), "-m", MODEL, "-o", out, *flags]
    # The test itself may run in the background of a shell, with SIGINT ignored, and children
    # inherit that: `run` would rightly go on. A user's terminal does not ignore it.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def num_lines_of(path: Path) -> int:
    """The number of lines of OUT. OUT comes and goes while run checks whether it can write it."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_lines(path: Path, num_lines: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while num_lines_of(path) < num_lines:
        assert time.monotonic() < deadline, f"{path} does not get {num_lines} lines"
        time.sleep(0.01)


def living_workers() -> Iterator[int]:
    """Process ids of fake workers that are alive. Zombies do not count."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,stat=,args="], capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        pid, state, args = line.split(None, 2)
        if f"--model {MODEL} " in args and not state.startswith("Z"):
            yield int(pid)


def wait_until_no_worker_lives() -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while list(living_workers()):
        assert time.monotonic() < deadline, "a worker outlives its run"
        time.sleep(0.02)


def wait_until_pulled(url: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    with Redis.from_url(url) as connection:
        while not connection.exists(redis_keys.registry("wip", redis_keys.queue_name(MODEL))):
            assert time.monotonic() < deadline, "no worker takes a row"
            time.sleep(0.02)


def test_runs_a_file_to_its_end(redis_url: str, source: Path) -> None:
    """Every row is in OUT once. The last line has the sum, the tokens and the right answers."""
    notes = Notes()
    report = run_here(redis_url, source, notes, num_workers=2)
    assert sorted(ids(source.with_name("out.jsonl"))) == all_ids()
    begins = "40 = 40 ok + 0 failed + 0 canceled, 200 prompt tokens (40 cached), 120 generated in "
    ends = r"\d+s: [\d,]+ tok/s, the start included, answers right: 39 of 40"
    assert re.fullmatch(re.escape(begins) + ends, report.summary())
    assert report.summary().endswith("answers right: 39 of 40")
    assert notes.snapshots[-1].num_ended == 40
    wait_until_no_worker_lives()


def test_each_worker_traces_into_a_file_of_its_own(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker traces into the named file; the one that replaces it uses another."""
    monkeypatch.setenv("FAKE_DIE_AFTER", "30")
    run_here(redis_url, source, trace=source.with_name("t.json"))
    files = {path.name: path.read_text() for path in source.parent.glob("t*.json")}
    assert files.keys() == {"t.json", "t-2.json"}
    assert len(set(files.values())) == 2


def test_a_finished_batch_starts_no_worker(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run again only fills OUT, with no worker; a lost OUT is written anew."""
    run_here(redis_url, source)
    out = source.with_name("out.jsonl")
    before = out.read_bytes()
    monkeypatch.setenv("FAKE_EXIT", "2")  # a worker would end the run
    again = run_here(redis_url, source)
    assert out.read_bytes() == before
    assert again.summary().endswith("120 generated, answers right: 39 of 40")
    out.unlink()
    run_here(redis_url, source)
    assert out.read_bytes() == before


def test_killed_again_and_again_each_row_is_there_once(redis_url: str, source: Path) -> None:
    """After two kill -9 of run, the same command ends with each id in OUT or in the errors file,
    once."""
    with source.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    out = source.with_name("out.jsonl")
    for num_lines in (3, 17):  # the second one goes on from what the first has left
        killed = start(redis_url, source, DELAY=0.03, FAIL="q7")
        wait_for_lines(out, num_lines)
        killed.kill()
        killed.communicate()
        wait_until_no_worker_lives()
    last = start(redis_url, source, FAIL="q7")
    stdout, stderr = last.communicate(timeout=DEADLINE_SECONDS)
    assert last.returncode == 1, stderr
    assert stdout.startswith("41 = 39 ok + 2 failed + 0 canceled")
    assert sorted(ids(out)) == [name for name in all_ids() if name != "q7"]
    assert sorted(ids(errors_path(out))) == ["line-41", "q7"]


def test_ctrl_c_gives_rows_back_and_says_how_to_go_on(
    redis_url: str, redis_connection: Redis, source: Path
) -> None:
    """After SIGINT the exit code is 130, and no worker holds rows. A sentence has the counts, and
    the same command goes on."""
    out = source.with_name("out.jsonl")
    interrupted = start(redis_url, source, DELAY=0.05)
    wait_for_lines(out, 5)
    interrupted.send_signal(signal.SIGINT)
    _, stderr = interrupted.communicate(timeout=DEADLINE_SECONDS)
    assert interrupted.returncode == 130
    wait_until_no_worker_lives()
    status = Client(redis_connection).list_batches()[0]
    assert status.running == 0 and status.ok == len(ids(out)) < 40
    assert stderr.splitlines()[-1] == (
        f"batchkv: interrupted: {status.ok} of 40 rows are in {out}. The others stay in the queue; "
        f"`batchkv cancel {status.batch_id}` ends them. The same command goes on from here"
    )
    run_here(redis_url, source)
    assert sorted(ids(out)) == all_ids()


def test_ctrl_c_while_rows_are_queued_says_how_to_go_on(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt before the loop is exit code 130, too, with a sentence and no OUT."""

    def submit(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "submit", submit)
    with pytest.raises(Interrupted, match="The same command goes on from here") as caught:
        run_here(redis_url, source)
    assert caught.value.exit_code == 130
    assert not source.with_name("out.jsonl").exists()


def test_an_interrupted_run_says_where_its_rows_are(tmp_path: Path) -> None:
    """The sentence names OUT or standard output, counts its rows, and fits --fresh."""
    out, batch = tmp_path / "out.jsonl", "0123456789abcdef"
    with target.open_results(out, batch, None) as results:
        results.append(1, f'{{"id":"{batch}-1","x":1}}', is_failed=False)
        some = target.after_interrupt(results, batch, 3, fresh=False)
        every = target.after_interrupt(results, batch, 1, fresh=True)
    rest = f"The others stay in the queue; `batchkv cancel {batch}` ends them. The same command"
    assert some == f"interrupted: 1 of 3 rows is in {out}. {rest} goes on from here"
    assert every == f"interrupted, when all rows had ended: 1 of 1 row is in {out}"
    printed = target.after_interrupt(target.ResultStream(), batch, 3, fresh=False)
    assert printed == (
        f"interrupted: 0 of 3 rows were printed. {rest} and input go on; they print these rows "
        "again"
    )


def test_a_second_ctrl_c_does_not_wait(redis_url: str, source: Path) -> None:
    """A second signal ends slow workers by force. No row is lost."""
    out = source.with_name("out.jsonl")
    interrupted = start(redis_url, source, DELAY=20)
    wait_until_pulled(redis_url)
    started = time.monotonic()
    for _ in range(2):
        interrupted.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    interrupted.communicate(timeout=DEADLINE_SECONDS)
    assert interrupted.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < local_workers.COLD_STOP_SECONDS + 20
    run_here(redis_url, source)
    assert sorted(ids(out)) == all_ids()


def read_until(stream: IO[str] | None, wanted: str) -> None:
    assert stream
    for line in stream:
        if wanted in line:
            return
    raise AssertionError(f"it never says {wanted!r}")


def test_ctrl_c_does_not_wait_for_a_server_that_is_away(source: Path) -> None:
    """When Redis stops, the run says so at once, and the first SIGINT ends it within seconds."""
    with running_server() as hub:
        waiting = start(hub.url, source, DELAY=20)
        wait_until_pulled(hub.url)
        hub.stop()
        stopped = time.monotonic()
        read_until(waiting.stderr, "the server is away: waiting for it")
        assert time.monotonic() - stopped < 20
        waiting.send_signal(signal.SIGINT)
        _, stderr = waiting.communicate(timeout=DEADLINE_SECONDS)
        assert time.monotonic() - stopped < 30
    assert waiting.returncode == 130
    assert stderr.splitlines()[-1].endswith("The same command goes on from here")
    wait_until_no_worker_lives()


def test_the_server_of_its_own_is_started_again(home: Path, source: Path) -> None:
    """After kill -9 of the embedded server the run starts it again, and no row is lost."""
    out = source.with_name("out.jsonl")
    try:
        running = start("", source, DELAY=0.05)
        wait_for_lines(out, 5)
        pid = server.status(Home(home)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        stdout, stderr = running.communicate(timeout=DEADLINE_SECONDS)
        assert running.returncode == 0, stderr
        assert "the server is away: starting it again" in stderr and "is back" in stderr
        assert stdout.startswith("40 = 40 ok + 0 failed + 0 canceled")
        assert sorted(ids(out)) == all_ids()
    finally:
        server.stop(Home(home))


def test_a_worker_that_dies_is_replaced(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers kill themselves every nine rows. Their rows go back at once, and the run ends with
    all answers."""
    monkeypatch.setattr(local_workers, "RESTART_SECONDS", 0.01)
    monkeypatch.setenv("FAKE_DIE_AFTER", "9")
    notes = Notes()
    report = run_here(redis_url, source, notes)
    assert report.status.ok == 40
    assert sorted(ids(source.with_name("out.jsonl"))) == all_ids()
    deaths = [note for note in notes.notes if "killed by SIGKILL" in note]
    assert len(deaths) == 4 and "3 rows went back to the queue." in deaths[0]


def test_a_row_that_kills_engines_ends_no_run(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that end with 70 have given their rows back. They may die more often than workers
    that cannot start, so that the one bad row is found and failed."""
    monkeypatch.setattr(local_workers, "RESTART_SECONDS", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"steps": 20}))
    source = tmp_path / "in.jsonl"
    prompts = ["p1", "crash"]
    rows = [{"custom_id": f"q{n}", "prompt": text} for n, text in enumerate(prompts, 1)]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    notes = Notes()
    command = (sys.executable, "-m", "support.fake_engine")
    quick = ("--maintenance-seconds", "0.2")
    report = run_here(redis_url, source, notes, command=command, worker_arguments=quick)
    assert (report.status.ok, report.status.failed) == (1, 1)
    num_deaths = sum("its engine died" in note for note in notes.notes)
    assert local_workers.MAX_IDLE_DEATHS < num_deaths == deaths_until_failed(2)


def test_a_run_whose_workers_have_other_weights_ends(
    redis_url: str, source: Path, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model was updated since the batch began, no worker here computes its rows. The run
    says so, with a way out and exit code 4. No row is lost."""
    monkeypatch.setattr(delays, "HOPELESS_SECONDS", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"fingerprint": "b" * 32}))
    batch_id = Client(redis_connection).submit(source, model=MODEL).batch_id
    redis_connection.hset(redis_keys.batch(batch_id), "fingerprint", "a" * 32)
    command = (sys.executable, "-m", "support.fake_engine")
    with pytest.raises(WorkerError, match=r"may not compute 40 rows.*aaaa.*--fresh") as caught:
        run_here(redis_url, source, command=command)
    assert caught.value.exit_code == 4
    assert Client(redis_connection).status(batch_id).queued == 40


@pytest.mark.parametrize("obstacle", ["a file", "a folder that takes nothing"])
def test_a_home_that_takes_no_logs_is_refused_before_anything_is_queued(
    redis_url: str, source: Path, redis_connection: Redis, tmp_path: Path, obstacle: str
) -> None:
    """A home folder without room for logs is refused with exit code 2, before anything is
    queued."""
    logs = tmp_path / "home" / "logs"
    logs.parent.mkdir(mode=0o700, exist_ok=True)
    if obstacle == "a file":
        logs.write_text("")
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        logs.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="BATCHKV_HOME to a folder that you can write"):
        run_here(redis_url, source)
    assert not Client(redis_connection).list_batches()


def test_workers_that_cannot_start_end_the_run(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three consecutive deaths without progress the run ends with the last lines of the
    log."""
    monkeypatch.setattr(local_workers, "RESTART_SECONDS", 0.01)
    monkeypatch.setenv("FAKE_EXIT", "70")
    monkeypatch.setenv("FAKE_WORDS", "some traceback\nthe GPU is on fire")
    notes = Notes()
    with pytest.raises(WorkerError, match=r"3 times in a row.*the GPU is on fire") as caught:
        run_here(redis_url, source, notes)
    assert caught.value.exit_code == 4
    assert sum("its engine died" in note for note in notes.notes) == 3


def test_a_wrong_setting_ends_the_run_at_once(
    redis_url: str, redis_connection: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's exit code 2 is the user's error: its last line is the message, no restart. The
    message says what becomes of the batch, and no empty OUT stays."""
    monkeypatch.setenv("FAKE_EXIT", "2")
    monkeypatch.setenv("FAKE_WORDS", "loading\nbatchkv: there is no model fake.")
    with pytest.raises(UsageError) as caught:
        run_here(redis_url, source)
    batch_id = Client(redis_connection).list_batches()[0].batch_id
    assert str(caught.value) == (
        f"there is no model fake. 40 rows of batch {batch_id} stay in the queue: the same command "
        f"goes on, and `batchkv forget {batch_id}` deletes the batch"
    )
    assert not source.with_name("out.jsonl").exists()


def test_a_finished_batch_is_said_to_be_finished(redis_url: str, source: Path) -> None:
    """A second run of a finished batch says that its answers are from before, and does not repeat
    how prompts are sent."""
    first, again = Notes(), Notes()
    run_here(redis_url, source, first)
    run_here(redis_url, source, again)
    assert "starts: 40 rows" in first.notes[0]
    assert "plain prompts are sent through the model's chat template" in first.notes[1]
    (only,) = again.notes
    assert "is finished, nothing is computed: 40 rows" in only
    assert "all 40 answered before" in only


def test_a_run_takes_back_what_dead_workers_of_this_machine_held(
    redis_url: str, redis_connection: Redis, source: Path, home: Path
) -> None:
    """A run reclaims the jobs of dead workers of this machine at its start, although their leases
    still run."""
    client, queue = Client(redis_connection), redis_keys.queue_name(MODEL)
    client.submit(source, model=MODEL)
    assert len(Transitions(redis_connection).pull(queue, "gone", 2, 600)) == 2
    Presence(redis_connection, "gone", queue, 15.0)
    (record,) = (home / "workers").iterdir()
    record.write_text(record.read_text().replace('"started": "', '"started": "no '))
    assert run_here(redis_url, source).status.ok == 40
    assert not record.exists()


def test_failed_rows_and_retry(redis_url: str, redis_connection: Redis, source: Path) -> None:
    """Failed rows are exit code 1 and go to the errors file. After a retry the answers are in
    OUT."""
    with source.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    out = source.with_name("out.jsonl")
    first = start(redis_url, source, FAIL="q7")
    stdout, stderr = first.communicate(timeout=DEADLINE_SECONDS)
    assert first.returncode == 1
    assert stdout.startswith("41 = 39 ok + 2 failed + 0 canceled")
    assert "2 rows failed" in stderr and "1 row is wrong in the input: correct the file" in stderr
    assert "` queues the others again, and `batchkv run` of the same input" in stderr
    assert ids(errors_path(out)) == ["line-41", "q7"]
    assert sorted(ids(out)) == [name for name in all_ids() if name != "q7"]
    client = Client(redis_connection)
    assert client.retry(client.list_batches()[0].batch_id) == 1
    assert run_here(redis_url, source).summary().startswith("41 = 40 ok + 1 failed")
    assert sorted(ids(out)) == all_ids()
    assert ids(errors_path(out)) == ["line-41"]


def test_only_input_errors_are_not_to_be_retried(redis_url: str, source: Path) -> None:
    """If all failed rows were wrong in the input, the run does not suggest a retry."""
    with source.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    _, stderr = start(redis_url, source).communicate(timeout=DEADLINE_SECONDS)
    assert "1 row failed" in stderr and "correct the file" in stderr and "retry" not in stderr


def test_rows_that_are_wrong_can_be_allowed(redis_url: str, source: Path) -> None:
    """With --allow-bad, rows that are wrong in the input do not make the exit code 1; failed rows
    do."""
    with source.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    allowed = start(redis_url, source, "--allow-bad")
    assert allowed.communicate(timeout=DEADLINE_SECONDS)[0].startswith("41 = 40 ok + 1 failed")
    assert allowed.returncode == 0
    source.write_text('{"prompt": "a", "custom_id": "q7"}\n{broken\n', "utf-8")
    source.with_name("out.jsonl").unlink()
    errors_path(source.with_name("out.jsonl")).unlink()
    failing = start(redis_url, source, "--allow-bad", FAIL="q7")
    failing.communicate(timeout=DEADLINE_SECONDS)
    assert failing.returncode == 1


def test_a_timeout_that_comes_too_late_is_told_of(redis_url: str, source: Path) -> None:
    """An existing batch keeps its timeout. The run says so, with the command that changes it."""
    run_here(redis_url, source, job_timeout_seconds=60)
    for asked, is_told in ((None, False), (60, False), (90, True)):
        notes = Notes()
        run_here(redis_url, source, notes, job_timeout_seconds=asked)
        assert any("--job-timeout 90` sets another" in note for note in notes.notes) == is_told


def test_a_retry_during_the_run_reaches_out(
    redis_url: str, redis_connection: Redis, source: Path, tmp_path: Path
) -> None:
    """A row that failed, was written and is retried during the run ends ok in OUT."""
    out = source.with_name("out.jsonl")
    running = start(redis_url, source, FAIL="q1", DELAY=0.1)
    wait_for_lines(errors_path(out), 1)
    client = Client(redis_connection)
    batch_id = client.list_batches()[0].batch_id
    assert ids(errors_path(out)) == ["q1"]
    for pid in living_workers():
        os.kill(pid, signal.SIGSTOP)
    assert client.retry(batch_id) == 1
    worker = subprocess.Popen(
        [*FAKE_WORKER, "--model", MODEL, "--name", "helper"],
        env={**os.environ, "BATCHKV_REDIS_URL": redis_url},
    )
    while client.status(batch_id).queued:
        time.sleep(0.02)
    for pid in living_workers():
        os.kill(pid, signal.SIGCONT)
    running.communicate(timeout=DEADLINE_SECONDS)
    worker.terminate()
    worker.wait()
    assert running.returncode == 0
    assert sorted(ids(out)) == all_ids() and not errors_path(out).exists()


def test_a_batch_that_is_forgotten_ends_its_run(
    redis_url: str, redis_connection: Redis, source: Path
) -> None:
    """`batchkv forget` during a run ends it with one sentence, which says that the answers stay."""
    running = start(redis_url, source, DELAY=0.05)
    wait_for_lines(source.with_name("out.jsonl"), 3)
    client = Client(redis_connection)
    batch_id = client.list_batches()[0].batch_id
    client.forget(batch_id)
    _, stderr = running.communicate(timeout=DEADLINE_SECONDS)
    assert running.returncode == 2
    last = stderr.splitlines()[-1]
    assert last.startswith(f"batchkv: batch {batch_id} is no longer on the server: ")
    assert f"The answers in {source.with_name('out.jsonl')} stay" in last


def test_url_is_not_in_the_process_list(redis_url: str, source: Path) -> None:
    """Workers get the URL, which may have a password, through their environment only."""
    running = start(redis_url, source, DELAY=0.01)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (pids := list(living_workers())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pids[0])], capture_output=True)
    assert redis_url.encode() not in shown.stdout and b"--exit-with-parent" in shown.stdout
    running.communicate(timeout=DEADLINE_SECONDS)


def test_out_that_cannot_be_used_queues_nothing(
    redis_url: str, redis_connection: Redis, source: Path
) -> None:
    """A folder as OUT, or the input itself, is refused before anything is submitted."""
    for out in (source.parent, source, source.parent / "none" / "out"):
        with pytest.raises(UsageError, match=r"results cannot go|cannot write results"):
            run_here(redis_url, source, out=out)
    assert not Client(redis_connection).list_batches()


def test_out_of_another_batch_is_refused(
    redis_url: str, redis_connection: Redis, source: Path
) -> None:
    """An OUT with results of another input is refused. Nothing is queued, and no worker starts."""
    run_here(redis_url, source)
    with source.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(UsageError, match=r"holds results of batch .*Choose another file"):
        run_here(redis_url, source)
    source.with_name("out.jsonl").unlink()
    errors_path(source.with_name("out.jsonl")).write_text("mine\n", "utf-8")
    with pytest.raises(UsageError, match="is not a file of results"):
        run_here(redis_url, source)
    assert len(Client(redis_connection).list_batches()) == 1
    assert not list(living_workers())


def test_a_model_folder_that_is_not_there_queues_nothing(
    redis_url: str, redis_connection: Redis, source: Path
) -> None:
    """A path must be a model folder when workers run here. A repository name is not looked up."""
    empty = source.parent / "empty"
    empty.mkdir()
    for model, reason in (
        ("./none", "there is no model folder"),
        ("~nobody-at-all/m", "there is no model folder"),
        (str(empty / "none"), "there is no model folder"),
        (str(empty), "has no config.json"),
    ):
        with pytest.raises(UsageError, match=reason):
            run_here(redis_url, source, model=model)
    assert not Client(redis_connection).list_batches()
    (empty / "config.json").touch()
    worker_checks.check_model_folder(str(empty))
    worker_checks.check_model_folder("somebody/model")


class Rollback(Notes):
    """Deletes the end of a submit from the server once a row has ended, as if the server were
    restored from an older copy. Calls ``meddle`` then."""

    def __init__(self, connection: Redis, meddle: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._connection = connection
        self._meddle = meddle
        self.num_lost = 0

    def update(self, snapshot: Snapshot) -> None:
        super().update(snapshot)
        if self.num_lost or not snapshot.num_ended:
            return
        for _ in range(10):
            job_id: Any = self._connection.rpop(redis_keys.queue(redis_keys.queue_name(MODEL)))
            self.num_lost += self._connection.delete(f"rq:job:{job_id.decode()}")
        batch_id = job_id.decode().partition("-")[0]
        self._connection.hincrby(redis_keys.batch(batch_id), "chunks", -1)
        self._meddle()


def test_a_run_whose_server_lost_a_part_of_the_submit_ends(
    redis_url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was restored from an older copy lacks the end of the submit. It is queued
    again, and every row is answered. If the input has changed, the run ends and says so."""
    monkeypatch.setattr(planner, "CHUNK_ROWS", 10)
    monkeypatch.setenv("FAKE_DELAY", "0.02")
    with Redis.from_url(redis_url) as connection:
        notes = Rollback(connection)
        report = run_here(redis_url, source, notes, batch_options=BatchOptions(fresh=True))
        assert notes.num_lost == 10 and report.status.ok == 40
        assert sorted(ids(report.out)) == all_ids()
        assert any("lost rows of this batch" in note for note in notes.notes)
        report.out.unlink()
        connection.flushall()
        with pytest.raises(UsageError, match="the input has changed since it was submitted"):
            run_here(redis_url, source, Rollback(connection, lambda: source.write_text("{}\n")))
    wait_until_no_worker_lives()


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_full_disk_then_a_rerun(redis_url: str, source: Path) -> None:
    """A full disk ends the run with exit code 4 and whole lines; the same command goes on."""
    out = source.with_name("out.jsonl")
    command = [sys.executable, "-c", LIMITED, *BATCHKV[1:], "run", str(source)]
    full = subprocess.run(
        [*command, "-m", MODEL, "-o", str(out)],
        env={**os.environ, "BATCHKV_REDIS_URL": redis_url, "FAKE_DELAY": "0.01"},
        capture_output=True,
        text=True,
    )
    assert full.returncode == 4, full.stderr
    assert "the disk is full" in full.stderr.splitlines()[-1]
    assert 0 < len(ids(out)) < 40
    wait_until_no_worker_lives()
    run_here(redis_url, source)
    assert sorted(ids(out)) == all_ids()


def test_kill_survives_a_server_that_is_gone(tmp_path: Path) -> None:
    """Killing the workers never fails because of the server, whose outage may be the reason for
    it."""

    def reclaim(name: str, is_death: bool) -> int:
        raise WorkerError("gone")

    plan = WorkerPlan("m", "unix:///none", tmp_path, "t", command=("sleep", "60"))
    workers = LocalWorkers(plan, reclaim, lambda _: None)
    workers._plan = WorkerPlan("m", "u", tmp_path, "t", command=("sh", "-c", "sleep 60"))
    workers.supervise(0)
    pid = workers.pids[0]
    workers.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("script", "is_death"),
    [("kill -9 $$", True), ("exit 70", True), ("exit 0", False)],
)
def test_only_an_end_that_may_be_a_rows_doing_is_a_death(
    tmp_path: Path, script: str, is_death: bool
) -> None:
    """The jobs of a worker that ended normally or was killed by the run are no suspects."""
    reclaimed: list[bool] = []

    def reclaim(name: str, is_death: bool) -> int:
        reclaimed.append(is_death)
        return 0

    for command, expected in ((script, is_death), ("sleep 60", False)):
        plan = WorkerPlan("m", "u", tmp_path, "t", command=("sh", "-c", command))
        workers = LocalWorkers(plan, reclaim, lambda _: None)
        workers.supervise(0)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while command == script and not reclaimed:
            assert time.monotonic() < deadline
            workers.supervise(0)
        workers.kill()
        assert reclaimed == [expected]
        reclaimed.clear()


def test_a_run_that_goes_on_says_which_tokens_are_its_own() -> None:
    """Its time is its own, too."""
    whole = status(total=2, ok=2, completion_tokens=3000)
    report = RunReport(whole, Path("o"), 1500, 30.0, 0, 0)
    said = "3,000 generated, 1,500 of them now in 30s: 50 tok/s, the start included"
    assert report.summary().endswith(said)
    assert "now" not in RunReport(whole, Path("o"), 3000, 30.0, 0, 0).summary()


def status(**values: object) -> BatchStatus:
    names = BatchStatus.__dataclass_fields__
    base: dict[str, object] = dict.fromkeys(names, 0)
    base |= {"queue": "batchkv:m-1", "model": "m", "total": 2, "is_submitted": True, **values}
    return BatchStatus(**base)  # type: ignore[arg-type]


def test_expected_answers_are_found_wherever_they_stand(tmp_path: Path) -> None:
    """metadata.expected is read from the body and from the top level, as text or number, for each
    line."""
    path = tmp_path / "in.jsonl"
    lines = [
        '{"body": {"metadata": {"expected": " a "}}}',
        "",
        '{"metadata": {"expected": 42}, "prompt": "x"}',
        '{"prompt": "say \\"expected\\""}',
        '{"metadata": {"expected": null}}',
        '{"metadata": ["expected"]}',
        '"expected" not JSON',
        "\xff",
    ]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    expected = Expected.read(path)
    assert expected.num_expected == 2
    assert expected.is_right(1, "a\n") and expected.is_right(3, "42")
    assert not any((expected.is_right(1, "b"), expected.is_right(2, ""), expected.is_right(99, "")))
    assert Expected.read(tmp_path / "none").num_expected == 0

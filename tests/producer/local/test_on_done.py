"""``--on-done``, and the flags of a batch on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer.cli import cli
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions

QUEUE = redis_keys.queue_name("m")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"custom_id": name, "prompt": "p", "temperature": 0} for name in ("a", "$(touch x)")]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return path


def batchkv(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def finish(connection: Redis, outcome: str = "ok") -> None:
    """End every queued row as a worker would."""
    moves = Transitions(connection)
    for row in moves.pull(QUEUE, "w", 100, 60):
        error = None if outcome == "ok" else ("engine_error", "it broke")
        result = RowResult("c", "completion", outcome, "m", error=error)  # type: ignore[arg-type]
        moves.finish(QUEUE, "w", [JobResult(row.lease, outcome, encode_result(result))])


def submitted(source: Path, *flags: object) -> str:
    found = batchkv("submit", source, "-m", "m", *flags)
    assert found.exit_code == 0, found.stderr
    return found.stdout.strip()


SHOW = 'echo "$BATCHKV_BATCH: $BATCHKV_TOTAL = $BATCHKV_OK $BATCHKV_FAILED $BATCHKV_CANCELED"'


@pytest.mark.parametrize(("outcome", "code"), [("ok", 0), ("failed", 1)])
def test_the_command_gets_the_counts(
    source: Path,
    redis_connection: Redis,
    capfd: pytest.CaptureFixture[str],
    outcome: str,
    code: int,
) -> None:
    """The command runs once, with the counts in its environment. Its output goes to standard error.
    The exit code depends on the rows."""
    batch = submitted(source)
    finish(redis_connection, outcome)
    done = batchkv("wait", batch, "--on-done", SHOW)
    counts = "2 = 2 0 0" if outcome == "ok" else "2 = 0 2 0"
    assert done.exit_code == code
    assert capfd.readouterr().err.count(f"{batch}: {counts}\n") == 1
    assert done.stdout.count("\n") == 1  # the sum alone


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 7", "ended with exit code 7"),
        ("kill -TERM $$", "ended by SIGTERM"),
        ("no-such-command-at-all", "ended with exit code 127"),
    ],
)
def test_its_failure_is_reported(
    source: Path, redis_connection: Redis, command: str, words: str
) -> None:
    """A failed command is a sentence and exit code 5, whether rows failed or not."""
    batch = submitted(source)
    finish(redis_connection)
    done = batchkv("wait", batch, "--on-done", command)
    assert done.exit_code == 5
    assert words in done.stderr
    assert "2 = 2 ok" in done.stdout


def test_it_is_not_run_before_the_end(source: Path, tmp_path: Path) -> None:
    """A wait whose time is over does not run the command."""
    batch = submitted(source)
    mark = tmp_path / "mark"
    done = batchkv("wait", batch, "--timeout", "0.1", "--on-done", f"touch {mark}")
    assert done.exit_code == 6
    assert not mark.exists()


def test_submit_refuses_it(source: Path, redis_connection: Redis) -> None:
    """submit does not wait, so it refuses the flag and names the commands that have it. Nothing is
    queued."""
    found = batchkv("submit", source, "-m", "m", "--on-done", "true")
    assert found.exit_code == 2
    assert "submit does not wait: give --on-done to `batchkv wait`" in found.stderr
    assert redis_connection.keys("batchkv:*") == []


def test_run_gives_it_the_results_file(
    source: Path, redis_connection: Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command of ``run`` gets the path of OUT. It is not stored in Redis."""
    submitted(source)
    finish(redis_connection)
    secret = "echo to:$BATCHKV_OUT with-a-secret"
    done = batchkv("run", source, "-m", "m", "--workers", "0", "--on-done", secret)
    assert done.exit_code == 0, done.stderr
    assert f"to:{source}.results.jsonl with-a-secret" in capfd.readouterr().err
    for key in redis_connection.keys("*"):
        assert b"with-a-secret" not in (redis_connection.dump(key) or b"")
    assert not (source.parent / "x").exists()


def test_an_interrupted_wait_runs_nothing(source: Path, tmp_path: Path) -> None:
    """After Ctrl-C, while rows are open, the command does not run."""
    batch = submitted(source)
    mark = tmp_path / "mark"
    command = [
        sys.executable,
        "-m",
        "batchkv_producer",
        "wait",
        batch,
        "--on-done",
        f"touch {mark}",
    ]
    # A test in the background of a shell has SIGINT ignored, and children inherit that.
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as waiting:
        assert waiting.stderr is not None
        waiting.stderr.readline()  # it says how the batch stands: it waits now
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
    assert not mark.exists()


# ---- the other flags ----


def test_status_and_list_show_the_options(source: Path, redis_connection: Redis) -> None:
    """status and list show the options of a batch, for people and as JSON. The sum has every
    row."""
    flags = ("--priority", "high", "--expires", "8h", "--dedupe", "--keep", "7d")
    batch = submitted(source, *flags)
    shown = batchkv("status", batch).stdout
    assert "2 = 0 ok + 0 failed + 0 canceled + 2 queued + 0 held" in shown
    for words in (
        "priority       high",
        "7d00h after the end",
        "expires",
        "0 rows were duplicates",
    ):
        assert words in shown
    assert "high" in batchkv("list").stdout
    finish(redis_connection)
    fields = json.loads(batchkv("status", batch, "--json").stdout)
    assert (fields["priority"], fields["copied"], fields["keep_seconds"]) == ("high", 1, 604800)
    assert fields["is_deduped"] and fields["is_reconciled"] and fields["is_done"]
    assert fields["kept_until"] > fields["expires"] > fields["created"]
    assert "kept           until" in batchkv("status", batch).stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--priority", "urgent"), "'urgent' is not one of 'high', 'normal', 'low'"),
        (("--expires", "soon"), "neither a duration"),
        (("--expires", "2001-01-01"), "is past"),
        (("--keep", "7"), "is not a duration"),
    ],
)
def test_wrong_values_are_refused(
    source: Path, redis_connection: Redis, flags: tuple[str, str], words: str
) -> None:
    """submit and run name the flag of a wrong value, before anything is queued."""
    for command in ("submit", "run"):
        found = batchkv(command, source, "-m", "m", *flags)
        assert found.exit_code == 2
        assert words in found.stderr and flags[0] in found.stderr
    assert redis_connection.keys("batchkv:*") == []


def test_joining_tells_what_stays(source: Path) -> None:
    """A second submit with other options says that the batch keeps its own."""
    batch = submitted(source)
    found = batchkv("submit", source, "-m", "m", "--priority", "high", "--keep", "1d")
    assert found.stdout.strip() == batch
    assert "its priority stays normal" in found.stderr
    assert "its results stay without a limit" in found.stderr


def test_dry_run_counts_duplicates(source: Path) -> None:
    """Duplicates are counted before anything is queued."""
    assert "1 row is a duplicate" in batchkv("submit", source, "--dry-run", "--dedupe").stdout
    assert "duplicate" not in batchkv("submit", source, "--dry-run").stdout


def test_retry_after_the_deadline(source: Path, redis_connection: Redis) -> None:
    """retry needs another deadline, or none, when the deadline is past."""
    batch = submitted(source, "--expires", "1h")
    redis_connection.hset(redis_keys.batch(batch), "expires", 1)
    assert batchkv("wait", batch).exit_code == 1
    refused = batchkv("retry", batch)
    assert refused.exit_code == 2 and "--expires 8h" in refused.stderr
    assert "2 rows were queued again" in batchkv("retry", batch, "--expires", "never").stderr
    assert "expires" not in batchkv("status", batch).stdout


def test_results_that_are_no_longer_kept(source: Path, redis_connection: Redis) -> None:
    """Expired results are one sentence and exit code 2. The sentence differs from that for an
    unknown batch."""
    batch = submitted(source, "--keep", "1h")
    redis_connection.delete(redis_keys.batch(batch))
    found = batchkv("results", batch)
    assert found.exit_code == 2
    assert "is no longer kept: its results have expired" in found.stderr

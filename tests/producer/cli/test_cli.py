"""The ``batchkv`` command: its standard output and error, exit codes, errors in one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from redis import Redis
from redis.exceptions import ConnectionError

from batchkv_producer import batch_facts
from batchkv_producer.cli import cli, group
from batchkv_producer.client import BatchStatus, Client
from batchkv_producer.manage.reconcile import Reconciler
from batchkv_producer.progress import LiveReporter, PlainReporter, Rates, Snapshot, duration
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import Home
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import Usage, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions

ESCAPE = "\x1b]0;owned\x07\x9b31m\u202e"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


@pytest.fixture
def at_server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands use the server of the test session."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    return redis_url


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = ['{"custom_id": "a", "prompt": "one"}', "{broken", '{"custom_id": "c", "prompt": "3"}']
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def batchkv(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchkv_producer", *map(str, arguments)]
    chosen = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run(command, **chosen)  # type: ignore[call-overload,no-any-return]


def finish(connection: Redis, model: str, text: str = "the answer") -> None:
    """End every queued row of a model as a worker would."""
    queue, transitions = redis_keys.queue_name(model), Transitions(connection)
    for row in transitions.pull(queue, "w", 100, 60):
        line = row.lease.job_id.rpartition("-")[2]
        result = RowResult(f"c{line}", "completion", "ok", model, text=text, busy_ms=500,
                           usage=Usage(7, 3, 1), created=int(time.time()))  # fmt: skip
        ending = JobResult(row.lease, "ok", encode_result(result), 7, 3, 1, 500)
        transitions.finish(queue, "w", [ending])


def submitted(source: Path) -> str:
    found = batchkv("submit", source, "-m", "m", "--allow-bad")
    assert found.exit_code == 0, found.stderr
    return found.stdout.strip()


def assert_complains(found: Result, code: int, pattern: str) -> None:
    """One line on standard error, nothing on standard output, this exit code."""
    assert found.exit_code == code, found.output
    assert found.stdout == ""
    assert re.fullmatch(f"batchkv: [^\n]*{pattern}[^\n]*\n", found.stderr), found.stderr


# ---- help ----


def every_command() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command
        yield name, command


def test_all_commands_are_there() -> None:
    """The commands that the documentation names, worker included."""
    names = [name for name, _ in every_command()]
    wanted = "run submit ask plan status wait results result report failed cancel retry forget list"
    own = [*wanted.split(), "workers", "top", "server", "service", "doctor"]
    assert names == [*own, "bench", "cache", "keys", "kv-report", "serve", "tune", "worker"]


def test_help_ends_with_worked_examples() -> None:
    """Each command's help shows how it is used; reading commands have --json."""
    for name, command in every_command():
        shown = batchkv(name, "--help")
        assert shown.exit_code == 0
        assert f"batchkv {name}" in shown.stdout.split("Usage:", 1)[1].split("\n", 1)[1], name
        if name in ("plan", "status", "wait", "results", "result", "report", "list", "workers"):
            assert any("--json" in parameter.opts for parameter in command.params)


def test_the_list_of_commands_fits_the_terminal() -> None:
    """`batchkv --help` has 80 columns, and no command's summary is cut."""
    above, _, listed = batchkv("--help").stdout.partition("\nCommands:\n")
    assert [line for line in listed.splitlines() if line.endswith("...")] == []
    assert max(map(len, [*above.splitlines(), *listed.splitlines()])) <= 80


def every_path(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all commands below it."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from every_path(below, (*path, name))


def test_help_fits_the_terminal() -> None:
    """The help of every command, and of those below it, has at most 80 columns."""
    paths = list(every_path(cli))
    assert ("service", "install", "worker") in paths and ("cache", "stats") in paths
    for path in paths:
        lines = batchkv(*path, "--help").stdout.splitlines()
        assert [line for line in lines if len(line) > 80] == [], path


def test_help_speaks_of_what_its_command_has() -> None:
    """`ask` has one prompt and no rows; `retry` takes generation flags and --as with --from."""
    of = {name: " ".join(batchkv(name, "--help").stdout.split()) for name in ("ask", "retry")}
    assert not re.search(r"\brows?\b|plain prompt", of["ask"])
    command = cli.get_command(click.Context(cli), "retry")
    assert command
    flags = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "read_as"}
    helps = {param.name: getattr(param, "help", "") for param in command.params}
    assert [name for name in sorted(flags) if "Only with --from" not in helps[name]] == []
    assert "Only with --from" in of["retry"]
    assert "Rows may set their own" in " ".join(batchkv("submit", "--help").stdout.split())


def test_wrong_use_is_one_line_and_exit_code_2() -> None:
    """Unknown options, missing arguments and unknown commands say where help is."""
    assert_complains(batchkv("submit"), 2, "Missing argument 'FILE.*--help")
    assert_complains(batchkv("status", "--what"), 2, "--what")
    assert_complains(batchkv("list", "--limit", "-1"), 2, r"range x>=0 \(see .*--help\)")
    assert_complains(batchkv("fly"), 2, "fly")
    assert batchkv().exit_code == 2
    assert batchkv("--version").stdout.startswith("batchkv, version")


def test_worker_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MLX `batchkv worker`, with any arguments, names the extra; other errors show."""
    monkeypatch.setattr(group, "NEEDED_MODULES", {"worker": ("no_such_module",)})
    found = batchkv("worker", "-m", "demo", "--slots", "8")
    assert_complains(found, 2, re.escape("pip install 'batchkv[worker]'"))
    assert "batchkv[worker]" in batchkv("--help").stdout
    broken = EntryPoint("worker", "no_such_package.cli:worker", group.ENTRY_POINT_GROUP)
    monkeypatch.setattr(group, "NEEDED_MODULES", {})
    monkeypatch.setattr(group, "_foreign_commands", lambda: {"worker": broken})
    assert_complains(batchkv("worker"), 2, re.escape("pip install 'batchkv[worker]'"))


EARLY = """
import sys
from batchkv_producer import entry
assert not {"click", "redis"} & set(sys.modules)
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
entry.main()
"""


@pytest.mark.parametrize("module", ["click", "redis", "batchkv_producer.cli"])
def test_ctrl_c_during_the_imports_is_silent(module: str) -> None:
    """Whatever is being imported, an interrupted start is exit code 130 and no traceback."""
    found = subprocess.run([sys.executable, "-c", EARLY, module], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


# ---- submit ----


@pytest.mark.usefixtures("at_server")
def test_submit_says_that_a_models_folder_is_wrong(source: Path, tmp_path: Path) -> None:
    """A folder may be on the workers alone, so the rows are queued, but the name may be a slip."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, fault in (
        ("./nowhere", "there is no model folder ./nowhere"),
        (str(tmp_path / "gone"), f"there is no model folder {tmp_path}/gone"),
        (str(empty), f"the model folder {empty} has no config.json"),
        ("owner/name", ""),
    ):
        told = batchkv("submit", source, "-m", name, "--allow-bad")
        assert told.exit_code == 0 and ("correct it: only workers" in told.stderr) is bool(fault)
        assert fault in told.stderr


def test_submit_prints_the_id_alone(at_server: str, redis_connection: Redis, source: Path) -> None:
    """Standard output is the batch id alone, for scripts. The same file joins its batch."""
    found = batchkv("submit", source, "-m", "m", "--max-tokens", "9", "--stop", "x", "--stop", "y")
    assert re.fullmatch("[0-9a-f]{16}\n", found.stdout)
    wrong, queued, style, unserved = found.stderr.splitlines()
    assert "plain prompts are sent through the model's chat template" in style
    assert "nobody serves the queue" in unserved
    assert wrong.startswith("batchkv: line 2: invalid_json: ")
    assert queued == "batchkv: queued 2 of 3 rows, in queue batchkv:m-62c66a7a"
    again = batchkv("submit", source, "-m", "m", "--max-tokens", "9", "--stop", "x", "--stop", "y")
    assert again.stdout == found.stdout and "joined a batch of 3 rows" in again.stderr
    shown = f"batchkv: it was submitted before: `batchkv status {found.stdout.strip()}`"
    assert shown in again.stderr and "submitted before" not in found.stderr
    other = batchkv("submit", source, "-m", "m", "--max-tokens", "10")
    assert other.stdout != found.stdout
    assert len(Client(redis_connection).list_batches()) == 2


def test_submit_ids_and_standard_input(at_server: str, source: Path) -> None:
    """--ids prints the job ids by line; - reads standard input."""
    found = batchkv("submit", "-", "-m", "m", "--ids", stdin=source.read_text("utf-8"))
    batch_id = found.stdout[:16]
    assert found.stdout.split() == [f"{batch_id}-{line}" for line in (1, 2, 3)]


def test_model_comes_from_flag_then_line_then_environment(
    at_server: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-m overrides the lines' model. BATCHKV_MODEL is used if no line names one; else an error."""
    named = tmp_path / "named.jsonl"
    named.write_text('{"prompt": "x", "model": "of-line"}\n', "utf-8")
    assert_complains(batchkv("submit", source), 2, "no model.*-m MODEL")
    monkeypatch.setenv("BATCHKV_MODEL", "of-variable")
    for file, flags, slug in (
        (named, ["-m", "of-flag"], "of-flag"),
        (named, [], "of-line"),
        (source, [], "of-variable"),
    ):
        assert f"batchkv:{slug}-" in batchkv("submit", file, *flags).stderr
    text = source.read_text("utf-8")
    assert "of-variable" in batchkv("submit", "-", stdin=text).stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "many"], "many"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--top-k", "-3"], "top_k"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--thinking-budget", "-2"], "thinking_budget"),
        (["--stop", ""], "stop"),
        (["--job-timeout", "0"], "job-timeout"),
    ],
)
def test_bad_generation_flags_are_refused(
    at_server: str, redis_connection: Redis, source: Path, flags: list[str], reason: str
) -> None:
    """A flag out of range is an error that names it, in submit as in run; nothing is queued."""
    for command in ("submit", "run"):
        assert_complains(batchkv(command, source, "-m", "m", *flags), 2, reason)
    assert not Client(redis_connection).list_batches()


@pytest.mark.parametrize(
    ("flag", "bad", "good"),
    [
        ("--kv-scheme", ["int8", "", "affine4,last"], ["float", "k8v4", "affine4,last=float"]),
        ("--slots", ["0", "4097", "x"], ["1", "4096", "auto"]),
        ("--memory", ["1", "many", "1000kB", "-1GB"], ["512MB", "4GiB", "1.5g", "1MiB", "2000000"]),
    ],
)
def test_bad_worker_flags_are_refused(
    source: Path, flag: str, bad: list[str], good: list[str]
) -> None:
    """A value that every worker would refuse is refused by run, before anything is queued."""
    for value in bad:
        assert_complains(batchkv("run", source, "-m", "m", flag, value), 2, flag)
    for value in good:
        assert (
            batchkv("run", source, "-m", "m", flag, value, "--dry-run", "--allow-bad").exit_code
            == 0
        )


@pytest.mark.parametrize(
    "flags",
    [
        ("--slots", "4"),
        ("--kv-scheme", "affine4", "--memory", "1GB"),
        ("--trace", "t"),
        ("--polite",),
    ],
)
def test_flags_of_workers_need_workers(source: Path, flags: tuple[str, ...]) -> None:
    """`run --workers 0` refuses a flag that only its own workers would use."""
    command = ("run", source, "-m", "m", "--workers", "0", "--dry-run", "--allow-bad")
    assert_complains(batchkv(*command, *flags), 2, f"{flags[0]} .*--workers 0")
    assert batchkv(*command).exit_code == 0


def test_wrong_rows_are_exit_code_1(at_server: str, redis_connection: Redis, source: Path) -> None:
    """submit prints the id, queues the good rows and ends with 1; with --allow-bad 0. So does a
    dry run of submit and of run, which changes nothing."""
    for flags, code in ((["--dry-run"], 1), (["--dry-run", "--allow-bad"], 0)):
        for command in ("submit", "run"):
            found = batchkv(command, source, "-m", "m", *flags)
            assert (found.exit_code, found.stdout[:27]) == (code, "3 rows = 2 good + 1 wrong, ")
        as_json = batchkv("submit", source, "-m", "m", "--json", *flags)
        assert (as_json.exit_code, json.loads(as_json.stdout)["num_bad"]) == (code, 1)
    assert not Client(redis_connection).list_batches()
    for flags, code in (([], 1), (["--ids"], 1), (["--allow-bad"], 0)):
        found = batchkv("submit", source, "-m", "m", *flags)
        assert found.exit_code == code and re.match("[0-9a-f]{16}", found.stdout)
        assert "line 2: invalid_json" in found.stderr
    assert Client(redis_connection).status(found.stdout.strip()).queued == 2


def test_two_models_of_a_batch_are_refused(source: Path) -> None:
    """``worker`` takes several -m. ``run`` and ``submit`` do not take the last in silence."""
    done = CliRunner().invoke(cli, ["submit", str(source), "-m", "a", "-m", "b", "--dry-run"])
    assert done.exit_code == 2
    assert "-m a -m b: a batch has one model" in done.output


def test_dry_run_needs_no_model(source: Path) -> None:
    """Rows are checked although no model is named. All wrong rows are counted."""
    source.write_text("{broken\n" * 25, "utf-8")
    for command in ("submit", "run"):
        found = batchkv(command, source, "--dry-run")
        assert found.exit_code == 1
        assert found.stdout.endswith("no model named\n")
        assert found.stderr.count("\n") == 21
        assert found.stderr.splitlines()[-1] == "batchkv: 5 more rows are wrong"


def test_dry_run_needs_no_server(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dry-run counts rows and reports wrong ones, without a server. It leaves no file."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", "redis://127.0.0.1:1/0")
    for command in ("submit", "run"):
        found = batchkv(command, source, "-m", "m", "--dry-run")
        assert found.exit_code == 1
        assert found.stdout.startswith("3 rows = 2 good + 1 wrong, 4 characters of prompts")
        assert "line 2: invalid_json" in found.stderr
    as_json = json.loads(batchkv("submit", source, "-m", "m", "--dry-run", "--json").stdout)
    assert (as_json["total"], as_json["num_bad"], as_json["errors"][0]["line"]) == (3, 1, 2)
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_inputs_that_cannot_be_used_are_refused(at_server: str, tmp_path: Path) -> None:
    """No file, a folder, an empty file: one line, exit code 2."""
    (tmp_path / "empty").touch()
    for path, reason in (("none", "does not exist"), ("", "is a directory"), ("empty", "no rows")):
        for command in ("submit", "run"):
            assert_complains(batchkv(command, tmp_path / path, "-m", "m"), 2, reason)
    assert_complains(batchkv("run", "-", "-m", "m"), 2, "standard input has no rows")


# ---- reading ----


def test_status_of_all_of_a_batch_and_of_a_job(
    at_server: str, redis_connection: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """status shows counts, queue, speed and workers. --json has the same for programs.

    The speed of a batch with too many rows to read says that pauses count.
    """
    batch_id = submitted(source)
    shown = batchkv("status").stdout
    assert batch_id in shown and "33 %" in shown
    shown = batchkv("status", batch_id).stdout
    assert "batchkv:m-62c66a7a" in shown and re.search(r"queued +2\n", shown)
    assert re.search(r"served by +none, and none has ever", shown) and "tok/s" not in shown
    finish(redis_connection, "m")
    as_json = json.loads(batchkv("status", batch_id[:8], "--json").stdout)
    assert (as_json["ok"], as_json["failed"], as_json["is_done"]) == (2, 1, True)
    assert as_json["tokens_per_second"] == 6  # ends are in whole seconds, so it is of one at least
    shown = batchkv("status", batch_id).stdout
    assert "6 tok/s, while rows were computed\n" in shown and "served by" not in shown
    monkeypatch.setattr(batch_facts, "MAX_COUNTED_ROWS", 0)
    assert " tok/s, pauses included\n" in batchkv("status", batch_id).stdout
    job = json.loads(batchkv("status", f"{batch_id}-1", "--json").stdout)
    assert (job["status"], job["line"]) == ("ok", 1)
    shown = batchkv("status", f"{batch_id}-1").stdout
    assert "custom_id" in shown and "error" not in shown
    overview = json.loads(batchkv("status", "--json").stdout)
    assert [batch["batch_id"] for batch in overview["batches"]] == [batch_id]
    assert overview["workers"] == []


def test_rows_that_a_worker_has_taken_are_held(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """Whether it has begun them is not known, so they are not called running, but in JSON."""
    batch_id = submitted(source)
    Transitions(redis_connection).pull(redis_keys.queue_name("m"), "busy", 1, 60)
    shown = batchkv("status", batch_id).stdout
    assert re.search(r"held +1\n", shown) and shown.count("1 queued + 1 held\n") == 1
    held = [batchkv("status", f"{batch_id}-{n}").stdout for n in (1, 3)]
    assert sum(bool(re.search(r"status +held\n", one)) for one in held) == 1
    assert json.loads(batchkv("status", batch_id, "--json").stdout)["running"] == 1
    assert (
        "HELD" in batchkv("status").stdout and "running" in batchkv("list").stdout
    )  # the batch is


def test_a_server_without_batches_says_so(at_server: str) -> None:
    """Not with the head of an empty table; JSON is as ever."""
    said = "no batches: `batchkv run FILE -m MODEL` computes the rows of a file"
    assert batchkv("list").stdout == f"{said}\n"
    assert batchkv("status").stdout.splitlines()[0] == said
    assert json.loads(batchkv("list", "--json").stdout) == []


def test_list_and_workers(at_server: str, redis_connection: Redis, source: Path) -> None:
    """list has a line for each batch, workers one for each living worker."""
    batch_id = submitted(source)
    line = batchkv("list").stdout.splitlines()[1]
    assert line.startswith(batch_id) and "waiting" in line and line.endswith("in.jsonl")
    assert json.loads(batchkv("list", "--json").stdout)[0]["batch_id"] == batch_id
    key, queue = redis_keys.worker("mac-1"), redis_keys.queue_name("m")
    about = {"birth": "2026-01-01T00:00:00Z", "queues": queue, "hostname": "studio", "pid": "7"}
    redis_connection.hset(key, mapping=about)
    redis_connection.sadd("rq:workers", key)
    title, first, second = batchkv("workers").stdout.splitlines()
    assert title.startswith("WORKER") and first.startswith("mac-1")
    assert second == "  0 ok, 0 failed, pid 7 on studio"
    assert json.loads(batchkv("workers", "--json").stdout)[0]["hostname"] == "studio"


def test_unknown_ids_are_refused(at_server: str) -> None:
    """An unknown id is exit code 2 in every command that takes one."""
    for command in ("status", "wait", "results", "cancel", "retry"):
        assert_complains(batchkv(command, "0123456789abcdef"), 2, "no batch 0123456789abcdef")
    for command in ("status", "result", "cancel"):
        assert_complains(batchkv(command, "0123456789abcdef-1"), 2, "0123456789abcdef")


def test_wait_ends_with_the_sum(at_server: str, redis_connection: Redis, source: Path) -> None:
    """wait prints the sum; exit code 1 when a row failed, 6 when the time is over before that."""
    batch_id = submitted(source)
    early = batchkv("wait", batch_id, "--timeout", "0.1")
    assert early.exit_code == 6 and "is not done yet" in early.stderr
    finish(redis_connection, "m")
    found = batchkv("wait", batch_id)
    assert (found.exit_code, found.stdout) == (1, "3 = 2 ok + 1 failed + 0 canceled\n")
    good = source.with_name("good.txt")
    good.write_text("hello\n", "utf-8")
    other = submitted(good)
    finish(redis_connection, "m")
    assert json.loads(batchkv("wait", other, "--json").stdout)["ok"] == 1
    assert batchkv("wait", other).exit_code == 0


def test_results_to_standard_output(at_server: str, redis_connection: Redis, source: Path) -> None:
    """Finish order or input order, as OpenAI lines or as text; exclusive flags are refused."""
    batch_id = submitted(source)
    finish(redis_connection, "m", "one\ntwo")
    lines = [json.loads(line) for line in batchkv("results", batch_id).stdout.splitlines()]
    assert sorted(line["id"] for line in lines) == [f"{batch_id}-{n}" for n in (1, 2, 3)]
    ordered = batchkv("results", batch_id, "--ordered", "--format", "text").stdout.splitlines()
    assert ordered == ["one\\ntwo"] * 2
    assert batchkv("results", batch_id, "--follow").stdout.count("\n") == 3
    (wrong,) = batchkv("results", batch_id, "--errors").stdout.splitlines()
    response = json.loads(wrong)["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (400, "invalid_json")
    assert_complains(batchkv("results", batch_id, "--follow", "--ordered"), 2, "choose one")
    assert_complains(batchkv("results", batch_id, "--json", "--format", "text"), 2, "exclude")


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()]


def test_results_of_an_older_version_are_migrated(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """An OUT with failed rows of the old shape becomes like a new one, and stays like it."""
    batch_id, out = submitted(source), source.with_name("out")
    finish(redis_connection, "m")
    batchkv("results", batch_id, "-o", out)
    errors = source.with_name("out.errors.jsonl")
    new = [out.read_bytes(), errors.read_bytes()]
    error = {"code": "invalid_json", "message": "as it was said before"}
    row = {"id": f"{batch_id}-2", "custom_id": "line-2", "response": None, "error": error}
    old = json.dumps(row, separators=(",", ":")) + "\n"
    out.write_bytes(old.encode() + new[0])
    errors.write_text(old, "utf-8")
    for _ in range(2):
        assert "3 of 3 rows" in batchkv("results", batch_id, "-o", out).stderr
        assert [out.read_bytes(), errors.read_bytes()] == new


def test_retry_tells_of_rows_that_will_fail_again(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """A row that a worker refused is queued again, with a warning; a lost one without."""
    batch_id, moves = submitted(source), Transitions(redis_connection)
    queue = redis_keys.queue_name("m")
    for row, code in zip(
        moves.pull(queue, "w", 2, 60), ("context_length_exceeded", "lost"), strict=True
    ):
        result = RowResult("c", "completion", "failed", "m", error=(code, "why"))
        moves.finish(queue, "w", [JobResult(row.lease, "failed", encode_result(result))])
    told = batchkv("retry", batch_id).stderr
    assert "2 rows were queued again. 1 row is wrong in the input" in told
    assert "batchkv: of the queued rows, 1 had failed for what is in the file" in told


def test_following_says_why_no_row_comes(
    at_server: str, redis_connection: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--follow`` to standard output names the command of a worker while none serves the queue.
    Rows that end meanwhile are printed once each."""
    batch_id = submitted(source)
    real, calls = Reconciler.reconcile_id, list[str]()

    def look(reconciler: Reconciler, wanted: str) -> BatchStatus:
        calls.append(wanted)
        if len(calls) == 4:
            finish(redis_connection, "m")
        return real(reconciler, wanted)

    monkeypatch.setattr(Reconciler, "reconcile_id", look)
    told = batchkv("results", batch_id, "--follow")
    assert told.exit_code == 0 and told.stdout.count("\n") == 3
    assert told.stderr.count("nobody serves the queue") == 1


def test_following_into_a_file_survives_an_outage(
    at_server: str, redis_connection: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short outage of the server does not end ``--follow -o``. While no worker serves the queue,
    it says so, like ``wait``."""
    batch_id, out = submitted(source), source.with_name("out")
    real, calls = Client.status, list[str]()

    def status(client: Client, wanted: str) -> BatchStatus:
        calls.append(wanted)
        if len(calls) in (3, 4):
            raise ConnectionError("Connection refused")
        if len(calls) == 6:
            finish(redis_connection, "m")
        return real(client, wanted)

    monkeypatch.setattr(Client, "status", status)
    told = batchkv("results", batch_id, "-o", out, "--follow")
    assert told.exit_code == 0 and "nobody serves the queue" in told.stderr
    assert len(calls) > 6 and out.read_text("utf-8").count("\n") == 2


def test_results_to_a_file(at_server: str, redis_connection: Redis, source: Path) -> None:
    """-o appends missing rows, answers and errors apart. --ordered and text write new files."""
    batch_id, out = submitted(source), source.with_name("out")
    errors = source.with_name("out.errors.jsonl")
    first = batchkv("results", batch_id, "-o", out)
    assert (first.exit_code, first.stdout) == (0, "")
    assert f"1 of 3 rows: 0 in {out}, 1 in {errors}; 2 have not ended yet" in first.stderr
    finish(redis_connection, "m")
    for _ in range(2):
        told = batchkv("results", batch_id, "-o", out, "--follow").stderr
        assert told == f"batchkv: 3 of 3 rows: 2 in {out}, 1 in {errors}\n"
    assert out.read_text("utf-8").count("\n") == 2
    assert ids_in(errors) == [f"{batch_id}-2"]
    backwards = out.read_text("utf-8").splitlines(keepends=True)[::-1]
    out.write_text("".join(backwards), "utf-8")
    ordered = batchkv("results", batch_id, "-o", out, "--ordered")
    assert ordered.stderr == f"batchkv: 3 of 3 rows: 2 in {out}, 1 in {errors}\n"
    assert ids_in(out) == [f"{batch_id}-1", f"{batch_id}-3"]
    assert ids_in(errors) == [f"{batch_id}-2"]
    assert_complains(batchkv("results", batch_id, "-o", out, "--errors"), 2, "standard output")
    text = source.with_name("out.txt")
    assert batchkv("results", batch_id, "-o", text, "--format", "text").exit_code == 0
    assert text.read_text("utf-8").count("the answer\n") == 2
    again = batchkv("results", batch_id, "-o", text, "--format", "text")
    assert_complains(again, 2, "exists: choose another")
    assert_complains(batchkv("results", batch_id, "-o", source), 2, "not a file of results")
    assert_complains(batchkv("results", batch_id, "-o", source, "--ordered"), 2, "not a file of")
    assert_complains(batchkv("results", batch_id, "-o", source.parent), 2, "it is a folder")


def test_results_say_what_lacks(at_server: str, redis_connection: Redis, source: Path) -> None:
    """Without a line on standard output, a sentence says why: no row has ended, or none failed."""
    good = source.with_name("good.txt")
    good.write_text("one\ntwo\n", "utf-8")
    batch_id = submitted(good)
    for flags in ([], ["--errors"], ["--format", "text"], ["--json"]):
        none = batchkv("results", batch_id, *flags)
        assert none.stdout == ("[]\n" if "--json" in flags else "")
        assert (none.exit_code, none.stderr) == (0, "batchkv: 0 of 2 rows have ended\n")
    finish(redis_connection, "m")
    assert batchkv("results", batch_id).stderr == ""
    errors = batchkv("results", batch_id, "--errors")
    assert errors.stdout == ""
    assert errors.stderr == "batchkv: all rows that have ended have an answer\n"


def test_text_has_answers_alone(at_server: str, redis_connection: Redis, source: Path) -> None:
    """In text form standard output and FILE have answers alone. A failed row goes to standard error
    with its id, and to standard output if only errors are wanted."""
    batch_id, out = submitted(source), source.with_name("text.txt")
    finish(redis_connection, "m")
    failed = r"line-2: \[invalid_json\] [^\n]+\n"
    for flags in (["--ordered"], ["-o", out]):
        found = batchkv("results", batch_id, "--format", "text", *flags)
        answers = out.read_text("utf-8") if out in flags else found.stdout
        assert answers == "the answer\nthe answer\n"
        assert re.match(f"batchkv: {failed}", found.stderr)
    errors = batchkv("results", batch_id, "--format", "text", "--errors")
    assert re.fullmatch(failed, errors.stdout) and errors.stderr == ""
    one = batchkv("result", f"{batch_id}-2", "--format", "text")
    assert (one.exit_code, one.stdout) == (1, "")
    assert re.fullmatch(f"batchkv: {failed}", one.stderr)


def test_results_as_json(at_server: str, redis_connection: Redis, source: Path) -> None:
    """--json prints one array of the rows; with -o it prints how many rows are in which file."""
    batch_id, out = submitted(source), source.with_name("out.jsonl")
    some = batchkv("results", batch_id, "--json", "-o", out)
    assert json.loads(some.stdout)["not_ended"] == 2 and some.stderr == ""
    finish(redis_connection, "m")
    rows = json.loads(batchkv("results", batch_id, "--ordered", "--json").stdout)
    lines = batchkv("results", batch_id, "--ordered").stdout.splitlines()
    assert rows == [json.loads(line) for line in lines] and len(rows) == 3
    for flags in ([], ["--ordered"], ["--follow"]):
        found = json.loads(batchkv("results", batch_id, "--json", "-o", out, *flags).stdout)
        assert found == {
            "batch_id": batch_id,
            "total": 3,
            "not_ended": 0,
            "out": {"path": str(out), "rows": 2},
            "errors": {"path": f"{out}.errors.jsonl", "rows": 1},
        }


def test_result_of_one_job(at_server: str, redis_connection: Redis, source: Path) -> None:
    """result prints a job's line or text; exit code 1 without an answer."""
    batch_id = submitted(source)
    waiting = batchkv("result", f"{batch_id}-1", "--wait", "0.1")
    assert_complains(waiting, 1, "no result yet: job .* is queued")
    finish(redis_connection, "m")
    assert json.loads(batchkv("result", f"{batch_id}-1", "--json").stdout)["error"] is None
    assert batchkv("result", f"{batch_id}-1", "--format", "text").stdout == "the answer\n"
    failed = batchkv("result", f"{batch_id}-2")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["response"]["body"]["error"]["code"] == "invalid_json"


def test_status_of_a_failed_job_says_why(at_server: str, source: Path) -> None:
    """The code and the message, for people and in JSON."""
    job_id = f"{submitted(source)}-2"
    assert re.search(r"error +invalid_json: the line is not", batchkv("status", job_id).stdout)
    assert json.loads(batchkv("status", job_id, "--json").stdout)["error"].startswith("invalid_")


def test_cancel_and_retry_say_how_many(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """cancel takes a job or a batch, retry a batch. Both report on standard error, in sentences."""
    batch_id = submitted(source)
    assert batchkv("cancel", f"{batch_id}-1").stderr == "batchkv: 1 row was canceled\n"
    assert "no row was canceled: all had ended" in batchkv("cancel", f"{batch_id}-1").stderr
    assert batchkv("cancel", batch_id).stderr == "batchkv: 1 row was canceled\n"
    waited = batchkv("wait", batch_id)
    assert waited.stdout == "3 = 0 ok + 1 failed + 2 canceled\n"
    assert f"2 rows are canceled: `batchkv retry {batch_id} --canceled`" in waited.stderr
    none = batchkv("retry", batch_id).stderr
    assert none == (
        "batchkv: no row was queued again. 1 row is wrong in the input: correct the file. "
        f"2 rows are canceled: `batchkv retry {batch_id} --canceled` queues them again\n"
    )
    again = batchkv("retry", batch_id, "--canceled", "--job-timeout", "77")
    assert again.stderr.startswith(
        "batchkv: 2 rows were queued again. 1 row is wrong in the input: correct the file\n"
        "batchkv: nobody serves"
    )
    finish(redis_connection, "m")
    assert batchkv("wait", batch_id).stdout == "3 = 2 ok + 1 failed + 0 canceled\n"


# ---- terminals, pipes, servers ----


def at_terminal(*arguments: object) -> str:
    """The text that a terminal gets from a command."""
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "batchkv_producer", *map(str, arguments)]
    started = subprocess.Popen(command, stdout=other_end, stderr=other_end)
    os.close(other_end)
    seen = b""
    while True:
        try:
            block = os.read(main_end, 65536)
        except OSError as fault:  # how Linux tells that the other end is closed
            assert fault.errno == errno.EIO
            break
        if not block:
            break
        seen += block
    os.close(main_end)
    started.wait()
    return seen.decode("utf-8")


def test_control_characters_do_not_reach_a_terminal(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """Escape sequences in answers are escaped on a terminal, and unchanged in a pipe."""
    batch_id = submitted(source)
    finish(redis_connection, "m", f"say {ESCAPE}")
    for flags in (["--format", "text"], []):
        shown = at_terminal("results", batch_id, *flags)
        assert not set("\x1b\x07\x9b\u202e") & set(shown), ascii(shown)
        assert "say " in shown and "\\u001b]0;owned" in shown
    piped = batchkv("results", batch_id, "--format", "text")
    assert f"say {ESCAPE}" in piped.stdout


def test_wait_at_a_terminal_draws_and_cleans_up(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """On a terminal progress is a bar. At the end only the sum stays."""
    batch_id = submitted(source)
    finish(redis_connection, "m")
    shown = at_terminal("wait", batch_id)
    assert "3/3" in shown
    assert shown.splitlines()[-1].endswith("3 = 2 ok + 1 failed + 0 canceled")


def test_names_do_not_reach_a_terminal_raw(at_server: str, source: Path) -> None:
    """A batch's name, and a file's name in an error, are escaped, too."""
    named = batchkv("submit", source, "-m", "m", "--name", f"n{ESCAPE}")
    assert named.exit_code == 1
    for found in (batchkv("list"), batchkv("status"), batchkv("status", named.stdout.strip()),
                  batchkv("submit", f"none{ESCAPE}", "-m", "m"), named):  # fmt: skip
        assert "\x1b" not in found.output and "\x9b" not in found.output


def test_a_closed_pipe_ends_quietly(at_server: str, redis_connection: Redis, source: Path) -> None:
    """`batchkv results | head -1` leaves no trace on standard error."""
    source.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(90)), "utf-8")
    batch_id = submitted(source)
    finish(redis_connection, "m", "x" * 5000)
    line = f"{sys.executable} -m batchkv_producer results {batch_id}"
    for script, lines in ((f"{line} | head -1", 1), (f"{line} --help | true", 0)):
        found = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
        assert (found.stdout.count("\n"), found.stderr) == (lines, "")


def test_results_to_a_full_standard_output(
    at_server: str, redis_connection: Redis, source: Path
) -> None:
    """A full disk behind standard output is one line and exit code 4."""
    batch_id = submitted(source)
    finish(redis_connection, "m")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        found = process("results", batch_id, capture_output=False, stdout=full,
                        stderr=subprocess.PIPE)  # fmt: skip
    assert found.returncode == 4
    assert found.stderr == "batchkv: cannot write the output: No space left on device\n"


def test_no_server_is_exit_code_3(source: Path) -> None:
    """Without Redis, every command that needs it ends with one line, which has no password."""
    url = "redis://:secret@127.0.0.1:1/0"
    for command in (["submit", source, "-m", "m"], ["run", source, "-m", "m"], ["status"],
                    ["list"], ["workers"], ["wait", "0123456789abcdef"]):  # fmt: skip
        found = batchkv(*command, "--url", url)
        assert_complains(found, 3, r"Redis at redis://:\*\*\*@127.0.0.1:1/0 cannot be reached")


def test_embedded_server_serves_when_none_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, redis_server: object, tmp_path: Path
) -> None:
    """Without a URL a server is started. It goes on after the command, and can be stopped."""
    home = Home(Path("/tmp") / f"bkv-cli-{os.getpid()}")
    monkeypatch.setenv("BATCHKV_HOME", str(home.path))
    try:
        assert batchkv("server", "status").exit_code == 3
        found = process("submit", source, "-m", "m")  # it ends, and its server does not
        assert found.returncode == 1 and "batchkv: queued 2 of 3 rows" in found.stderr
        assert found.stdout.strip() in batchkv("list").stdout
        told = json.loads(batchkv("server", "status", "--json").stdout)
        assert told["is_running"] and told["socket"] == str(home.socket) and told["memory_bytes"]
        assert "valkey" in batchkv("server", "status").stdout
        assert batchkv("server", "start").stdout == f"{home.url}\n"
        assert batchkv("server", "stop").stderr == "batchkv: the server is stopped\n"
        assert batchkv("server", "stop").stderr == "batchkv: no server was running\n"
        assert process("server", "start").stdout == f"{home.url}\n"
        with Redis.from_url(home.url) as connection:
            now = {"birth": "2026-01-01T00:00:00Z", "bkv_seen": connection.time()[0]}
            for name in ("mac-1", "mac-2"):
                key = redis_keys.worker(name)
                connection.hset(key, mapping={**now, "queues": redis_keys.queue_name("m")})
                connection.sadd("rq:workers", key)
            ended = subprocess.Popen(["true"])
            ended.wait()
            killed = {**now, "hostname": socket.gethostname(), "pid": ended.pid}
            queue = redis_keys.queue_name("m")
            connection.hset(redis_keys.worker("killed"), mapping={**killed, "queues": queue})
            connection.sadd("rq:workers", redis_keys.worker("killed"))
        stopped = batchkv("server", "stop").stderr
        assert stopped.startswith("batchkv: the server is stopped\nbatchkv: 2 workers were conn")
        assert "(mac-1, mac-2). A worker keeps its rows and goes on when" in stopped
        assert found.stdout.strip() in batchkv("list").stdout
    finally:
        server.stop(home)
        subprocess.run(["rm", "-r", str(home.path)], check=True)


# ---- progress ----


def test_plain_progress_is_rare(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: at most one line every five seconds, and none without a change."""
    now = [0.0]
    plain = PlainReporter(lambda: now[0])
    for second in range(60):
        now[0] = float(second)
        ended = min(second, 30)
        plain.update(Snapshot(100, ok=ended, failed=1, running=2, completion_tokens=10 * ended))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[1] == "11/100 2 held, 1 failed, 10 tok/s, 1m29s left"


def test_rates_are_those_of_the_last_half_minute() -> None:
    """A stall shows in the rate after half a minute. Before the second sample there is no rate."""
    now = [0.0]
    rates = Rates(lambda: now[0])
    assert rates.rows_per_second == 0
    for second in range(100):
        now[0] = float(second)
        rates.add(Snapshot(1000, ok=min(second, 50), completion_tokens=7 * min(second, 50)))
    assert rates.rows_per_second == rates.tokens_per_second == 0


def test_rows_that_ended_before_are_no_rate() -> None:
    """A continued run, or one with kept answers, shows no time left before it has ended a row."""
    rates = Rates(itertools.count().__next__)
    rates.add(Snapshot(total=13, is_queuing=True))
    for _ in range(2):
        rates.add(Snapshot(total=13, ok=12))
    assert rates.rows_per_second == 0


def test_live_progress_takes_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in a note are printed as they are."""
    with LiveReporter() as live:
        live.update(Snapshot(10, ok=3))
        live.note("see [/tmp/x] [bold]")
    assert "see [/tmp/x] [bold]" in capsys.readouterr().err


def test_durations_read_well() -> None:
    """A duration has at most two units."""
    assert [duration(s) for s in (3.4, 200, 7500, 100_000)] == ["3s", "3m20s", "2h05m", "1d03h"]

"""OUT has whole lines and each id once, whatever a crash, a user or a full disk does to it."""

from __future__ import annotations

import fcntl
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv_producer.errors import UsageError
from batchkv_producer.results import outfile
from batchkv_producer.results.line_file import LineFile, OutputError
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.outfile import ResultsFile, open_results
from batchkv_producer.results.output import output_line
from batchkv_producer.wire.job import Result

BATCH = "0123456789abcdef"
OTHER = "fedcba9876543210"


def ok(line: int, batch: str = BATCH, text: str = "fine") -> str:
    return output_line(f"{batch}-{line}", Result(f"c{line}", "chat", "ok", text=text))


def bad(line: int, why: str = "broken") -> str:
    result = Result(f"c{line}", "chat", "failed", error=("engine_error", why))
    return output_line(f"{BATCH}-{line}", result)


def refused(line: int) -> str:
    result = Result(f"c{line}", "chat", "failed", error=("invalid_request", "no prompt"))
    return output_line(f"{BATCH}-{line}", result)


def write(path: Path, rows: Sequence[tuple[int, str]], is_failed: bool = False) -> None:
    with open_results(path, BATCH) as target:
        for line, text in rows:
            target.append(line, text, is_failed=is_failed)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_appends_whole_lines_and_skips_ids_that_are_there(out: Path) -> None:
    """A second opening knows the ids of the first and refuses to write them again."""
    write(out, [(1, ok(1)), (7, ok(7))])
    with open_results(out, BATCH) as again:
        assert not again.append(7, ok(7), is_failed=False)
        assert again.append(2, ok(2), is_failed=False)
        assert again.num_rows == 3
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-7", f"{BATCH}-2"]
    assert not outfile.errors_path(out).exists()


@pytest.mark.parametrize("kept", [1, 5, 12, 27, 28, 60])
def test_torn_last_line_is_cut(out: Path, kept: int) -> None:
    """If a crash has cut the last line short anywhere, the line is removed and the row is written
    again."""
    write(out, [(1, ok(1))])
    whole = out.read_bytes()
    out.write_bytes(whole + ok(2).encode()[:kept])
    with open_results(out, BATCH) as again:
        assert again.append(2, ok(2), is_failed=False)
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-2"]


def test_zeros_after_a_power_failure_are_cut(out: Path) -> None:
    """Zeros at the end, which a file system may leave after a power failure, are removed."""
    write(out, [(1, ok(1))])
    out.write_bytes(out.read_bytes() + bytes(4096))
    write(out, [(2, ok(2))])
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-2"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_anywhere_ends_with_each_id_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """If both files are cut at any byte, a rerun ends with each id once, in the right file."""
    out = tmp_path_factory.mktemp("cut") / "o"
    rows = {n: bad(n) if n % 3 == 0 else ok(n, text='x"error":null}\n' * n) for n in range(1, 9)}

    def fill() -> None:
        with open_results(out, BATCH) as target:
            for line, text in rows.items():
                target.append(line, text, is_failed=line % 3 == 0)

    fill()
    for path in (out, outfile.errors_path(out)):
        raw = path.read_bytes()
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    fill()
    assert sorted(ids(out)) == [f"{BATCH}-{line}" for line in rows if line % 3]
    assert sorted(ids(outfile.errors_path(out))) == [f"{BATCH}-3", f"{BATCH}-6"]


def test_failed_rows_stand_in_the_errors_file_alone(out: Path) -> None:
    """A failed row is in OUT.errors.jsonl once, and not in OUT, also after a rerun."""
    for _ in range(2):
        write(out, [(1, ok(1))])
        write(out, [(3, bad(3)), (4, refused(4))], is_failed=True)
    assert ids(out) == [f"{BATCH}-1"]
    assert ids(outfile.errors_path(out)) == [f"{BATCH}-3", f"{BATCH}-4"]


def test_both_files_are_read_at_start(out: Path) -> None:
    """A row in the errors file is not written again."""
    write(out, [(1, ok(1))])
    write(out, [(3, bad(3))], is_failed=True)
    with open_results(out, BATCH) as again:
        assert (again.num_ok, again.num_failed, again.num_rows) == (1, 1, 2)
        assert not again.append(3, bad(3, "of something else"), is_failed=True)


def test_an_errors_file_of_another_batch_is_refused(out: Path) -> None:
    """The errors file must be of the same batch, too. Nothing is changed."""
    outfile.errors_path(out).write_text(ok(1, OTHER) + "\n", "utf-8")
    with pytest.raises(UsageError, match="holds results of batch fedcba9876543210"):
        open_results(out, BATCH)
    assert outfile.errors_path(out).read_text("utf-8") == ok(1, OTHER) + "\n"


def test_a_retried_row_moves_to_out(out: Path) -> None:
    """A failed row that has been answered since is in OUT, and no longer in the errors file."""
    write(out, [(1, ok(1))])
    write(out, [(2, bad(2)), (3, bad(3))], is_failed=True)
    errors = outfile.errors_path(out)
    errors.chmod(0o640)
    with open_results(out, BATCH) as again:
        assert again.append(2, ok(2), is_failed=False)
        assert (again.num_ok, again.num_failed) == (2, 1)
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-2"]
    assert ids(errors) == [f"{BATCH}-3"]
    assert errors.stat().st_mode & 0o777 == 0o640
    write(out, [(3, ok(3))])
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl"]


def test_a_retried_row_that_failed_again_has_its_new_line(out: Path) -> None:
    """A row that is queued again keeps its line until it has ended again. Then the new line
    replaces it."""
    errors = outfile.errors_path(out)
    write(out, [(2, bad(2)), (3, bad(3))], is_failed=True)
    with open_results(out, BATCH, lambda lines, rows: {2} & set(lines)) as again:
        assert (again.num_failed, ids(errors)) == (1, [f"{BATCH}-2", f"{BATCH}-3"])
        assert again.append(2, bad(2, "otherwise"), is_failed=True)
        assert not again.append(2, bad(2, "otherwise"), is_failed=True)
        assert again.num_failed == 2
    assert errors.read_text("utf-8").splitlines() == [bad(3), bad(2, "otherwise")]


def test_the_new_line_is_on_the_disk_before_the_old_one_goes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is synced after the answer is written and before the errors file is replaced."""
    write(out, [(2, bad(2))], is_failed=True)
    write(out, [(1, ok(1)), (3, bad(3))])  # a failed row in OUT, as of an older version
    calls: list[tuple[str, str]] = []

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any) -> Any:
            calls.append((name, Path(getattr(self, "path", self)).name))
            return real(self, *args)

        monkeypatch.setattr(owner, name, watched)

    watch(LineFile, "sync")
    watch(LineFile, "flush")
    watch(Path, "replace")
    with open_results(out, BATCH) as again:
        moved = calls.index(("replace", ".out.jsonl.tmp"))
        assert ("sync", "out.jsonl.errors.jsonl") in calls[:moved]
        calls.clear()
        again.append(2, ok(2), is_failed=False)
        again.tidy()
    gone = calls.index(("replace", ".out.jsonl.errors.jsonl.tmp"))
    assert calls.index(("flush", "out.jsonl")) < calls.index(("sync", "out.jsonl")) < gone


def test_a_long_run_tidies_now_and_then(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced lines leave the errors file during the run, not only at its end."""
    write(out, [(2, bad(2)), (3, bad(3))], is_failed=True)
    with open_results(out, BATCH) as again:
        again.append(2, ok(2), is_failed=False)
        again.flush()
        assert ids(outfile.errors_path(out)) == [f"{BATCH}-2", f"{BATCH}-3"]
        monkeypatch.setattr(outfile, "TIDY_SECONDS", 0.0)
        again.flush()
        assert (ids(out), ids(outfile.errors_path(out))) == ([f"{BATCH}-2"], [f"{BATCH}-3"])


# ---- files of older versions ----


def old_bad(line: int) -> str:
    """A failed row as older versions wrote it, into OUT and into the errors file."""
    error = {"code": "invalid_json", "message": "line is not JSON"}
    value = {"id": f"{BATCH}-{line}", "custom_id": f"c{line}", "response": None, "error": error}
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("num_copied", [0, 1, 2])
def test_failed_rows_in_out_are_moved(out: Path, num_copied: int) -> None:
    """Failed rows in an OUT of an older version are moved to the errors file, which may have some
    already."""
    errors = outfile.errors_path(out)
    rows = [ok(1), old_bad(2), ok(3), old_bad(4), refused(5)]
    out.write_text("".join(f"{row}\n" for row in rows), "utf-8")
    out.chmod(0o600)
    errors.write_text("".join(f"{row}\n" for row in [old_bad(2), old_bad(4)][:num_copied]), "utf-8")
    with open_results(out, BATCH) as migrated:
        assert (migrated.num_ok, migrated.num_failed) == (2, 3)
    assert out.read_text("utf-8").splitlines() == [ok(1), ok(3)]
    assert errors.read_text("utf-8").splitlines() == [old_bad(2), old_bad(4), refused(5)]
    assert out.stat().st_mode & 0o777 == 0o600


KILLS = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path
from batchkv_producer.results import outfile
from batchkv_producer.results.line_file import LineFile
before, after, rows = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
out = after / "out.jsonl"

def work():
    stale = lambda lines, _: {7, 8} & set(lines)
    with outfile.open_results(out, "0123456789abcdef", stale) as target:
        for line, text, is_failed in rows:
            target.append(line, text, is_failed=is_failed)
            target.flush()

def dying(number):
    steps = itertools.count(1)
    def before_each(owner, name):
        real = getattr(owner, name)
        def step(*args, **kwargs):
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, step)
    for name in ("pwrite", "fsync", "ftruncate", "unlink"):
        before_each(os, name)
    before_each(Path, "replace")
    before_each(Path, "unlink")
    outfile.TIDY_SECONDS = 0.0

def ids():
    return [[json.loads(line)["id"] for line in path.open("rb") if line.endswith(b"\\n")]
            if path.exists() else [] for path in (out, outfile.errors_path(out))]

for number in itertools.count(1):
    shutil.rmtree(after, ignore_errors=True)
    shutil.copytree(before, after)
    child = os.fork()
    if child == 0:
        dying(number)
        work()
        os._exit(0)
    was_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = ids()
    work()
    print(json.dumps([left, ids(), sorted(path.name for path in after.iterdir())]))
    if not was_killed:
        break
"""


def test_killed_between_any_two_writes(tmp_path: Path) -> None:
    """After kill -9 before any write, sync or rename, during a migration or with retried rows, no
    row is lost. The next run ends with each id in one file."""
    before = tmp_path / "before"
    before.mkdir()
    old = [ok(1), old_bad(2), old_bad(3), ok(4), refused(7), bad(8)]
    (before / "out.jsonl").write_text("".join(f"{row}\n" for row in old), "utf-8")
    copies = f"{old_bad(2)}\n{old_bad(3)[:30]}"  # a crash of the older version, too
    outfile.errors_path(before / "out.jsonl").write_text(copies, "utf-8")
    rows = [(2, ok(2), False), (5, ok(5), False), (6, bad(6), True), (7, ok(7), False)]
    rows.append((8, bad(8, "again"), True))
    command = [sys.executable, "-c", KILLS, str(before), str(tmp_path / "after"), json.dumps(rows)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    ends = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(ends) > 20
    wanted = [[f"{BATCH}-{n}" for n in lines] for lines in ((1, 2, 4, 5, 7), (3, 6, 8))]
    there = {f"{BATCH}-{n}" for n in (1, 2, 3, 4, 7, 8)}
    for left, ended, names in ends:
        assert there <= {*left[0], *left[1]}, left
        assert len(set(left[0])) == len(left[0]), left
        assert [sorted(found) for found in ended] == wanted, left
        assert set(names) <= {"out.jsonl", "out.jsonl.errors.jsonl"}, names


def test_files_in_the_order_of_the_input(out: Path) -> None:
    """Both files can be written anew in any order; a row that is queued again keeps its line."""
    write(out, [(3, ok(3)), (1, ok(1))])
    write(out, [(4, bad(4)), (2, bad(2)), (5, bad(5))], is_failed=True)
    rows = [(1, ok(1), False), (2, bad(2), True), (3, ok(3), False), (4, ok(4), False)]
    with open_results(out, BATCH) as target:
        assert target.replace(iter(rows)) == 4
        assert (target.num_ok, target.num_failed) == (3, 2)
    assert out.read_text("utf-8").splitlines() == [ok(1), ok(3), ok(4)]
    assert outfile.errors_path(out).read_text("utf-8").splitlines() == [bad(2), bad(5)]


def test_answers_that_the_server_lost_stay(out: Path) -> None:
    """An OUT that is written anew in order keeps an answer that a restored server has lost."""
    write(out, [(3, ok(3)), (1, ok(1))])
    with open_results(out, BATCH) as target:
        assert target.replace(iter([(1, ok(1), False)])) == 1
        assert target.num_ok == 2
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-3"]


def test_lines_formatted_by_another_tool_are_known(out: Path) -> None:
    """A line that another program has reformatted (spaces, order of keys) still has its id."""
    value = {"error": None, "custom_id": "c1", "id": f"{BATCH}-1", "response": {}}
    out.write_text(json.dumps(value) + "\n", "utf-8")
    with open_results(out, BATCH) as again:
        assert again.num_ok == 1 and not again.append(1, ok(1), is_failed=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ok(1, OTHER) + "\n", "holds results of batch fedcba9876543210"),
        ("hello\n", "line 1 is no result"),
        ("hello", "not a file of results"),
        ('{"prompt": "x"}\n', "line 1 is no result"),
        (ok(1) + "\nhello\n", "line 2 is no result"),
        (ok(1) + "\n" + ok(1) + "\n", "twice"),
        (ok(2, OTHER)[:40], "not a file of results of batch"),
    ],
)
def test_a_file_that_is_something_else_is_refused_unchanged(
    out: Path, content: str, reason: str
) -> None:
    """A file with another batch's results, or without results, is refused and not changed."""
    out.write_text(content, "utf-8")
    with pytest.raises(UsageError, match=reason):
        open_results(out, BATCH)
    assert out.read_text("utf-8") == content


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    """A folder, a device, a path in a missing folder and the input are refused. The error names
    which it is."""
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n", "utf-8")
    (tmp_path / "link").symlink_to("/dev/full")
    for path, reason in (
        (tmp_path, "it is a folder"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / "link", "not a regular file"),
        (tmp_path / "none" / "out", "there is no folder"),
        (Path("/proc/out.jsonl"), "cannot write results to /proc/out.jsonl: No such file"),
        (Path("-"), "a file with a name"),
        (source, "it is the input"),
    ):
        with pytest.raises(UsageError, match=reason):
            outfile.check_target(path, source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "link"]


def test_two_writers_are_not_let_in(out: Path) -> None:
    """While one run has OUT open, a second is refused; afterwards it is not."""
    message = "is being written by another batchkv"
    with open_results(out, BATCH), pytest.raises(UsageError, match=message):
        open_results(out, BATCH)
    with open_results(out, BATCH):
        pass


def test_lock_is_not_inherited_by_children(out: Path) -> None:
    """A worker started meanwhile does not keep OUT locked after the run."""
    command = [sys.executable, "-c", "print('begun', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with open_results(out, BATCH):
        child = subprocess.Popen(command, close_fds=False, **pipes)
    with child:
        assert child.stdout is not None
        child.stdout.readline()  # a new program has begun: what it does not inherit is closed
        with out.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.communicate(b"\n")


def replace_by_copy(path: Path) -> None:
    """Replaces a file by a copy, as `sed -i` and editors do."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.parametrize(
    ("meddle", "deed"),
    [
        (Path.unlink, "deleted"),
        (lambda path: path.rename(path.with_name("mine")), "moved"),
        (replace_by_copy, "replaced"),
        (lambda path: path.write_bytes(b""), "cut"),
    ],
    ids=["deleted", "moved", "replaced", "cut"],
)
def test_a_file_that_others_change_meanwhile_is_not_written_on(
    out: Path, meddle: Callable[[Path], object], deed: str
) -> None:
    """If OUT is deleted, moved, replaced or cut during a run, the run ends with an error. The next
    run writes every row."""
    words = f"another program has .*{deed}"
    with pytest.raises(OutputError, match=words), open_results(out, BATCH) as target:
        target.append(1, ok(1), is_failed=False)
        target.flush()
        meddle(out)
        target.append(2, ok(2), is_failed=False)
        target.flush()
    write(out, [(1, ok(1)), (2, ok(2))])
    assert sorted(ids(out)) == [f"{BATCH}-1", f"{BATCH}-2"]


def test_a_file_that_is_numbered_anew_is_written_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new inode number, as a network file system may give it, does not end the run."""
    with open_results(out, BATCH) as target:
        monkeypatch.setattr("os.path.samestat", lambda *_: False)
        for line in (1, 2):
            target.append(line, ok(line), is_failed=False)
            target.flush()
    assert ids(out) == [f"{BATCH}-1", f"{BATCH}-2"]


def test_an_errors_file_of_somebody_else_is_not_removed(out: Path) -> None:
    """Our empty errors file was deleted. The file that another run has created since stays."""
    with pytest.raises(OutputError), open_results(out, BATCH):
        outfile.errors_path(out).unlink()
        outfile.errors_path(out).write_text(bad(1) + "\n", "utf-8")
    assert ids(outfile.errors_path(out)) == [f"{BATCH}-1"]


FULL = """
import resource, sys
from pathlib import Path
from batchkv_producer.results.outfile import OutputError, open_results
lines = Path(sys.argv[2]).read_text("utf-8").splitlines()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    with open_results(Path(sys.argv[1]), "0123456789abcdef") as target:
        for number, line in enumerate(lines, 1):
            target.append(number, line, is_failed=False)
            target.flush()
except OutputError as fault:
    print(fault)
    sys.exit(fault.exit_code)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limit here")
def test_a_full_disk_leaves_whole_lines_and_a_rerun_goes_on(out: Path, tmp_path: Path) -> None:
    """On a full disk OUT ends with a whole line. A later run writes the rest."""
    lines = [ok(n) for n in range(1, 21)]
    (tmp_path / "lines").write_text("\n".join(lines), "utf-8")
    limit = str(len(lines[0]) * 5 + 20)
    command = [sys.executable, "-c", FULL, str(out), str(tmp_path / "lines"), limit]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == OutputError.exit_code, ended.stderr
    assert "the disk is full" in ended.stdout and "run the same command again" in ended.stdout
    assert ids(out) == [f"{BATCH}-{n}" for n in range(1, 6)]
    write(out, list(enumerate(lines, 1)))
    assert ids(out) == [f"{BATCH}-{n}" for n in range(1, 21)]


def test_write_new_replaces_in_one_step(out: Path) -> None:
    """A file that is written whole appears only at the end, and replaces no existing file."""

    def rows() -> list[bytes]:
        assert not out.exists()
        return [b"a\n", b"b\n"]

    assert outfile.write_new(out, (row for row in rows())) == 2
    assert out.read_bytes() == b"a\nb\n"
    with pytest.raises(UsageError, match="exists: choose another"):
        outfile.write_new(out, [b"c\n"])


def test_line_set_is_small_and_exact() -> None:
    """A million line numbers take less than a megabyte; huge ones take no pages."""
    lines, far = LineSet(), range(10**11, 10**11 + 10**9, 10**7)
    assert all(lines.add(n) for n in range(1, 200_001, 2))
    assert all(lines.add(n) for n in far) and not lines.add(10**11)
    assert 1 in lines and 2 not in lines and 10**11 in lines and len(lines) == 100_100
    assert all(lines.discard(n) for n in far) and not lines.discard(10**11)
    assert 10**11 not in lines and len(lines) == 100_000
    assert sum(map(len, lines._pages.values())) < 2**16


def test_reopening_keeps_memory_flat(out: Path) -> None:
    """Opening reads line by line: peak memory does not grow with the file."""
    import tracemalloc

    with open_results(out, BATCH) as target:
        for number in range(1, 20_001):
            target.append(number, ok(number, text="x" * 200), is_failed=False)
    assert out.stat().st_size > 8_000_000
    tracemalloc.start()
    with open_results(out, BATCH) as again:
        assert isinstance(again, ResultsFile) and again.num_ok == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000

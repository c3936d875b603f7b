"""What an input may be: several files, JSON arrays, pipes; and what is refused with a way out."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.errors import InputFileError, UsageError
from batchkv_producer.intake import json_array
from batchkv_producer.intake.expected import Expected
from batchkv_producer.intake.formats import MAX_LINE_BYTES, Row, RowError, read_elements
from batchkv_producer.intake.reading import Reading
from batchkv_producer.intake.source import Inputs, Piece
from batchkv_producer.intake.spooling import SpoolError, gathered
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import decode_job

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, which is there."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def rows_of(connection: Redis, batch_id: str) -> dict[int, tuple[str, str | None]]:
    """(custom_id, prompt) of the queued rows by line."""
    found = {}
    for key in connection.keys(f"rq:job:{batch_id}-*"):
        request = decode_job(connection.hget(key, "data"))
        line = int(key.decode().rpartition("-")[2])
        found[line] = (request.custom_id, request.prompt)
    return found


# ---- a file that is still written ----


@pytest.mark.parametrize("is_stdin", [False, True])
@pytest.mark.parametrize("change", ["grow", "shrink", "same size"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    write_lines: Write, change: str, is_stdin: bool
) -> None:
    """Its first part would be queued without a word."""
    source = write_lines(*[{"prompt": f"p{n}"} for n in range(50)])
    before = source.stat()
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    with source.open("rb") as stream:
        inputs = Inputs((Piece(stream, "stdin", 0),)) if is_stdin else Inputs.of(source)
        rows = Reading(inputs).rows()
        next(rows)
        if change == "same size":
            os.utime(source)
        else:
            os.truncate(source, before.st_size * (2 if change == "grow" else 0))
        with pytest.raises(InputFileError, match="changed while it was read: run the command"):
            list(rows)


def test_nothing_of_a_file_that_is_still_written_is_queued(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """By the command: a writer adds rows while it reads them."""
    source, is_over = tmp_path / "grow.jsonl", threading.Event()
    source.write_text('{"prompt": "x"}\n' * 30_000)

    def write() -> None:
        with source.open("a") as out:
            while not is_over.wait(0.002):
                out.write('{"prompt": "y"}\n')
                out.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = CliRunner().invoke(cli, ["submit", str(source), "-m", "m", "--url", redis_url])
    finally:
        is_over.set()
        writer.join()
    assert found.exit_code == 2 and "changed while it was read" in found.stderr
    assert redis_connection.keys("rq:job:*") == []


# ---- several files ----


def test_several_files_are_one_batch(
    client: Client, redis_connection: Redis, write_lines: Write
) -> None:
    """Lines are counted through; rows without an id are called FILE:line, in one file line-N."""
    first = write_lines({"prompt": "a"}, "", {"prompt": "b", "custom_id": "mine"}, name="a.jsonl")
    second = write_lines("c", name="b.txt")
    third = write_lines('[{"prompt": "d"},', '{"prompt": "e"}]', name="c.json")
    submitted = client.submit(Inputs.of(first, second, third), model="m")
    assert (submitted.total, submitted.num_bad) == (5, 0)
    assert rows_of(redis_connection, submitted.batch_id) == {
        1: ("a.jsonl:1", "a"),
        3: ("mine", "b"),
        4: ("b.txt:1", "c"),
        5: ("c.json:1", "d"),
        6: ("c.json:2", "e"),
    }
    status = client.status(submitted.batch_id)
    assert (status.name, status.last_line) == ("a.jsonl and 2 more", 6)
    assert client.submit(Inputs.of(first, second, third), model="m").joined
    alone = client.submit(Inputs.of(second), model="m")
    assert rows_of(redis_connection, alone.batch_id) == {1: ("line-1", "c")}
    assert client.submit(second, model="m").batch_id == alone.batch_id


def test_ids_are_unique_over_all_files(client: Client, write_lines: Write) -> None:
    """An id that another file has is a duplicate, and errors tell file and line."""
    first = write_lines({"prompt": "a", "custom_id": "x"}, name="a.jsonl")
    second = write_lines("", {"prompt": "b", "custom_id": "x"}, "{", name="b.jsonl")
    errors = client.check(Inputs.of(first, second), model="m").errors
    assert [(error.place, error.code) for error in errors] == [
        ("b.jsonl:2", "duplicate_custom_id"),
        ("b.jsonl:3", "invalid_json"),
    ]
    assert "taken by a.jsonl:1" in errors[0].message
    assert client.submit(Inputs.of(first, second), model="m").errors == errors


def test_models_that_differ_are_told_by_file(client: Client, write_lines: Write) -> None:
    """Files that name two models are refused, and the sentence says where."""
    first = write_lines({"prompt": "a", "model": "m1"}, name="a.jsonl")
    second = write_lines({"prompt": "b", "model": "m2"}, name="b.jsonl")
    with pytest.raises(UsageError, match=r'"m1" \(a.jsonl:1\) and "m2" \(b.jsonl:1\)'):
        client.check(Inputs.of(first, second))


def test_what_makes_several_files_another_batch(client: Client, write_lines: Write) -> None:
    """Order, names, bytes and the borders between files are the identity of several files."""
    a = write_lines({"prompt": "a"}, name="a.jsonl")
    b = write_lines({"prompt": "b"}, name="b.jsonl")
    c = write_lines({"prompt": "b"}, name="c.jsonl")
    both = write_lines({"prompt": "a"}, {"prompt": "b"}, name="both.jsonl")
    inputs = [(a, b), (b, a), (a, c), (b, c), (both,), (a,), (both, a)]
    ids = [client.check(Inputs.of(*files), model="m").batch_id for files in inputs]
    assert len(set(ids)) == len(ids)


def test_files_of_one_name_are_told_apart(
    client: Client, redis_connection: Redis, tmp_path: Path
) -> None:
    """Of files with the same name as much of the path is said as it takes; one twice is refused."""
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.txt").write_text(f"of {folder}\n")
    pair = Inputs.of(tmp_path / "x" / "p.txt", tmp_path / "y" / "p.txt")
    submitted = client.submit(pair, model="m")
    ids = [custom_id for custom_id, _ in rows_of(redis_connection, submitted.batch_id).values()]
    assert sorted(ids) == ["x/p.txt:1", "y/p.txt:1"]
    with pytest.raises(InputFileError, match=r"p\.txt is given twice"):
        client.check(Inputs.of(pair.pieces[0].origin, pair.pieces[0].origin), model="m")


def test_expected_answers_of_several_files(write_lines: Write) -> None:
    """metadata.expected is found under the numbers that the batch's rows have."""
    lines = write_lines("", {"prompt": "a", "metadata": {"expected": "1"}}, name="a.jsonl")
    array = write_lines(
        "[", {"prompt": "b"}, ",", {"prompt": "c", "metadata": {"expected": 3}}, "]", name="b.json"
    )
    found = Expected.read(Inputs.of(lines, array))
    assert found.num_expected == 2
    assert found.is_right(2, "1") and found.is_right(4, "3")


def test_rows_of_several_files_are_restored(
    redis_url: str, client: Client, redis_connection: Redis, tmp_path: Path
) -> None:
    """`retry` takes each file with --from, in their order, and --as as the submit had it."""
    paths = [tmp_path / name for name in ("a.md", "b.md")]
    for path in paths:
        path.write_text(f"of {path.name}\n")
    batch = client.submit(Inputs.of(*paths, read_as="text"), model="m").batch_id
    before = rows_of(redis_connection, batch)
    client.cancel(batch)
    for line in before:
        redis_connection.delete(f"rq:job:{batch}-{line}")

    def retried(*arguments: object) -> Result:
        command = ["retry", batch, "--canceled", "--url", redis_url, *map(str, arguments)]
        return CliRunner().invoke(cli, command)

    swapped = retried("--from", paths[1], "--from", paths[0], "--as", "text")
    assert swapped.exit_code == 2 and "does not make batch" in swapped.stderr
    alone = retried("--as", "text")
    assert alone.exit_code == 2 and "for retry --from FILE only" in alone.stderr
    found = retried("--from", paths[0], "--from", paths[1], "--as", "text")
    assert found.exit_code == 0 and "2 rows were queued again" in found.stderr, found.stderr
    assert rows_of(redis_connection, batch) == before


# ---- JSON arrays ----


def elements_of(raw: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    monkeypatch.setattr(json_array, "CHUNK_BYTES", chunk)
    return list(json_array.elements(io.BytesIO(raw), 60))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 2**20])
def test_elements_end_where_json_says(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets, commas and quotes inside strings separate nothing, wherever a read ends."""
    values = ['{"a": "x,]}\\\\\\"[", "b": [1, {}]}', '"st,r"', " 3", '\n{"c": "\\""}']
    raw = ("\ufeff \n[" + ",".join(values) + "]\n ").encode()
    assert elements_of(raw, chunk, monkeypatch) == [value.encode() for value in values]
    assert elements_of(b"[ ]", chunk, monkeypatch) == []
    assert elements_of(b'[{"a":1}, \n]', chunk, monkeypatch) == [b'{"a":1}']
    for long in (b'"' + b"x\\n" * 40 + b'"', b"[" * 50 + b"]" * 50, b"1" * 61):
        found = elements_of(b"[" + long + b",2]", chunk, monkeypatch)
        assert found == [None, b"2"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON), st.integers(1, 40), st.sampled_from([None, 2]), st.booleans())
def test_elements_are_what_json_has(
    values: list[object], chunk: int, indent: int | None, is_ascii: bool
) -> None:
    """Any array, laid out in any way and read in any pieces, has the elements that JSON says."""
    raw = json.dumps(values, indent=indent, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "CHUNK_BYTES", chunk)
        found = list(json_array.elements(io.BytesIO(raw), 2**20))
    assert [json.loads(one or b"") for one in found] == values


@pytest.mark.parametrize(
    "raw", [b"[", b'[{"a":1}', b'[{"a":1},', b'["a', b'["a\\', b'[{"a": [1}, 2]']
)
def test_an_array_without_an_end_is_refused(raw: bytes) -> None:
    """A file that was cut off gives no batch, and the sentence names the element."""
    with pytest.raises(InputFileError, match=r"has no end: element \d is cut off"):
        list(json_array.elements(io.BytesIO(raw), 60))


def test_text_behind_an_array_is_refused(write_lines: Write, client: Client) -> None:
    """What follows the array would be dropped in silence."""
    path = write_lines('[{"prompt": "a"}]', {"prompt": "b"}, name="a.json")
    with pytest.raises(InputFileError, match=r"a\.json: more text follows.*after element 1"):
        client.check(path, model="m")


def test_a_pretty_printed_array_is_rows(
    client: Client, redis_connection: Redis, tmp_path: Path
) -> None:
    """Elements are rows however they are laid out; a bad one is named, and stops no other."""
    path = tmp_path / "p.json"
    rows = [{"prompt": "a"}, 7, {"prompt": ""}, {"prompt": "b", "custom_id": "mine"}]
    path.write_text(json.dumps(rows, indent=2))
    submitted = client.submit(path, model="m")
    assert rows_of(redis_connection, submitted.batch_id) == {
        1: ("element-1", "a"),
        4: ("mine", "b"),
    }
    assert [(error.place, error.message) for error in submitted.errors] == [
        ("element 2", "the element is not a JSON object, but 7"),
        ("element 3", "prompt is empty"),
    ]


def test_an_array_needs_no_name(client: Client, write_lines: Write) -> None:
    """Objects in an array are rows in any file but .txt; a list of others is only so in .json."""
    piped = client.check(io.BytesIO(b' \n[\n{"prompt": "a"}, {"prompt": "b"}]'), model="m")
    assert (piped.total, piped.num_bad) == (2, 0)
    lines = client.check(write_lines("[1, 2]", {"prompt": "a"}), model="m")
    assert (lines.total, lines.errors[0].place) == (2, "line 1")
    strings = client.check(write_lines('["a", "b"]', name="s.json"), model="m")
    assert [error.place for error in strings.errors] == ["element 1", "element 2"]


def test_an_element_has_the_limits_of_a_line() -> None:
    """One that is too long is a bad row; it is not kept in memory, and the next one is read."""
    long = b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}'
    bad, good = read_elements(io.BytesIO(b"[" + long + b', {"prompt": "a"}]'))
    assert isinstance(bad, RowError) and bad.message.startswith("the element is longer than")
    assert isinstance(good, Row) and good.request.prompt == "a"


# ---- what is noticed ----


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a"}',
        '\n  {"custom_id": "x", "body": {"messages": []}}',
        '[{"prompt": "a"},',
        '{"model": "m", "prompt": "' + "x" * 70_000 + '"}',
    ],
)
def test_json_lines_called_txt_are_noticed(client: Client, write_lines: Write, line: str) -> None:
    """A .txt that begins with a row in JSON is refused until somebody says what it is."""
    path = write_lines(line, '{"prompt": "b"}', name="p.txt")
    with pytest.raises(InputFileError, match=r"--as jsonl .*--as text"):
        client.check(path, model="m")
    assert client.check(Inputs.of(path, read_as="text"), model="m").num_bad == 0


def test_as_says_what_a_file_is(client: Client, write_lines: Write) -> None:
    """--as overrides the name, and the batch is that of a file with the right name."""
    text = write_lines({"prompt": "a"}, name="p.txt")
    lines = write_lines({"prompt": "a"})
    as_lines = client.check(Inputs.of(text, read_as="jsonl"), model="m")
    assert as_lines.batch_id == client.check(lines, model="m").batch_id
    plain = write_lines("one", "two", name="notes.md")
    assert client.check(Inputs.of(plain, read_as="text"), model="m").num_jobs == 2


@pytest.mark.parametrize("line", ["{", "{} and more", '{"name": "x"}', '{"prompt" is a word'])
def test_text_that_looks_a_little_like_json_is_text(
    client: Client, write_lines: Write, line: str
) -> None:
    """A prompt may begin with a bracket."""
    assert client.check(write_lines(line, name="p.txt"), model="m").num_jobs == 1


def test_plain_text_by_another_name_is_noticed(client: Client, write_lines: Write) -> None:
    """Where no line is JSON and no name says that it should be, the sentence names --as text."""
    for source in (io.BytesIO(b"one\ntwo\n"), write_lines("one", "two", name="prompts")):
        with pytest.raises(InputFileError, match=r"no line of .* is JSON: --as text"):
            client.check(source, model="m")
    assert client.check(write_lines("one", "two"), model="m").num_bad == 2
    assert client.check(io.BytesIO(b'one\n{"prompt": "a"}\n'), model="m").num_bad == 1


@pytest.mark.parametrize(
    ("name", "table", "rows"),
    [
        (
            "it's.csv",
            'id,"the question"\n1,"a, b"\n2,c\n',
            [{"prompt": "a, b", "custom_id": "1"}, {"prompt": "c", "custom_id": "2"}],
        ),
        ("t.tsv", "Prompt\tx\na,b\t1\n", [{"prompt": "a,b"}]),
        (
            "t.csv",
            '\ufeffid;text\r\n1;"caf\u00e9\n2"\r\n',
            [{"custom_id": "1", "prompt": "caf\u00e9\n2"}],
        ),
    ],
)
def test_a_table_is_answered_with_a_command_that_works(
    client: Client, tmp_path: Path, name: str, table: str, rows: list[dict[str, str]]
) -> None:
    """The refusal of a .csv or .tsv holds a command for its own columns, which makes it rows."""
    path = tmp_path / name
    path.write_text(table, "utf-8", newline="")
    with pytest.raises(InputFileError, match="is a table") as fault:
        client.check(path, model="m")
    assert "\n" not in str(fault.value)
    command = str(fault.value).partition("of it: ")[2]
    assert shlex.split(command)[0] == "python3"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    made = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert made == rows
    assert client.check(tmp_path / f"{name}.jsonl", model="m").num_bad == 0


# ---- pipes ----


def test_a_pipe_is_copied_and_the_copy_has_no_name(
    client: Client, redis_connection: Redis, tmp_path: Path, home: Path
) -> None:
    """A FIFO is read once, and its rows as often as asked; nothing of it lies in any folder."""
    fifo = tmp_path / "p.fifo"
    os.mkfifo(fifo)
    raw = b'{"prompt": "a", "metadata": {"expected": "1"}}\n'
    writer = threading.Thread(target=fifo.write_bytes, args=(raw,))
    writer.start()
    with gathered([fifo], None, print) as inputs:
        writer.join()
        assert Expected.read(inputs).num_expected == 1
        submitted = client.submit(inputs, model="m")
        assert not list(home.iterdir())
    assert rows_of(redis_connection, submitted.batch_id) == {1: ("line-1", "a")}
    assert client.submit(io.BytesIO(raw), model="m").joined
    assert redis_connection.hget(redis_keys.batch(submitted.batch_id), "name") == b"p.fifo"


def test_a_copy_lies_in_the_home_folder_or_in_tmpdir(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no copy can be kept, the folder is named, and the exit code is that of a full disk."""

    def refused(dir: str) -> None:
        raise OSError(28, "No space left on device", dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    for folder in (str(home), tempfile.gettempdir()):
        reading, writing = os.pipe()
        os.close(writing)
        with (
            pytest.raises(
                SpoolError, match=f"store input-1 in {folder}: the disk is full"
            ) as fault,
            gathered([Path(f"/dev/fd/{reading}")], None, print),
        ):
            raise AssertionError("it was read")
        assert fault.value.exit_code == 4
        os.close(reading)
        monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "none"))

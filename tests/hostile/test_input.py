"""Hostile lines of the input: their numbers, names, templates and nesting do no harm."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.intake.checks import NumberRule
from batchkv_producer.intake.fields import BY_NAME, Use, number_rule
from batchkv_producer.intake.fields import FIELDS as FIELDS_OF_ROWS
from batchkv_producer.intake.formats import MAX_LINE_BYTES, Row, RowError, read_rows
from batchkv_producer.intake.rules import Replacing
from hostile.traps import ESCAPES, batchkv

# Every field that is a number, and whether it is a whole one.
FIELDS = {
    field.name: number_rule(field.name).is_whole
    for field in FIELDS_OF_ROWS
    if field.use is Use.TAKEN and isinstance(field.rule, (NumberRule, Replacing))
} | {"logprobs": True}
NUMBERS = {
    "1e400": "not JSON that can be read: the number 1e400 is out of range",
    "-1e400": "out of range",
    "1" + "0" * 400: "",
    "-1" + "0" * 400: "",
    "1" * 5000: "not JSON that can be read",
    "NaN": "not a JSON number",
    "Infinity": "not a JSON number",
    "-Infinity": "not a JSON number",
    "9223372036854775808123": "",
    "-9223372036854775809": "",
    '"1"': "",
    "true": "",
    "[1]": "",
    "0x10": "not JSON",
    "1_000": "not JSON",
    "1e-400": None,
    "-0": None,
    "-0.0": None,
}  # None: within some field's range


def rows(*lines: str | bytes) -> list[Row | RowError]:
    """The rows that the reader makes of these lines."""
    raw = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    return list(read_rows(io.BytesIO(raw + b"\n")))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("field", FIELDS)
def test_giant_numbers_in_every_field(field: str, number: str) -> None:
    """An impossible number in any field gives a failed row with a code; the next row is read."""
    good = '{"prompt": "p"}'
    first, second = rows(f'{{"prompt": "p", "{field}": {number}}}', good)
    assert isinstance(second, Row)
    said = NUMBERS[number]
    if said is None:
        value = float(number)
        if isinstance(first, Row):
            kept = getattr(first.request.params, BY_NAME["completion", field].param or field)
            is_neutral = kept is None and value == 0  # stored as "not given"
            assert is_neutral or (kept == value and (type(kept) is int or not FIELDS[field]))
        return
    assert isinstance(first, RowError)
    assert first.code in ("invalid_json", "invalid_request")
    assert said in first.message and len(first.message) < 300


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("[" * 10_000 + "]" * 10_000, "invalid_json"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "invalid_json"),
        ('{"prompt":' + "[" * 900 + "]" * 900 + "}", "invalid_request"),
        ('{"messages":' + "[" * 10_000 + "]" * 10_000 + "}", "invalid_json"),
        (
            '{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f","p":'
            + "[" * 40
            + "]" * 40
            + "}}]}",
            "invalid_request",
        ),
        ('{"prompt": "\\ud800"}', "invalid_request"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        ('{"prompt": "a", "prompt": {"b": 1}}', "invalid_request"),
        ('{"custom_id": ["x"], "prompt": "p"}', "invalid_request"),
        ('{"custom_id": "' + "x" * 1025 + '", "prompt": "p"}', "invalid_request"),
        ('{"prompt": "p", "__class__": "os.system"}', "unsupported_parameter"),
        ('{"prompt": "p", "py/object": "os.system"}', "unsupported_parameter"),
        ('{"prompt": "p", "chat_template": "{{ 1 }}"}', "unsupported_parameter"),
        ('{"prompt": "p", "stop": ' + json.dumps(["x"] * 17) + "}", "invalid_request"),
        ('{"prompt": "p", "stop": ["' + "x" * 1025 + '"]}', "invalid_request"),
        ('{"prompt": "p", "stop": [""]}', "invalid_request"),
        ('{"prompt": "p", "model": 5}', "invalid_request"),
        ('{"prompt": [1e400]}', "invalid_json"),
        ('{"prompt": [1, true]}', "invalid_request"),
        ('{"prompt": [1, 999999999999]}', "invalid_request"),
        ('{"prompt": [[1], [2]]}', "unsupported_parameter"),
        ('{"prompt": "p", "logit_bias": {"__class__": 1}}', "invalid_request"),
        ('{"prompt": "p", "logit_bias": {"1": [[[[]]]]}}', "invalid_request"),
        ('{"prompt": "p", "logit_bias": {"٣": 1}}', "invalid_request"),
        ('{"prompt": "p", "stop_token_ids": [' + "1," * 100_000 + "1]}", "invalid_request"),
        ('{"prompt": "p", "bad_words": [' + '"a",' * 100_000 + '"a"]}', "invalid_request"),
        ('{"prompt": "p", "bad_words": ["' + "a" * 2**20 + '"]}', "invalid_request"),
        ('{"prompt": "p", "bad_words": {"a": 1}}', "invalid_request"),
        ('{"url": "file:///etc/passwd", "body": {"prompt": "p"}}', "unsupported_parameter"),
        ('{"url": "http://169.254.169.254/", "body": {"prompt": "p"}}', "unsupported_parameter"),
        ('{"method": "GET", "body": {"prompt": "p"}}', "unsupported_parameter"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", '
            '"image_url": {"url": "file:///etc/passwd"}}]}]}',
            "unsupported_parameter",
        ),
    ],
)
def test_a_line_that_means_harm_is_a_failed_row(line: str | bytes, code: str) -> None:
    """Nesting, halves of characters, fields that name code, files or addresses give a code."""
    first, second = rows(line, '{"prompt": "p"}')
    assert isinstance(first, RowError) and isinstance(second, Row)
    assert first.code == code
    assert len(first.message) < 400


def test_a_line_without_an_end_takes_no_memory() -> None:
    """A line above the limit is one failed row; it is skipped in pieces, and the next is read."""

    class Endless(io.RawIOBase):
        """Sixty-four MiB in one line, then a good one; says how much was asked for at once."""

        left = 64 * 2**20
        largest = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            view = memoryview(buffer)  # type: ignore[arg-type]
            self.largest = max(self.largest, len(view))
            if self.left > 0:
                count = min(len(view), self.left)
                view[:count] = b"x" * count
                self.left -= count
                return count
            tail, self.tail = self.tail[: len(view)], self.tail[len(view) :]
            view[: len(tail)] = tail
            return len(tail)

        tail = b'\n{"prompt": "p"}\n'

    first, second = read_rows(io.BufferedReader(Endless()))
    assert isinstance(first, RowError) and str(MAX_LINE_BYTES) in first.message
    assert isinstance(second, Row)


@pytest.mark.parametrize("text", [ESCAPES, "\x00", "a\nb", "\u2028", "\x1b]8;;http://x\x07"])
def test_names_that_a_terminal_obeys_are_spelled_out(
    redis_connection: Redis, redis_url: str, tmp_path: Path, text: str
) -> None:
    """Control characters in a custom_id, a model, a batch's name or a field are printed as text."""
    lines = [
        {"custom_id": f"id{text}", "prompt": "p", f"f{text}": 1},
        {"custom_id": f"ok{text}", "prompt": f"p{text}"},
        {"messages": [{"role": f"r{text}", "content": "c"}]},
        {"url": f"u{text}", "body": {}},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    for arguments in (
        ["submit", source, "-m", "m", "--name", f"n{text}"],
        ["submit", source, "-m", f"m{text}", "--dry-run"],
        ["plan", source],
        ["status"],
        ["list"],
    ):
        found = batchkv(*arguments, url=redis_url)
        assert "Traceback" not in found.output
        for char in set(text) - {"\n", *"".join(map(chr, range(32, 127)))}:
            assert char not in found.output, (arguments, found.output)


@pytest.mark.parametrize(
    "model", ["../../etc/passwd", "/etc/shadow", "a/b/c", "~root/x", "file:///x", "a*b:c", "-m"]
)
def test_a_models_name_is_a_word_in_a_key(
    redis_connection: Redis, redis_url: str, tmp_path: Path, model: str
) -> None:
    """A queue's name has only letters, digits and dashes, for any model; no file is opened."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "p"}\n')
    assert batchkv("submit", source, f"--model={model}", url=redis_url).exit_code == 0
    queues = [key.decode() for key in redis_connection.keys("rq:queue:*")]
    assert len(queues) == 1
    assert set(queues[0]) <= set("abcdefghijklmnopqrstuvwxyz0123456789:-")


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "link"])
def test_an_output_that_is_no_file_is_refused(
    redis_connection: Redis, redis_url: str, tmp_path: Path, kind: str
) -> None:
    """Results go into a regular file. No pipe is waited for, and no other file is replaced."""
    import os

    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "p"}\n')
    batch = batchkv("submit", source, "-m", "m", url=redis_url).stdout.strip()
    out = tmp_path / "out"
    foreign = tmp_path / "foreign"
    foreign.write_text("precious\n")
    match kind:
        case "folder":
            out.mkdir()
        case "fifo":
            os.mkfifo(out)
        case "device":
            out = Path("/dev/full")
        case _:
            out.symlink_to(foreign)
    for order in ([], ["--ordered"]):
        found = batchkv("results", batch, *order, "-o", out, url=redis_url)
        assert found.exit_code == 2, found.output
    assert foreign.read_text() == "precious\n"

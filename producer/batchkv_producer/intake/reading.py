"""Reads the files of an input into rows.

Lines are counted through all files: those of the second file follow those of the first. Elements of
an array are counted like lines.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal, cast

from batchkv_producer.errors import InputFileError
from batchkv_producer.intake.formats import BOM, Row, RowError, read_elements, read_rows
from batchkv_producer.intake.source import LOOK_BYTES, HashingReader, Inputs, Piece, ReadAs

Kind = Literal["text", "jsonl", "array"]

_TABLES = {".csv": ",", ".tsv": "\t"}
_PROMPT_COLUMNS = ("prompt", "question", "input", "text", "instruction", "content")
_ID_COLUMNS = ("custom_id", "id")
_ARRAY = re.compile(rb"\s*\[\s*(?:[{\]]|\Z)")
_ANY_ARRAY = re.compile(rb"\s*\[")
_ROW_NAMES = ("prompt", "messages", "body")
_ROW = re.compile(rb'\s*\[?\s*(\{\s*"(?:custom_id|prompt|messages|body|method|url|model)"\s*:)')


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece that was read: its kind, its name for rows, and the number before its first row."""

    kind: Kind
    digest: bytes
    label: str
    start: int

    def place(self, line: int) -> str:
        number = line - self.start
        if self.label:
            return f"{self.label}:{number}"
        return f"element {number}" if self.kind == "array" else f"line {number}"

    def default_id(self, number: int) -> str:
        if self.label:
            return f"{self.label}:{number}"
        return f"element-{number}" if self.kind == "array" else f"line-{number}"


class Reading:
    """Reads all pieces of an input once. Afterwards it has their digest."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._parts: list[_Part] = []

    def rows(self) -> Iterator[Row | RowError]:
        """Each row in order. Raises InputFileError for a piece that cannot be read."""
        labels = self._inputs.labels if len(self._inputs.pieces) > 1 else ("",)
        start = 0
        for piece, label in zip(self._inputs.pieces, labels, strict=True):
            with opened_piece(piece, self._inputs.read_as) as (reader, kind):
                part = _Part(kind, b"", label, start)
                self._parts.append(part)
                try:
                    if kind == "array":
                        found = read_elements(reader, start=start, name=part.default_id)
                    else:
                        found = read_rows(
                            cast(BinaryIO, reader),
                            is_text=kind == "text",
                            start=start,
                            name=part.default_id,
                        )
                    start += yield from found
                except InputFileError as fault:
                    raise InputFileError(f"{piece.name}: {fault}") from fault
                self._parts[-1] = _Part(kind, reader.digest(), label, part.start)

    def place(self, line: int) -> str:
        """A row's place in the input, for people: ``line 7``, ``element 7``, ``b.jsonl:7``."""
        part = next(part for part in reversed(self._parts) if part.start < line)
        return part.place(line)

    @property
    def kind(self) -> bytes:
        """The kinds that the pieces were read as: a part of the batch's identity."""
        return b"files" if len(self._parts) > 1 else self._parts[0].kind.encode()

    @property
    def digest(self) -> bytes:
        """The digest of one file's bytes. For several files it includes their names and kinds."""
        if len(self._parts) == 1:
            return self._parts[0].digest
        whole = sha256()
        for part in self._parts:
            for item in (part.label.encode(), part.kind.encode(), part.digest):
                whole.update(len(item).to_bytes(8, "big") + item)
        return whole.digest()

    @property
    def may_be_text(self) -> bool:
        """Whether the first piece was read as JSON lines by a guess."""
        first = self._inputs.pieces[0]
        is_guess = self._inputs.read_as is None and first.suffix not in (".jsonl", ".json")
        return is_guess and self._parts[0].kind == "jsonl"


@contextmanager
def opened_piece(piece: Piece, read_as: ReadAs | None) -> Iterator[tuple[HashingReader, Kind]]:
    """Open a piece. Yields its stream and its kind."""
    with piece.opened() as stream:
        reader = HashingReader(stream)
        yield reader, _kind(piece, read_as, reader.look())


def _kind(piece: Piece, read_as: ReadAs | None, beginning: bytes) -> Kind:
    """The kind: the caller's choice, else by the file's name and its first bytes."""
    text = beginning.removeprefix(BOM)
    if read_as == "text":
        return "text"
    if read_as is None:
        if piece.suffix in _TABLES:
            raise InputFileError(_how_to_convert(piece, text))
        if piece.suffix == ".txt" and _holds_rows(text):
            raise InputFileError(
                f"{piece.name} holds JSON, but .txt means one prompt a line: --as jsonl reads its "
                "lines as JSON, --as text takes each as a prompt"
            )
        if piece.suffix == ".txt":
            return "text"
    is_array = (_ANY_ARRAY if piece.suffix == ".json" else _ARRAY).match(text)
    return "array" if is_array else "jsonl"


def _holds_rows(beginning: bytes) -> bool:
    """Whether a text begins with a row in JSON, or with an array of rows."""
    found = _ROW.match(beginning)
    if not found:
        return False
    line, newline, _ = beginning[found.start(1) :].partition(b"\n")
    if beginning.lstrip().startswith(b"[") or not (newline or len(beginning) < LOOK_BYTES):
        return True  # only the visible part of the line can be checked
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and any(name in row for name in _ROW_NAMES)


def _how_to_convert(piece: Piece, beginning: bytes) -> str:
    """The sentence for a table: a command that converts it, with its own columns."""
    delimiter = _TABLES[piece.suffix]
    first, _, _ = beginning.decode("utf-8", "replace").partition("\n")
    if delimiter == "," and "," not in first and ";" in first:  # some spreadsheets write semicolons
        delimiter = ";"
    columns = next(csv.reader([first.rstrip("\r")], delimiter=delimiter), [])
    names = {column.strip().lower(): column for column in reversed(columns)}
    prompt = next((names[name] for name in _PROMPT_COLUMNS if name in names), None)
    prompt = prompt if prompt is not None else (columns or ["prompt"])[-1]
    own_id = next((names[name] for name in _ID_COLUMNS if name in names), None)
    row = f'"prompt": r[{json.dumps(prompt)}]'
    if own_id is not None:
        row = f'"custom_id": r[{json.dumps(own_id)}], {row}'
    more = "" if delimiter == "," else f", delimiter={json.dumps(delimiter)}"
    table = f'csv.DictReader(open(0, encoding="utf-8-sig", newline=""){more})'
    program = f"import csv, json; [print(json.dumps({{{row}}})) for r in {table}]"
    source = str(piece.origin) if isinstance(piece.origin, Path) else piece.name
    target = shlex.quote(f"{source}.jsonl")
    shown = ", ".join(json.dumps(column, ensure_ascii=False)[:40] for column in columns[:12])
    return (
        f"{piece.name} is a table, not lines of prompts (its columns: {shown}). Make JSON lines of "
        f"it: python3 -c {shlex.quote(program)} < {shlex.quote(source)} > {target}"
    )

"""Reading the input: OpenAI Batch lines, simpler JSON lines, or one prompt a line.

===================  ==========================================================================
a line               means
===================  ==========================================================================
``{"custom_id": ..,  an OpenAI Batch API line; ``url`` is ``/v1/chat/completions`` or
"url": .., "body":}`` ``/v1/completions`` and may be left out
``{"messages": []}`` a chat request; the other fields of its body are next to ``messages``
``{"prompt": ".."}`` a plain prompt: a completion whose style is ``auto`` (``prompting``)
any text (``.txt``)  a plain prompt
===================  ==========================================================================

Lines end with LF or CRLF and are counted from 1. A blank line is counted but is no row. Elements of
a JSON array are read like lines. A row without ``custom_id`` is named ``line-<its number>``, unless
the caller names it. A row that is wrong becomes a ``RowError``; reading never stops at it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, BinaryIO, NoReturn

from batchkv_producer.intake.body import ENDPOINTS, NO_PARAMS, model_of, read_body
from batchkv_producer.intake.checks import (
    MAX_CUSTOM_ID_CHARS,
    RowFault,
    invalid,
    shown,
    unsupported,
)
from batchkv_producer.intake.json_array import Readable, elements
from batchkv_producer.intake.plain import read_plain
from batchkv_producer.wire.job import Endpoint, ErrorCode, Request, default_custom_id

MAX_LINE_BYTES = 16 * 2**20
SKIP_BYTES = 2**20  # bytes of an overlong line that are read at once and dropped
BOM = b"\xef\xbb\xbf"

_BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that cannot be run: a ``job.ErrorCode`` and a sentence that says why.

    ``place`` is its place in the input, for people (``line 7``, ``b.jsonl:7``); empty until it is
    known.
    """

    line: int
    custom_id: str
    endpoint: Endpoint
    code: str
    message: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be run. ``model`` is the one that its line names."""

    line: int
    request: Request
    model: str | None = None


Name = Callable[[int], str]
Rows = Generator[Row | RowError, None, int]  # returns the number of lines or elements


def read_rows(
    stream: BinaryIO, *, is_text: bool = False, start: int = 0, name: Name = default_custom_id
) -> Rows:
    """Each row of the stream in order. At most one line is in memory; I/O errors are raised.

    ``start`` is added to each line's number in the file. ``name`` returns the id for a number.
    """
    read = _text_row if is_text else _json_row
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(BOM)
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            _skip_line(stream)
            message = f"the line is longer than {MAX_LINE_BYTES} bytes"
            yield RowError(start + number, name(number), "chat", ErrorCode.INVALID_REQUEST, message)
        elif not raw.isspace() and raw:
            yield read(start + number, name(number), raw)
    return number


def read_elements(stream: Readable, *, start: int = 0, name: Name = default_custom_id) -> Rows:
    """Each element of the JSON array in the stream, in the same form as ``read_rows``."""
    number = 0
    for raw in elements(stream, MAX_LINE_BYTES):
        number += 1
        line, own_id = start + number, name(number)
        if raw is None:
            message = f"the line is longer than {MAX_LINE_BYTES} bytes"
            row: Row | RowError = RowError(line, own_id, "chat", ErrorCode.INVALID_REQUEST, message)
        else:
            row = _json_row(line, own_id, raw)
        if isinstance(row, RowError) and row.message.startswith("the line "):
            row = replace(row, message="the element " + row.message.removeprefix("the line "))
        yield row
    return number


def of_endpoint(
    rows: Iterator[Row | RowError], endpoint: Endpoint | None
) -> Iterator[Row | RowError]:
    """The rows; those of another endpoint are wrong. None: of any endpoint."""
    for row in rows:
        if isinstance(row, Row) and endpoint not in (None, row.request.endpoint):
            url = next(url for url, name in ENDPOINTS.items() if name == endpoint)
            message = f"the row is for another endpoint than its batch, which is for {url}"
            own_id, other = row.request.custom_id, row.request.endpoint
            yield RowError(row.line, own_id, other, ErrorCode.INVALID_REQUEST, message)
        else:
            yield row


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(SKIP_BYTES)) and not rest.endswith(b"\n"):
        pass


def _text_row(line: int, own_id: str, raw: bytes) -> Row | RowError:
    try:
        prompt = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as fault:
        message = f"the line is not UTF-8 (byte {fault.start + 1})"
        return RowError(line, own_id, "completion", ErrorCode.INVALID_REQUEST, message)
    return Row(line, Request(own_id, "completion", prompt=prompt, params=NO_PARAMS, style="auto"))


def _json_row(line: int, own_id: str, raw: bytes) -> Row | RowError:
    plain = read_plain(raw, own_id)
    return _careful_row(line, own_id, raw) if plain is None else Row(line, *plain)


def _careful_row(line: int, own_id: str, raw: bytes) -> Row | RowError:
    """Read a row field by field. This finds the field that is wrong."""
    try:
        value = parse_json(raw)
    except RowFault as fault:
        return RowError(line, own_id, "chat", fault.code, str(fault))
    custom_id, endpoint = _identify(value, own_id)
    try:
        return _row(line, value, custom_id, raw)
    except RowFault as fault:
        safe_id = custom_id.encode("utf-8", "replace").decode("utf-8")
        return RowError(line, safe_id, endpoint, fault.code, str(fault))


def _identify(value: Any, own_id: str) -> tuple[str, Endpoint]:
    """The row's custom_id and endpoint, if they can be read, even if the row is wrong."""
    if not isinstance(value, dict):
        return own_id, "chat"
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        custom_id = own_id
    is_completion = value.get("prompt") is not None or url == "/v1/completions"
    return custom_id, "completion" if is_completion else "chat"


def _row(line: int, value: Any, custom_id: str, raw: bytes) -> Row:
    if not isinstance(value, dict):
        raise invalid(f"the line is not a JSON object, but {shown(value)}")
    if b"\\u" in raw:
        check_surrogates(value)
    _check_custom_id(value.get("custom_id"))
    if _is_batch_line(value):
        endpoint, body = _batch_line(value)
        return Row(line, read_body(body, endpoint, custom_id), model_of(body))
    endpoint, body = _lazy_line(value)
    request = read_body(body, endpoint, custom_id)
    if request.prompt is not None:
        request = replace(request, style="auto")
    return Row(line, request, model_of(body))


def _check_custom_id(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise invalid(f"custom_id must be a string, got {shown(value)}")
    if not 0 < len(value) <= MAX_CUSTOM_ID_CHARS:
        raise invalid(f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters")


def _is_batch_line(value: dict[str, Any]) -> bool:
    return "body" in value or "url" in value or "method" in value


def _batch_line(value: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    for name in value.keys() - _BATCH_KEYS:
        if value[name] is not None:
            raise unsupported(f"{name[:80]} {NOT_OF_LINE}")
    if value.get("method") not in (None, "POST"):
        raise unsupported(f"method must be POST, got {shown(value['method'])}")
    if "body" not in value:
        raise invalid("body is missing: it holds the model, and the prompt or the messages")
    body = value["body"]
    if not isinstance(body, dict):
        raise invalid(f"body must be an object, got {shown(body)}")
    url = value.get("url")
    if url is None:
        return _kind_of(body), body
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise unsupported(f"url must be {' or '.join(ENDPOINTS)}, got {shown(url)}")
    return ENDPOINTS[url], body


def _lazy_line(value: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    body = {name: item for name, item in value.items() if name != "custom_id"}
    return _kind_of(body), body


def _kind_of(body: dict[str, Any]) -> Endpoint:
    has_messages, has_prompt = body.get("messages") is not None, body.get("prompt") is not None
    if has_messages and has_prompt:
        raise invalid("the line has both messages and a prompt")
    if not (has_messages or has_prompt):
        message = "the line has neither messages nor a prompt"
        for name in body:
            for close in get_close_matches(name[:40], ("messages", "prompt"), n=1, cutoff=0.8):
                message += f": {name[:40]} should probably be {close}" if close != name else ""
        raise invalid(message)
    return "chat" if has_messages else "completion"


def parse_json(raw: bytes) -> Any:
    """The value of a line. Raises RowFault for what is not JSON, or not JSON that can be read."""
    try:
        return _DECODER.decode(raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as fault:
        message = f"the line is not UTF-8 (byte {fault.start + 1})"
    except json.JSONDecodeError as fault:
        what = _JSON_FAULTS.get(fault.msg, fault.msg.removesuffix(" at"))
        message = f"the line is not JSON: {what} (character {fault.pos + 1})"
    except RecursionError:
        message = "the line is not JSON that can be read: it nests too deeply"
    except ValueError as fault:  # from the two hooks below, or Python's own for too many digits
        is_own = "set_int_max_str_digits" not in str(fault)
        why = str(fault)[:200] if is_own else "a number has thousands of digits"
        message = f"the line is not JSON that can be read: {why}"
    raise RowFault(ErrorCode.INVALID_JSON, message)


# What Python's decoder says, in words that say what to mend.
_JSON_FAULTS = {
    "Unterminated string starting at": "a quote is not closed",
    "Invalid control character at": "a text has a control character, which JSON writes as \\u00XX",
    "Expecting value": "a value is missing here, or is not one that JSON has",
    "Expecting property name enclosed in double quotes": "a name in double quotes must stand here. "
    "JSON has no single quotes and no comma after the last value; or the line ends too early",
    "Illegal trailing comma before end of object": "there is a comma after the last value",
    "Illegal trailing comma before end of array": "there is a comma after the last value",
    "Expecting ':' delimiter": "a colon is missing after a name",
    "Expecting ',' delimiter": "a comma or a closing bracket is missing here; or a quote inside "
    'a text is not written as \\"',
    "Extra data": "something comes after the value",
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return number


NOT_OF_LINE = "is not a field of a batch line"
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def check_surrogates(value: Any) -> None:
    """Raise RowFault for half of a UTF-16 pair: JSON can write it as an escape, but it is no
    character.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        message = "a string holds half of a surrogate pair, which is no character"
        raise invalid(message) from None
    except RecursionError:
        raise invalid("the line nests too deeply") from None

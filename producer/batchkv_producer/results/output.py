"""Results as OpenAI Batch output lines, or as plain text.

A row has one of three shapes, as OpenAI's files have them::

    an answer           response {status_code: 200, body: the choices}, error null
    a refused request   response {status_code: 400, body: {error: {message, type, param, code}}},
                        error null
    no answer at all    response null, error {code, message}

The line of an answer that was remembered from an earlier batch ends with ``"reused": true``.

Answers go to OUT, the other two to OUT.errors.jsonl (``outfile``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from batchkv_producer.results.bodies import body_of
from batchkv_producer.wire.error_codes import REFUSED_CODES, ErrorCode
from batchkv_producer.wire.job import Result

OK, REFUSED = 200, 400  # status codes of HTTP
REFUSED_TYPE = "invalid_request_error"
# Codes that OpenAI names differently. Redis stores batchkv's names.
OPENAI_CODES = {ErrorCode.EXPIRED: "batch_expired", ErrorCode.CANCELED: "batch_cancelled"}

# A quote inside a JSON string has a backslash before it, so that no text can look like this.
_ANSWER = re.compile(
    rb'\{"id": ?"[^"\\]*+", ?"custom_id": ?"[^"\\]*+(?:\\.[^"\\]*+)*+", ?'
    rb'"response": ?\{"status_code": ?200,'
)
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Characters that JSON allows in strings, but that some readers treat as the end of a line.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x7f\x85\u2028\u2029"}
_TEXT_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def output_line(job_id: str, result: Result) -> str:
    """One line of an OpenAI Batch output file or error file, without its newline."""
    line: dict[str, Any] = {"id": job_id, "custom_id": result.custom_id}
    if result.outcome == "ok":
        line |= _answered(job_id, OK, body_of(job_id, [result]))
        if result.reused:
            line["reused"] = True
    else:
        code, message = _error_of(result)
        if code in REFUSED_CODES:
            fault = {"message": message, "type": REFUSED_TYPE, "param": None, "code": code}
            line |= _answered(job_id, REFUSED, {"error": fault})
        else:
            error = {"code": OPENAI_CODES.get(code, code), "message": message}
            line |= {"response": None, "error": error}
    text = _JSON.encode(line)
    if text.isascii():
        return text.translate(_LINE_ENDS)
    # UTF-8 cannot encode half a surrogate pair.
    return text.encode("utf-8", "replace").decode("utf-8").translate(_LINE_ENDS)


def is_failed_line(row: bytes) -> bool:
    """Whether an output line, of this or an older version, is of a row without an answer.

    Older versions wrote every failed row with ``response`` null and batchkv's own code.
    """
    if _ANSWER.match(row):
        return False
    value = json.loads(row)
    response = value.get("response")
    status_code = response.get("status_code") if isinstance(response, dict) else None
    return bool(value.get("error")) or (isinstance(status_code, int) and status_code >= REFUSED)


def _answered(job_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": job_id, "body": body}
    return {"response": response, "error": None}


def _error_of(result: Result) -> tuple[str, str]:
    return result.error or (result.outcome, "")


def text_line(result: Result) -> str:
    """The text of the first choice on one line: line breaks as ``\\n``, a backslash doubled."""
    return _on_one_line(result.text)


def failed_text_line(result: Result) -> str:
    """A row without an answer on one line: ``q3: [timeout] the row took longer than 60 s``."""
    code, message = _error_of(result)
    return _on_one_line(f"{result.custom_id}: [{code}] {message}")


def _on_one_line(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8").translate(_TEXT_ESCAPES)

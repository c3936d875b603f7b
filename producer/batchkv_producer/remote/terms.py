"""The options of a submit and of a retry as headers ``x-batchkv-NAME``, for both sides.

Values are UTF-8 in percent-encoding, so that a plain word is written as it is. A switch is ``1``.
``stop`` and ``files`` are JSON. Each name is that of the command's flag, or:

- ``default-model``: the model of a batch whose lines name none.
- ``format``: ``jsonl`` or ``text``, the flag ``--as``.
- ``from``: the batch whose answers are kept.
- ``out-batch``: the batch whose results are in the client's OUT. A submit that makes another batch
  is refused.
- ``filename``: the name of the one file that the body is. Its suffix tells how lines are read.
- ``files``: the pieces of the body of several files, each with ``name``, ``bytes`` and ``suffix``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import quote, unquote

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import ReadAs
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS
from batchkv_producer.wire.adapter import Adapter, parse_adapter
from batchkv_producer.wire.batch_options import (
    NEVER,
    NO_OPTIONS,
    BatchOptions,
    Deadline,
    deadline_of,
    moment_text,
    seconds_of,
)
from batchkv_producer.wire.job import NO_PARAMS, SamplingParams
from batchkv_producer.wire.redis_keys import parse_job_id

HEADER = "x-batchkv-"
REQUEST_HEADER = "x-batchkv-request"  # pages of other sites cannot send it
MAX_FILES = 1000
MAX_HEADER_BYTES = 12 * 2**10  # of all options
_PLAIN = "!\"#$&'()*+,-./:;<=>?@[]^_`{|}~"  # of ASCII, all but blank, % and backslash
MAX_TIMEOUT = 10**9
MAX_WORD = 10**18

_NUMBERS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "thinking_budget": int,
    "seed": int,
}


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file of a body. ``suffix`` tells how its lines are read, like ``.txt``."""

    name: str
    num_bytes: int
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a submit, and those of a retry.

    ``canceled`` and a deadline of ``NEVER`` are for a retry alone.
    """

    model: str | None = None
    default_model: str | None = None
    name: str | None = None
    read_as: ReadAs | None = None
    prompting: Prompting = AUTO
    defaults: SamplingParams = NO_PARAMS
    job_timeout_seconds: int | None = None
    options: BatchOptions = NO_OPTIONS
    source_batch: str | None = None
    out_batch: str | None = None
    filename: str | None = None
    files: tuple[FilePart, ...] = ()
    canceled: bool = False

    @property
    def timeout_seconds(self) -> int:
        """The timeout of a row."""
        return self.job_timeout_seconds or DEFAULT_JOB_TIMEOUT_SECONDS

    def headers(self) -> dict[str, str]:
        """The headers. Raises UsageError for what no header can say."""
        found: dict[str, str | None] = {
            "model": self.model,
            "default-model": self.default_model,
            "name": self.name,
            "format": self.read_as,
            "raw": _switch(self.prompting.raw),
            "system": self.prompting.system,
            "no-thinking": _switch(self.prompting.no_thinking),
            "stop": json.dumps(list(self.defaults.stop)) if self.defaults.stop else None,
            "job-timeout": _text(self.job_timeout_seconds),
            "adapter": _adapter_name(self.options.adapter),
            "priority": self.options.priority,
            "expires": _deadline_text(self.options.expires),
            "dedupe": _switch(self.options.dedupe),
            "reuse": _switch(self.options.reuse),
            "keep": _text(self.options.keep_seconds, "s"),
            "fresh": _switch(self.options.fresh),
            "mixed": _switch(self.options.mixed),
            "from": self.source_batch,
            "out-batch": self.out_batch,
            "filename": self.filename,
            "files": _files_text(self.files),
            "canceled": _switch(self.canceled),
        }
        for name in _NUMBERS:
            found[name.replace("_", "-")] = _text(getattr(self.defaults, name))
        given = {name: value for name, value in found.items() if value is not None}
        try:
            quoted = {f"{HEADER}{name}": quote(value, _PLAIN) for name, value in given.items()}
        except UnicodeEncodeError as fault:
            raise UsageError(f"an option is not UTF-8: {fault.object[:80]!r}") from None
        if sum(len(name) + len(value) for name, value in quoted.items()) > MAX_HEADER_BYTES:
            longest = max(quoted, key=lambda name: len(quoted[name])).removeprefix(HEADER)
            raise UsageError(
                f"the options are too long for HTTP ({MAX_HEADER_BYTES:,} bytes; the longest is "
                f"{longest}): write them into the lines of the file, or use the Redis URL"
            )
        return quoted


def read_terms(headers: Mapping[str, str]) -> Terms:
    """The options of a request's headers. Raises UsageError for a wrong one."""
    found = Terms()
    for name, value in headers.items():
        short = name.lower().removeprefix(HEADER)
        if name.lower() not in (short, REQUEST_HEADER):
            found = _with(found, short, _decoded(short, value))
    return found


def _with(terms: Terms, name: str, text: str) -> Terms:
    """The options with one more."""
    if name in _READERS:
        return _READERS[name](terms, text)
    field = name.replace("-", "_")
    if field in _NUMBERS:
        number = _number(name, text, _NUMBERS[field])
        return replace(terms, defaults=replace(terms.defaults, **{field: number}))
    raise _wrong(name, "is not known: see the options of `batchkv submit --help`")


def _decoded(name: str, value: str) -> str:
    try:
        value.encode("ascii")
        return unquote(value, "utf-8", "strict")
    except UnicodeError:
        raise _wrong(name, "is not UTF-8 in percent-encoding") from None


def _wrong(name: str, why: str) -> UsageError:
    return UsageError(f"the header {HEADER}{name[:40]} {why}")


def _number(name: str, text: str, kind: type, low: float = -MAX_WORD) -> Any:
    try:
        value = kind(text)
        if len(text) > 32 or not low <= value <= MAX_WORD:
            raise ValueError
    except (ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise _wrong(name, f"must be {what}, got {text[:40]!r}") from None
    return value


def _is_on(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise _wrong(name, f"must be 1 or 0, got {text[:40]!r}")
    return text == "1"


def _stop(text: str) -> tuple[str, ...]:
    found = _json_list("stop", text)
    if not all(isinstance(each, str) for each in found):
        raise _wrong("stop", "must be a list of texts in JSON")
    return tuple(found)


def _json_list(name: str, text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise _wrong(name, "must be a list in JSON")
    return found


def _files(text: str) -> tuple[FilePart, ...]:
    """The pieces of a body, checked."""
    found = _json_list("files", text)
    right = []
    for each in found[:MAX_FILES]:
        name, size, suffix = (
            (each.get("name"), each.get("bytes"), each.get("suffix", ""))
            if isinstance(each, dict)
            else (None, None, None)
        )
        is_text = isinstance(name, str) and isinstance(suffix, str)
        if not is_text or type(size) is not int or size < 0:
            raise _wrong("files", "must be a list of objects with name, bytes and suffix")
        right.append(FilePart(str(name), size, _safe_suffix(str(suffix))))
    if not right or len(found) > MAX_FILES:
        raise _wrong("files", f"must name 1 to {MAX_FILES} files")
    return tuple(right)


def suffix_of(name: str) -> str:
    """The suffix of a file's name, if it can be part of any file's name."""
    return _safe_suffix(PurePath(name.replace("\0", "")).suffix.lower())


def _safe_suffix(text: str) -> str:
    """A suffix that can be part of any file's name; "" for another one."""
    return (
        text if text[:1] == "." and text[1:].isalnum() and text.isascii() and len(text) < 16 else ""
    )


def _files_text(files: tuple[FilePart, ...]) -> str | None:
    if not files:
        return None
    return json.dumps(
        [{"name": each.name, "bytes": each.num_bytes, "suffix": each.suffix} for each in files]
    )


def _read_as(terms: Terms, text: str) -> Terms:
    if text not in ("jsonl", "text"):
        raise _wrong("format", f"must be jsonl or text, got {text[:40]!r}")
    return replace(terms, read_as="text" if text == "text" else "jsonl")


def _adapter(text: str) -> Adapter:
    found = parse_adapter(text)
    if found.folder:
        raise _wrong("adapter", "names the adapter alone: the gateway reads no folder for clients")
    return found


def _adapter_name(adapter: Adapter | None) -> str | None:
    if adapter is None:
        return None
    if adapter.folder:
        raise UsageError(
            f"--adapter {adapter}: a gateway knows no folder of this machine. Give the name alone: "
            f"--adapter {adapter.name}"
        )
    return adapter.name


def _duration(text: str) -> int:
    try:
        return seconds_of(text)
    except ValueError as fault:
        raise _wrong("keep", str(fault)) from None


def _expires(text: str) -> Deadline:
    if text.strip().lower() == "never":
        return NEVER
    try:
        return deadline_of(text)
    except ValueError as fault:
        raise _wrong("expires", str(fault)) from None


def _deadline_text(deadline: Deadline | None) -> str | None:
    if deadline is None:
        return None
    if deadline == NEVER:
        return "never"
    return moment_text(deadline.at) if deadline.at else f"{deadline.in_seconds}s"


def _out_batch(text: str) -> str:
    if parse_job_id(f"{text}-1") is None:
        raise _wrong("out-batch", "must be the id of a batch")
    return text


def _switch(value: bool) -> str | None:
    return "1" if value else None


def _text(value: object, unit: str = "") -> str | None:
    return None if value is None else f"{value!r}{unit}"


def _set(**parts: Any) -> Callable[[Terms, str], Terms]:
    """A reader of one header. ``parts``: the field of Terms, or PART__FIELD, and its parser."""
    ((path, parse),) = parts.items()
    owner, _, inner = path.partition("__")

    def read(terms: Terms, text: str) -> Terms:
        value = parse(text)
        if inner:
            value = replace(getattr(terms, owner), **{inner: value})
        return replace(terms, **{owner: value})

    return read


def _on(name: str) -> Callable[[str], bool]:
    return lambda text: _is_on(name, text)


_READERS: dict[str, Callable[[Terms, str], Terms]] = {
    "model": _set(model=str),
    "default-model": _set(default_model=str),
    "name": _set(name=str),
    "format": _read_as,
    "raw": _set(prompting__raw=_on("raw")),
    "system": _set(prompting__system=str),
    "no-thinking": _set(prompting__no_thinking=_on("no-thinking")),
    "stop": _set(defaults__stop=_stop),
    "job-timeout": _set(
        job_timeout_seconds=lambda text: min(_number("job-timeout", text, int, 1), MAX_TIMEOUT)
    ),
    "adapter": _set(options__adapter=_adapter),
    "priority": _set(options__priority=str),
    "expires": _set(options__expires=_expires),
    "dedupe": _set(options__dedupe=_on("dedupe")),
    "reuse": _set(options__reuse=_on("reuse")),
    "keep": _set(options__keep_seconds=_duration),
    "fresh": _set(options__fresh=_on("fresh")),
    "mixed": _set(options__mixed=_on("mixed")),
    "from": _set(source_batch=str),
    "out-batch": _set(out_batch=_out_batch),
    "filename": _set(filename=str),
    "files": _set(files=_files),
    "canceled": _set(canceled=_on("canceled")),
}

"""Wire types: the request in a job, and the result of a row. No MLX, no Redis.

A job travels in RQ's ``data`` field as the JSON list that RQ's own JSON serializer would write for
a call (function name, instance, args, kwargs), zlib-compressed. The function name is one fixed
word that nothing imports or calls. A result is a msgpack map, zlib-compressed, in the batch's hash
of results. ISA-L writes the format of zlib in less than half the time. All data that is read back
is checked field by field. Any fault is a ``WireError``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter, index
from typing import Any, Literal

import msgpack
import msgspec
from isal import isal_zlib

from batchkv_producer.errors import WireError
from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.choice import (
    Choice,
    ToolCall,
    packed_choice,
    unpacked_choice,
    unpacked_ids,
)
from batchkv_producer.wire.choice import TokenLogprob as TokenLogprob
from batchkv_producer.wire.constraint import Constraint, unpacked_constraint
from batchkv_producer.wire.error_codes import ErrorCode as ErrorCode
from batchkv_producer.wire.inflating import inflate
from batchkv_producer.wire.params import SamplingParams as SamplingParams
from batchkv_producer.wire.params import given_params, read_params
from batchkv_producer.wire.stamp import is_reused, unstamped

FUNCTION_NAME = "batchkv.generate"
MAX_JOB_BYTES = 64 * 2**20  # decompressed; the reader accepts less in a line
MAX_RESULT_BYTES = 64 * 2**20
MAX_CUSTOM_ID_CHARS = 1024
MAX_PROMPT_TOKENS = 2**20  # of a prompt that is given as token ids
MAX_TOKEN_ID = 2**24 - 1  # ``canonical`` writes a token in three bytes
MAX_FUNCTION_CHARS = 256
MAX_EFFORT_CHARS = 64
NO_EFFORT = "none"  # the ``reasoning_effort`` that is no reasoning
MAX_SALT_CHARS = 64
FUNCTION = "function:"  # begins a ``tool_choice`` that names a function

Endpoint = Literal["chat", "completion"]
Outcome = Literal["ok", "failed", "canceled"]
Style = Literal["raw", "auto"]
NO_PARAMS = SamplingParams()


def default_custom_id(line: int) -> str:
    """The name of a row that has no ``custom_id``."""
    return f"line-{line}"


@dataclass(frozen=True, slots=True)
class Request:
    """One validated row: exactly one of ``messages``, ``prompt`` and ``prompt_tokens`` is set.

    Chat rows have messages. A completion has a prompt, as a text or as token ids. A prompt of style
    ``auto`` becomes a user message after ``system``, if the model has a chat template
    (``prompting``). A prompt of style ``raw`` is sent unchanged.

    ``constraint`` is for the answer's text. ``tool_choice`` is "none", "required" or
    "function:NAME"; None lets the model choose. ``parallel_tool_calls`` is None or False.
    ``reasoning_effort`` is a word for the chat template, or ``NO_EFFORT``. Rows share prefix blocks
    only with rows of the same ``cache_salt``. The gateway sets it for private keys; no field of a
    line does.
    """

    custom_id: str
    endpoint: Endpoint
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    params: SamplingParams = NO_PARAMS
    style: Style = "raw"
    system: str | None = None
    prompt_tokens: list[int] | None = None
    constraint: Constraint | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one row.

    ``cached`` is the part of ``prompt`` that was not computed, and ``reasoning`` the part of
    ``completion`` that is no answer. ``completion`` sums all choices; ``prompt`` counts once.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """How one row ended. ``error`` is (code, message) unless the outcome is ok.

    ``created`` is seconds since 1970 and ``busy_ms`` the wall time from admission to the end.
    ``note`` reports the hits in the shared cache, if the worker has one. ``fingerprint`` and
    ``scheme`` are those of the worker (``maker``); empty from workers of the first version.
    ``reused``: the answer was remembered from an earlier batch, so nothing was computed for this
    row; usage and times are those of the row that was.

    ``text`` to ``logprobs``, ``reasoning``, ``tool_calls`` and ``token_ids`` are of the first
    choice, and ``more`` has the others. ``choices`` has all. ``prompt_token_ids`` and ``token_ids``
    are None unless the row asked for them.
    """

    custom_id: str
    endpoint: Endpoint
    outcome: Outcome
    model: str = ""
    text: str = ""
    finish_reason: str = ""
    usage: Usage = Usage()
    error: tuple[str, str] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    worker: str = ""
    created: int = 0
    busy_ms: int = 0
    note: CacheNote | None = None
    fingerprint: str = ""
    scheme: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    more: tuple[Choice, ...] = ()
    reused: bool = False

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices in order. A row that did not ask for several has one."""
        return (self._first(), *self.more)

    def _first(self) -> Choice:
        return Choice(
            self.text,
            self.finish_reason,
            self.logprobs,
            self.reasoning,
            self.tool_calls,
            self.token_ids,
        )


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_write_json = msgspec.json.Encoder().encode
_ASKED = (
    *("prompt_tokens", "constraint", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    "cache_salt",
)
_asked_values = attrgetter(*_ASKED)
_NOTHING_ASKED = (None,) * len(_ASKED)


def asked_of(request: Request) -> dict[str, Any]:
    """What a request asks for that the first version did not have, without its parameters."""
    values = _asked_values(request)
    if values == _NOTHING_ASKED:  # almost every row
        return {}
    return {name: value for name, value in zip(_ASKED, values, strict=True) if value is not None}


def encode_job(request: Request) -> bytes:
    """The job's ``data``: a call in the form of RQ's JSON serializer, compressed."""
    payload: dict[str, Any] = {"custom_id": request.custom_id, "endpoint": request.endpoint}
    rest = (("messages", request.messages), ("prompt", request.prompt), ("tools", request.tools))
    for name, value in rest:
        if value is not None:
            payload[name] = value
    payload |= asked_of(request)
    if request.constraint is not None:
        payload["constraint"] = request.constraint.packed()
    if request.style != "raw":
        payload["style"] = request.style
    if request.system is not None:
        payload["system"] = request.system
    if request.chat_template_kwargs:
        payload["chat_template_kwargs"] = request.chat_template_kwargs
    payload["params"] = given_params(request.params)
    call: list[Any] = [FUNCTION_NAME, None, [payload], {}]
    try:
        raw = _write_json(call)
    except UnicodeEncodeError:  # half of a surrogate pair, as a command line may contain
        raw = _JSON.encode(call).encode("utf-8", "surrogatepass")
    return isal_zlib.compress(raw, 1)


def decode_job(data: bytes) -> Request:
    """The request in a job's ``data``. Raises WireError if batchkv did not write the data."""
    call = _load_json(inflate(data, MAX_JOB_BYTES, "job"))
    if not (isinstance(call, list) and len(call) == 4):
        raise WireError("job data is not a call")
    name, instance, args, kwargs = call
    if name != FUNCTION_NAME:
        raise WireError(f"job calls {str(name)[:80]!r}; only {FUNCTION_NAME!r} is accepted")
    if instance is not None or kwargs or not (isinstance(args, list) and len(args) == 1):
        raise WireError("job data has arguments that batchkv never writes")
    return _request(args[0])


def encode_result(result: Result) -> bytes:
    """A result as stored: msgpack, one-letter keys, compressed. WireError if it is too large."""
    usage = result.usage
    counts = [usage.prompt, usage.completion, usage.cached]
    packed: dict[str, Any] = {
        "o": result.outcome,
        "c": result.custom_id,
        "e": result.endpoint,
        "m": result.model,
        "t": result.text,
        "f": result.finish_reason,
        "u": counts if any(counts) else None,
        "x": result.error,
        "w": result.worker,
        "a": result.created,
        "b": result.busy_ms,
        "n": result.note.packed() if result.note is not None else None,
        "p": result.fingerprint,
        "s": result.scheme,
        "h": usage.reasoning,
        "d": [packed_choice(choice) for choice in result.more],
        "g": dict(result.note.tiers) if result.note is not None else None,
        "y": result.reused,
    }
    kept = {key: value for key, value in packed.items() if value}
    kept |= packed_choice(result.choices[0])
    if result.prompt_token_ids is not None:
        kept["j"] = result.prompt_token_ids
    raw = msgpack.packb(kept, unicode_errors="surrogatepass")
    if len(raw) > MAX_RESULT_BYTES:
        raise WireError(f"the result is larger than {MAX_RESULT_BYTES} bytes")
    return isal_zlib.compress(raw, 3)


# A map of the wrong shape raises these in its reader (int() of infinity overflows).
_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError),
    msgpack.UnpackException,
)


def decode_result(data: bytes) -> Result:
    """Inverse of encode_result; raises WireError on anything else.

    The result of a duplicate is its own custom_id and then its leader's result (``stamp``).
    """
    reused = is_reused(data)
    custom_id, data = unstamped(data)
    raw = inflate(data, MAX_RESULT_BYTES, "result")
    try:
        packed = msgpack.unpackb(raw, unicode_errors="surrogatepass", strict_map_key=True)
        result = _result(packed)
    except _UNREADABLE as fault:
        raise WireError(f"stored result cannot be read: {fault}") from fault
    if custom_id is None:
        return result
    return replace(result, custom_id=custom_id, reused=reused or result.reused)


def _load_json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as fault:
        raise WireError(f"job data is not JSON: {fault}") from fault


_REQUEST_FIELDS = frozenset(item.name for item in fields(Request))
_REQUIRED = object()


def _request(payload: Any) -> Request:
    if not isinstance(payload, dict) or not payload.keys() <= _REQUEST_FIELDS:
        raise WireError("job payload has fields that batchkv never writes")
    request = Request(
        custom_id=_typed(payload, "custom_id", str),
        endpoint=_typed(payload, "endpoint", str),
        messages=_typed(payload, "messages", list, None),
        prompt=_typed(payload, "prompt", str, None),
        tools=_typed(payload, "tools", list, None),
        chat_template_kwargs=_typed(payload, "chat_template_kwargs", dict, {}),
        params=read_params(_typed(payload, "params", dict, {})),
        style=_typed(payload, "style", str, "raw"),
        system=_typed(payload, "system", str, None),
        prompt_tokens=_typed(payload, "prompt_tokens", list, None),
        constraint=_constraint(payload),
        tool_choice=_typed(payload, "tool_choice", str, None),
        parallel_tool_calls=_typed(payload, "parallel_tool_calls", bool, None),
        reasoning_effort=_typed(payload, "reasoning_effort", str, None),
        cache_salt=_typed(payload, "cache_salt", str, None),
    )
    _check(request)
    return request


def _check(request: Request) -> None:
    """What a payload of the right types may still have wrong. Raises WireError."""
    if len(request.custom_id) > MAX_CUSTOM_ID_CHARS:  # the row's result stores it, too
        raise WireError("job payload: custom_id is too long")
    if request.endpoint not in ("chat", "completion"):
        raise WireError("job payload names an unknown endpoint")
    is_styled = request.style == "auto" and request.prompt is not None
    if not is_styled and (request.style != "raw" or request.system is not None):
        raise WireError("job payload has a style or a system message that it cannot have")
    if sum(each is not None for each in _prompts(request)) != 1:
        raise WireError("job payload needs either messages or a prompt")
    if request.prompt_tokens is not None:
        _check_tokens(request.prompt_tokens)
    if request.tool_choice is not None and not is_tool_choice(request.tool_choice):
        raise WireError("job payload names an unknown tool_choice")
    if request.parallel_tool_calls:
        raise WireError("job payload: parallel_tool_calls has a value that is never written")
    if len(request.reasoning_effort or "") > MAX_EFFORT_CHARS:
        raise WireError("job payload: reasoning_effort is too long")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARS:
        raise WireError(f"job payload: cache_salt must have 1 to {MAX_SALT_CHARS} characters")


def _prompts(request: Request) -> tuple[Any, ...]:
    return request.messages, request.prompt, request.prompt_tokens


def _check_tokens(tokens: list[int]) -> None:
    if not 1 <= len(tokens) <= MAX_PROMPT_TOKENS:
        raise WireError(f"job payload: prompt_tokens must be 1 to {MAX_PROMPT_TOKENS} token ids")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in tokens):
        raise WireError(f"job payload: a token id is not a whole number of 0 to {MAX_TOKEN_ID}")


def is_tool_choice(text: str) -> bool:
    """Whether this is a valid ``tool_choice`` of a request."""
    if text in ("none", "required"):
        return True
    return text.startswith(FUNCTION) and 0 < len(text) - len(FUNCTION) <= MAX_FUNCTION_CHARS


def _constraint(payload: dict[str, Any]) -> Constraint | None:
    packed = _typed(payload, "constraint", dict, None)
    return None if packed is None else unpacked_constraint(packed)


def _typed(payload: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = payload.get(name, default)
    if value is _REQUIRED or (value is not default and not isinstance(value, kind)):
        raise WireError(f"job payload: {name} is missing or not a {kind.__name__}")
    return value


def _result(packed: dict[str, Any]) -> Result:
    if packed["o"] not in ("ok", "failed", "canceled"):
        raise ValueError("unknown outcome")
    if packed.get("e") not in ("chat", "completion"):
        raise ValueError("unknown endpoint")
    error, prompt = packed.get("x"), packed.get("j")
    first = unpacked_choice(packed)
    counts = [index(count) for count in packed.get("u") or ()]
    prompt_tokens, completion, cached = counts if counts else (0, 0, 0)
    return Result(
        custom_id=str(packed.get("c", "")),
        endpoint=packed["e"],
        outcome=packed["o"],
        model=str(packed.get("m", "")),
        text=first.text,
        finish_reason=first.finish_reason,
        usage=Usage(prompt_tokens, completion, cached, index(packed.get("h", 0))),
        error=(str(error[0]), str(error[1])) if error else None,
        logprobs=first.logprobs,
        worker=str(packed.get("w", "")),
        created=index(packed.get("a", 0)),
        busy_ms=index(packed.get("b", 0)),
        note=CacheNote.unpacked(packed["n"], packed.get("g", {})) if "n" in packed else None,
        fingerprint=str(packed.get("p", "")),
        scheme=str(packed.get("s", "")),
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        token_ids=first.token_ids,
        prompt_token_ids=None if prompt is None else unpacked_ids(prompt),
        more=tuple(unpacked_choice(choice) for choice in packed.get("d") or ()),
        reused=packed.get("y") is True,
    )

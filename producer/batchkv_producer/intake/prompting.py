"""How plain prompts reach the model: through its chat template, or as they are.

A *plain prompt* is a line of a text file, or a JSON line that has a ``prompt`` and neither ``url``
nor ``body``. Its reader marks it with the style ``auto``. The worker, which has the model, makes
one user message of it if there is a chat template. Lines with a ``url`` or a ``body`` name their
kind themselves, and are sent unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.chat_options import THINKING
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, decode_job, encode_job

MAX_SYSTEM_CHARS = 2**20

_OFF = "off"
_THINKING_VARIABLES = (THINKING, "thinking", "thinking_budget", "reasoning_effort", "reasoning")


@dataclass(frozen=True, slots=True)
class Prompting:
    """``raw``: plain prompts are sent unchanged. ``system``: a message before each of them.

    ``no_thinking``: chat rows, and plain prompts that become messages, do not think, unless they
    say something about it themselves.
    """

    raw: bool = False
    system: str | None = None
    no_thinking: bool = False

    def check(self) -> None:
        """Raise UsageError for options that exclude each other or are invalid."""
        if self.system is None:
            return
        if self.raw:
            raise UsageError("--raw sends prompts without any message: it excludes --system")
        if not self.system.strip() or len(self.system) > MAX_SYSTEM_CHARS:
            raise UsageError(f"--system needs a text of 1 to {MAX_SYSTEM_CHARS} characters")
        try:
            self.system.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("the text of --system is not UTF-8") from None

    def apply(self, request: Request) -> Request:
        """The request with this style, and with the template's variable for ``no_thinking``."""
        if request.style != "raw" and (self.raw or self.system is not None):
            request = replace(request, style="raw" if self.raw else "auto", system=self.system)
        if not self.no_thinking or not has_template(request) or _says_how_to_think(request):
            return request
        variables = {**request.chat_template_kwargs, THINKING: False}
        return replace(request, chat_template_kwargs=variables)

    def identity(self) -> tuple[bytes, ...]:
        """The parts of a batch's identity for the options that were given."""
        thinking = (b"no-thinking",) if self.no_thinking else ()
        if self.raw:
            return (b"raw", *thinking)
        return thinking if self.system is None else (b"system", self.system.encode(), *thinking)

    def as_fields(self) -> dict[str, str]:
        """The fields of a new batch's hash."""
        fields = {"style": "raw" if self.raw else "auto"}
        fields |= {"thinking": _OFF} if self.no_thinking else {}
        return fields if self.system is None else {**fields, "system": self.system}

    def sentence(self) -> str:
        """The note for a batch that has plain prompts."""
        if self.raw:
            return "plain prompts are sent as they are (--raw)"
        through = "plain prompts are sent through the model's chat template, where it has one"
        return f"{through}; --raw sends them as they are" if self.system is None else through


def has_template(request: Request) -> bool:
    """Whether the model's chat template renders the request, if it has one."""
    return request.messages is not None or request.style == "auto"


def _says_how_to_think(request: Request) -> bool:
    if request.reasoning_effort is not None or request.params.thinking_budget is not None:
        return True
    return any(name in request.chat_template_kwargs for name in _THINKING_VARIABLES)


AUTO = Prompting()
RAW = Prompting(raw=True)
_STAYS_RAW = (
    "plain prompts are sent as they are, as when it was begun; --fresh computes all rows again, "
    "through the model's chat template"
)


def kept(connection: Redis, batch_id: str) -> tuple[Prompting, tuple[bytes, ...]]:
    """How an existing batch sends plain prompts, and the part of that in its digest.

    Batches of versions without styles store nothing. They are raw.
    """
    there: Any = connection.hmget(redis_keys.batch(batch_id), "style", "system", "thinking")
    texts = (None if raw is None else raw.decode("utf-8", "replace") for raw in there)
    style, system, thinking = texts
    if not style:
        return RAW, ()
    found = Prompting(style == "raw", system, thinking == _OFF)
    return found, found.identity()


def style_note(connection: Redis, batch_id: str, *, is_new: bool) -> str:
    """The note for a batch that has plain prompts. "" for one that existed, and got it then.

    A batch of a version without styles gets its note each time, because it got none then.
    """
    found, identity = kept(connection, batch_id)
    if found.raw and not identity:
        return _STAYS_RAW
    return found.sentence() if is_new else ""


def as_raw(data: bytes) -> bytes:
    """A job's data with its plain prompt unchanged."""
    request = decode_job(data)
    if request.style == "raw":
        return data
    return encode_job(replace(request, style="raw", system=None))

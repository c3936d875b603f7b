"""From a file to a batch in the queue: read, identify, enqueue chunk by chunk.

A batch's id is the first 16 of the 64 hex digits of a SHA-256 over the file's bytes, how they are
read (``.txt`` or JSON lines), the model and the generation defaults. The same file again is
therefore the same batch: it is joined, and what an interrupted submit left out is added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO, cast

from redis import Redis

from batchkv_producer import redis_keys
from batchkv_producer.body import check_defaults
from batchkv_producer.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS, BatchSpec, Progress, enqueue
from batchkv_producer.errors import InputFileError, UsageError
from batchkv_producer.formats import Row, RowError, read_rows
from batchkv_producer.job import SamplingParams
from batchkv_producer.planner import Plan, PlanCounts
from batchkv_producer.source import HashingReader, Source, is_text_file, opened, source_name
from batchkv_producer.transitions import Transitions

MAX_SHOWN_ERRORS = 20
MAX_NAME_CHARS = 200

_ID_VERSION = b"batchkv batch 1"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch that is in the queue. ``joined``: it (or a part of it) had been there before."""

    batch_id: str
    queue: str
    model: str
    total: int
    num_jobs: int
    num_bad: int
    joined: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """What a file would give: ``errors`` are the first 20, ``num_chars`` the prompts' text."""

    total: int
    num_jobs: int
    num_bad: int
    errors: tuple[RowError, ...]
    num_chars: int
    model: str


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """What reading the file has told: the digest of its bytes, how they were read, its model."""

    digest: bytes
    is_text: bool
    model: str


def check(
    source: Source, *, model: str | None = None, defaults: SamplingParams | None = None
) -> Checked:
    """Read and check a file without a server; raises UsageError for the file as a whole."""
    with Plan(defaults or SamplingParams()) as plan:
        facts, counts = _read(source, plan, model, defaults)
        return Checked(
            total=counts.total,
            num_jobs=counts.total - counts.num_bad,
            num_bad=counts.num_bad,
            errors=plan.errors(MAX_SHOWN_ERRORS),
            num_chars=counts.num_chars,
            model=facts.model,
        )


def submit(
    connection: Redis,
    source: Source,
    *,
    model: str | None = None,
    defaults: SamplingParams | None = None,
    job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> Submitted:
    """Put a file into the queue of its model; raises UsageError before anything was changed."""
    if job_timeout_seconds < 1:
        raise UsageError(f"the job timeout must be at least 1 second, got {job_timeout_seconds}")
    with Plan(defaults or SamplingParams()) as plan:
        facts, counts = _read(source, plan, model, defaults)
        shown_name = (name or source_name(source))[:MAX_NAME_CHARS]
        spec = BatchSpec(facts.model, defaults or SamplingParams(), job_timeout_seconds, shown_name)
        digest = batch_digest(facts, spec.defaults)
        joined = enqueue(Transitions(connection), plan, counts, digest, spec, on_progress)
    return Submitted(
        batch_id=digest[:16],
        queue=redis_keys.queue_name(spec.model),
        model=spec.model,
        total=counts.total,
        num_jobs=counts.total - counts.num_bad,
        num_bad=counts.num_bad,
        joined=joined,
    )


def batch_digest(facts: _FileFacts, defaults: SamplingParams) -> str:
    """64 hex digits that name a batch; every part is preceded by its length."""
    parts = [
        _ID_VERSION,
        b"text" if facts.is_text else b"jsonl",
        facts.digest,
        facts.model.encode("utf-8", "surrogatepass"),
        _canonical(defaults),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _canonical(defaults: SamplingParams) -> bytes:
    """Defaults as bytes: 1 and 1.0 are the same, and so is a field not said and not there."""
    said = {name: value for name, value in asdict(defaults).items() if value not in (None, ())}
    plain = {
        name: float(value) if isinstance(value, int) and abs(value) < 2**53 else value
        for name, value in said.items()
    }
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii")


class _ModelVote:
    """Passes rows through and remembers which models they name, two at most."""

    def __init__(self) -> None:
        self.named: dict[str, int] = {}

    def watch(self, rows: Iterator[Row | RowError]) -> Iterator[Row | RowError]:
        for row in rows:
            if isinstance(row, Row) and row.model is not None and len(self.named) < 2:
                self.named.setdefault(row.model, row.line)
            yield row

    def decide(self, explicit: str | None) -> str:
        if explicit:
            return _checked_model(explicit)
        if len(self.named) == 1:
            return next(iter(self.named))
        if not self.named:
            raise UsageError(
                "no model: name one with -m MODEL or BATCHKV_MODEL, or in the lines themselves"
            )
        first, second = (f"{json.dumps(name)} (line {line})" for name, line in self.named.items())
        raise UsageError(
            f"the lines name different models, {first} and {second}; a batch has one model: "
            "split the file, or choose one for all with -m MODEL"
        )


def _checked_model(name: str) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"the model's name is not UTF-8: {name!r}") from None
    if not name.strip():
        raise UsageError("the model's name is blank")
    return name


def _read(
    source: Source, plan: Plan, model: str | None, defaults: SamplingParams | None
) -> tuple[_FileFacts, PlanCounts]:
    check_defaults(defaults or SamplingParams())
    is_text = is_text_file(source)
    vote = _ModelVote()
    with opened(source) as stream:
        reader = HashingReader(stream)
        plan.add(vote.watch(read_rows(cast(BinaryIO, reader), is_text=is_text)))
    counts = plan.seal()
    if counts.total == 0:
        raise InputFileError(f"{source_name(source)} has no rows")
    return _FileFacts(reader.digest(), is_text, vote.decide(model)), counts

"""From a file to a queued batch: reads, identifies and enqueues it chunk by chunk.

A batch's id is the first 16 of the 64 hex digits of a SHA-256 over: the file's bytes, how they are
read (``.txt``, JSON lines, an array), the model and the generation defaults. The names of several
files, --raw, --system and the number of a later generation are part of it where they are given. So
the same file is the same batch: a second submit joins it, and adds the rows that an interrupted one
left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial

from redis import Redis

from batchkv_producer.errors import InputFileError, UsageError
from batchkv_producer.intake.body import checked_defaults
from batchkv_producer.intake.formats import RowError, of_endpoint
from batchkv_producer.intake.given_rows import Given, as_source
from batchkv_producer.intake.model_vote import ModelVote
from batchkv_producer.intake.prompting import AUTO, Prompting, style_note
from batchkv_producer.intake.reading import Reading
from batchkv_producer.intake.source import STDIN_NAME, Source, inputs_of, source_name
from batchkv_producer.order.planner import BatchPlan, PlanCounts
from batchkv_producer.order.prefix_estimate import PrefixEstimate, estimate_prefixes
from batchkv_producer.submit import adapter_folders
from batchkv_producer.submit.enqueue import (
    DEFAULT_JOB_TIMEOUT_SECONDS,
    BatchSpec,
    Progress,
    enqueue,
)
from batchkv_producer.submit.generations import Generation, informed, settled
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.reused_answers import check_reuse, reuse_note
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter, split_here, with_adapter
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.job import Endpoint, SamplingParams
from batchkv_producer.wire.transitions import Transitions

MAX_SHOWN_ERRORS = 20
MAX_SUBMIT_ERRORS = 5  # wrong rows that a submit shows; it queues the others
MAX_NAME_CHARS = 200

# Gets a batch's id, its model, and the ids of all generations of the batch.
Identified = Callable[[str, str, frozenset[str]], object]

_ID_VERSION = b"batchkv batch 1"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch that is in the queue. ``joined``: it, or a part of it, was there before.

    ``errors`` are the first few wrong rows. ``num_duplicates`` rows get the answer of another row
    with the same request. ``notes``: options that differ in the existing batch, which keeps its
    own. ``style_note`` says how plain prompts of a new batch are sent. ``model_note`` names the
    models in lines that are ignored. ``reuse_note`` names rows that --reuse does not help.
    ``generation``, ``base``, ``relatives``, ``why``: see ``generations``.
    """

    batch_id: str
    queue: str
    model: str
    total: int
    num_jobs: int
    num_bad: int
    joined: bool
    errors: tuple[RowError, ...] = ()
    num_duplicates: int = 0
    notes: tuple[str, ...] = ()
    generation: int = 1
    base: str = ""
    why: str = ""
    relatives: frozenset[str] = frozenset()
    style_note: str = ""
    model_note: str = ""
    reuse_note: str = ""

    @property
    def num_twins(self) -> int:
        """The former name of ``num_duplicates``."""
        return self.num_duplicates


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check: ``errors`` are the first 20, ``num_chars`` counts the prompts' text.

    ``model`` and ``batch_id`` are empty if neither the caller nor the lines name a model.
    """

    total: int
    num_jobs: int
    num_bad: int
    errors: tuple[RowError, ...]
    num_chars: int
    model: str
    batch_id: str
    num_duplicates: int = 0
    model_note: str = ""

    @property
    def num_twins(self) -> int:
        """The former name of ``num_duplicates``."""
        return self.num_duplicates


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """Facts about the input that was read: its digest, kinds and model, and the rows' places."""

    digest: bytes
    kind: bytes
    model: str
    place: Callable[[int], str]
    model_note: str


def check(
    source: Given,
    *,
    model: str | None = None,
    defaults: SamplingParams | None = None,
    default_model: str | None = None,
    dedupe: bool = False,
    prompting: Prompting = AUTO,
    adapter: Adapter | None = None,
) -> Checked:
    """Read and check a file without a server. The result has the id of its batch.

    Raises UsageError for the file as a whole.
    """
    given = checked_defaults(defaults or SamplingParams())
    with BatchPlan(given, dedupe=dedupe, prompting=prompting) as plan:
        chosen = _Chosen(model, default_model, adapter)
        return _checked(as_source(source), plan, given, chosen, prompting)


def survey(
    source: Source,
    *,
    model: str | None = None,
    defaults: SamplingParams | None = None,
    default_model: str | None = None,
    num_workers: int = 1,
    prompting: Prompting = AUTO,
) -> tuple[Checked, PrefixEstimate]:
    """``check``, and an estimate of the hits when this many workers share the queue."""
    given = checked_defaults(defaults or SamplingParams())
    with BatchPlan(given, prompting=prompting) as plan:
        checked = _checked(source, plan, given, _Chosen(model, default_model), prompting)
        return checked, estimate_prefixes(plan.entries(), checked.num_jobs, num_workers)


def submit(
    connection: Redis,
    source: Source,
    *,
    model: str | None = None,
    defaults: SamplingParams | None = None,
    job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS,
    name: str | None = None,
    on_progress: Progress | None = None,
    default_model: str | None = None,
    on_identified: Identified | None = None,
    options: BatchOptions = NO_OPTIONS,
    prompting: Prompting = AUTO,
    earlier: EarlierBatch | None = None,
    identity: tuple[bytes, ...] = (),
    endpoint: Endpoint | None = None,
    cache_salt: str | None = None,
    on_counted: Callable[[int], object] = int,
) -> Submitted:
    """Put a file into the queue of its model. Raises UsageError before anything changes.

    The model is ``model``, else the one that all lines name, else ``default_model``. With the
    options' adapter it is called ``MODEL@NAME``. Before anything changes, ``on_counted`` gets the
    number of rows, then ``on_identified`` is called; both may refuse by raising. ``earlier``: a
    batch whose answers are kept for like rows. With another ``identity`` the same file is another
    batch. Rows of another ``endpoint`` are wrong. Rows with a ``cache_salt`` share prefixes with
    rows of the same salt alone.
    """
    if job_timeout_seconds < 1:
        raise UsageError(f"the job timeout must be at least 1 second, got {job_timeout_seconds}")
    given = checked_defaults(defaults or SamplingParams())
    served = _Chosen(model, default_model, options.adapter)
    check_reuse(connection, options)
    with _plan(given, options, prompting, cache_salt) as plan, served.known():
        facts, counts = _read(source, plan, given, served.need, prompting, endpoint)
        on_counted(counts.total)
        name = (name or source_name(source))[:MAX_NAME_CHARS]
        options = informed(_with_named(options, facts.model), facts.model)
        spec = BatchSpec(facts.model, given, job_timeout_seconds, name, options, prompting, earlier)
        digest_of = partial(batch_digest, facts, given, (*prompting.identity(), *identity))
        errors = _placed(plan.errors(MAX_SUBMIT_ERRORS), facts)

        def make(chosen: Generation) -> tuple[bool, tuple[str, ...]]:
            if earlier is not None:
                earlier.look(connection, plan, chosen.relatives, facts.model, fresh=options.fresh)
            if on_identified is not None:
                on_identified(chosen.batch_id, facts.model, chosen.relatives)
            return enqueue(Transitions(connection), plan, counts, chosen, spec, on_progress)

        chosen, (joined, notes) = settled(connection, digest_of, options, make)
        num_plain, reuse = plan.num_plain, reuse_note(plan.num_never_reused())
    return replace(
        _submitted(chosen, spec, counts, joined=joined),
        errors=errors,
        notes=notes,
        style_note=style_note(connection, chosen.batch_id, is_new=not joined) if num_plain else "",
        model_note=facts.model_note,
        reuse_note=reuse,
    )


def _plan(
    given: SamplingParams, options: BatchOptions, prompting: Prompting, cache_salt: str | None
) -> BatchPlan:
    return BatchPlan(
        given,
        dedupe=options.dedupe,
        prompting=prompting,
        cache_salt=cache_salt,
        reuse=options.reuse,
    )


def _submitted(
    chosen: Generation, spec: BatchSpec, counts: PlanCounts, *, joined: bool
) -> Submitted:
    return Submitted(
        batch_id=chosen.batch_id,
        queue=redis_keys.queue_name(spec.model),
        model=spec.model,
        total=counts.total,
        num_jobs=counts.total - counts.num_bad,
        num_bad=counts.num_bad,
        joined=joined,
        num_duplicates=counts.num_duplicates,
        generation=chosen.number,
        base=chosen.base,
        why=chosen.why,
        relatives=chosen.relatives,
    )


def identify(
    source: Source,
    plan: BatchPlan,
    defaults: SamplingParams,
    model: str,
    more_identity: tuple[bytes, ...] = (),
    generation: int = 1,
) -> str:
    """Fill a plan with a file and seal it. Returns the digest of the batch."""
    facts, _ = _read(source, plan, defaults, lambda _: model)
    return batch_digest(facts, defaults, more_identity, generation)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The caller's choice of a model: the one of all rows, the default, and an adapter."""

    model: str | None
    default: str | None
    adapter: Adapter | None = None

    def known(self) -> AbstractContextManager[None]:
        """Inside, the adapter's folder on this machine is known, if the caller named it."""
        return adapter_folders.given(self.adapter)

    def need(self, vote: ModelVote) -> str:
        """The name of the served model. Raises UsageError if nobody names one."""
        return self._served(vote.need(self.model, self.default))

    def decide(self, vote: ModelVote) -> str:
        """The same; "" if nobody names one."""
        model = vote.decide(self.model, self.default)
        return self._served(model) if model else ""

    def _served(self, model: str) -> str:
        return with_adapter(model, self.adapter.name if self.adapter else "")


def _with_named(options: BatchOptions, served: str) -> BatchOptions:
    """The options with the adapter that the model's name has, if they have none."""
    name = split_here(served)[1]
    if options.adapter is not None or not name:
        return options
    return replace(options, adapter=Adapter(name))


def _checked(
    source: Source,
    plan: BatchPlan,
    given: SamplingParams,
    chosen: _Chosen,
    prompting: Prompting,
) -> Checked:
    facts, counts = _read(source, plan, given, chosen.decide, prompting)
    digest = batch_digest(facts, given, prompting.identity())
    return Checked(
        total=counts.total,
        num_jobs=counts.total - counts.num_bad,
        num_bad=counts.num_bad,
        errors=_placed(plan.errors(MAX_SHOWN_ERRORS), facts),
        num_chars=counts.num_chars,
        model=facts.model,
        batch_id=digest[:16] if facts.model else "",
        num_duplicates=counts.num_duplicates,
        model_note=facts.model_note,
    )


def batch_digest(
    facts: _FileFacts,
    defaults: SamplingParams,
    more: tuple[bytes, ...] = (),
    generation: int = 1,
) -> str:
    """64 hex digits that name a batch; every part is preceded by its length.

    A new option is appended only if it was given, so that ids of older versions stay. ``more`` has
    the options that later versions added.
    """
    parts = [
        _ID_VERSION,
        facts.kind,
        facts.digest,
        facts.model.encode("utf-8", "surrogatepass"),
        _canonical(defaults),
        *more,
    ]
    if generation > 1:
        parts.append(f"generation:{generation}".encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _canonical(defaults: SamplingParams) -> bytes:
    """Defaults as bytes. 1 and 1.0 are equal; a field that is None equals one that is missing."""
    given = {name: value for name, value in asdict(defaults).items() if value not in (None, ())}
    plain = {
        name: float(value) if isinstance(value, int) and abs(value) < 2**53 else value
        for name, value in given.items()
    }
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii")


def _read(
    source: Source,
    plan: BatchPlan,
    defaults: SamplingParams,
    choose: Callable[[ModelVote], str],
    prompting: Prompting = AUTO,
    endpoint: Endpoint | None = None,
) -> tuple[_FileFacts, PlanCounts]:
    prompting.check()
    if prompting.no_thinking and defaults.thinking_budget is not None:
        raise UsageError("--no-thinking and --thinking-budget exclude each other")
    inputs = inputs_of(source)
    reading = Reading(inputs)
    vote = ModelVote(reading.place)
    plan.place = reading.place
    plan.add(vote.watch(of_endpoint(reading.rows(), endpoint)))
    counts = plan.seal()
    if counts.total == 0:
        what = "standard input" if inputs.name == STDIN_NAME else inputs.name
        raise InputFileError(f"{what} has no rows")
    if reading.may_be_text and plan.is_all(ErrorCode.INVALID_JSON):
        raise InputFileError(
            f"no line of {inputs.name} is JSON: --as text takes each line as a prompt"
        )
    if prompting.system is not None and not plan.num_plain:
        raise UsageError(f"--system is for plain prompts: no row of {inputs.name} is one")
    if prompting.no_thinking and not plan.num_templated:
        raise UsageError(f"--no-thinking is for chat templates: no row of {inputs.name} has one")
    model = choose(vote)
    return _FileFacts(reading.digest, reading.kind, model, reading.place, vote.note), counts


def _placed(errors: Sequence[RowError], facts: _FileFacts) -> tuple[RowError, ...]:
    return tuple(replace(error, place=facts.place(error.line)) for error in errors)

"""Explains why a prompt was computed and not loaded from the shared cache, after its job has ended.

Part of the answer is in the note that the worker stored in the job's result (``from_result``). For
the rest, ``why_look`` reads the tiers as they are now, and ``from_look`` concludes from that. By
then the job has most likely stored the missing block itself. So ages count: only objects that are
older than that block, or than the job, show what the lookup found.

No token id leaves this module, only the number of the first token that differs from stored prompts.
It needs no MLX, so that it runs on every machine that reads results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.blocks.peek import Head
from batchkv_cache_store.cli.text import count, moment
from batchkv_cache_store.errors import Reason
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.job import Result
from batchkv_worker.prefix.explain.why_look import Look

_PARTS = (Kind.WINDOW, Kind.STATE)  # stored in addition to keys and values, not for every block
_AT_ONCE_MS = 1_000  # results have the time of their end in whole seconds
_UNITS = ((2 * 86_400, 86_400, "day"), (7_200, 3_600, "hour"), (120, 60, "minute"))

_REFUSED = {
    Reason.BAD_MAGIC: "it is no block",
    Reason.VERSION: "it has a format that the worker does not read",
    Reason.TRUNCATED: "it is damaged: its end is missing",
    Reason.TRAILING: "it is damaged: it is longer than its header says",
    Reason.LIMITS: "it is larger than the limit for blocks",
    Reason.CHECKSUM: "it is damaged",
    Reason.MAC: "it is not signed with the worker's secret",
    Reason.NO_SECRET: "it is signed, and the worker has no secret to check the signature",
    Reason.HEADER: "batchkv does not write such a header",
    Reason.TENSORS: "its table of tensors does not fit its contents",
    Reason.NAMESPACE: "it is of another namespace, so of another model or KV scheme",
    Reason.KEY: "its key is not the one in its name",
    Reason.KIND: "its kind is not the one in its name",
    Reason.TOKENS: "its tokens do not belong to its key",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """``reason``: one word for scripts. ``sentence``: for people; parts of it come from writers.

    ``parts_at``: number in the prompt, from 0, of the first token that differs from stored prompts.
    Tokens are compared by marks of one byte. So among hundreds of blocks, the number may be a token
    or two too high.
    """

    reason: str
    sentence: str
    parts_at: int | None = None


def missing_block(note: CacheNote) -> int:
    """Number in the prompt, from 0, of the first block that was computed."""
    return note.local + note.found


def from_result(result: Result) -> Explanation | None:
    """The explanation in a job's result; None if the tiers must be read for it."""
    note = result.note
    if note is None:
        return _without_note(result.usage.prompt)
    if not note.key:
        return Explanation("complete", f"all blocks were found: {count(note.wanted, 'block')}")
    block = missing_block(note)
    word, _, rest = note.stop.partition(" ")
    sentences = {
        "gated": f"loading block {block} and the blocks after it was expected to take longer than "
        "computing them",
        "rejected": f"the stored block {block} was refused: {_refusal(rest)}",
        "trouble": "the lookup failed in the worker: its log has the error"
        if rest == "lookup"
        else f"the {rest} tier did not answer",
        "held": f"another worker was computing block {block} and did not publish it in time",
        "slow": "the store did not answer in time",
        "alone": f"the worker did not look for block {block}: by the queue, no other worker had "
        "rows that begin with it, or loading was expected to take longer than computing",
    }
    return Explanation(word, sentences[word]) if word in sentences else None


def _without_note(num_tokens: int) -> Explanation:
    if num_tokens <= BLOCK_TOKENS:
        return Explanation(
            "short",
            f"the prompt has {count(num_tokens, 'token')}, too few for one full block of "
            f"{BLOCK_TOKENS} before its last token",
        )
    return Explanation(
        "no_cache",
        "the worker had no cache: BATCHKV_CACHE was not set there, or its memory for prefixes is "
        "smaller than one block",
    )


def _refusal(reason: str) -> str:
    try:
        return _REFUSED[Reason(reason)]
    except ValueError:  # of a newer worker
        return reason


@dataclass(frozen=True, slots=True)
class _Case:
    """A job and the contents of the tiers. ``here``: the missing piece, if a tier has it now."""

    result: Result
    note: CacheNote
    look: Look
    kind: Kind | None  # of the missing piece; None if the note does not have it
    here: Head | None

    @property
    def started_ms(self) -> int:
        return self.result.created * 1000 - self.result.busy_ms

    def was_before(self, time_ms: int | None) -> bool:
        """Whether an object of that age was stored before the job, if the clocks agree."""
        return time_ms is not None and time_ms < self.started_ms

    def is_evidence(self, time_ms: int | None) -> bool:
        """Whether the lookup may have found an object of that age."""
        return time_ms is not None and (self.here is None or time_ms < self.here.time_ms)

    @property
    def block(self) -> int:
        return missing_block(self.note)

    @property
    def since(self) -> str:
        """The writer and the time of the missing piece, as the end of a sentence."""
        if self.here is None:
            return ""
        return f"; block {self.block} is stored now, {self.written}"

    @property
    def written(self) -> str:
        """The writer and the time of the stored piece, in words."""
        assert self.here is not None
        time_ms = self.here.time_ms
        when = moment(time_ms / 1000) or "an unknown time"
        past_ms = time_ms - self.result.created * 1000
        if self.started_ms <= time_ms and past_ms <= _AT_ONCE_MS:
            relation = "while the job ran"
        elif past_ms < 0:
            relation = f"{_span(self.started_ms - time_ms)} before the job began"
        else:
            relation = f"{_span(past_ms)} after the job had ended"
        return f"published by {self.here.writer or 'an unnamed worker'} at {when}, {relation}"


def _span(milliseconds: int) -> str:
    seconds = max(1, milliseconds // 1000)
    for least, size, unit in _UNITS:
        if seconds >= least:
            return count(seconds // size, unit)
    return count(seconds, "second")


def from_look(result: Result, look: Look) -> Explanation:
    """The explanation from the tiers, if ``from_result`` gave none."""
    note = result.note
    assert note is not None
    kind = _missing_kind(note)
    pieces = [head for head in look.pieces.values() if kind in (None, head.kind)]
    here = min(pieces, key=lambda head: head.time_ms, default=None)
    case = _Case(result, note, look, kind, here)
    for rule in _RULES:
        found = rule(case)
        if found is not None:
            return found
    return _never(case)


def _missing_kind(note: CacheNote) -> Kind | None:
    """The kind of the piece of the missing block that the lookup did not find."""
    word, _, rest = note.stop.partition(" ")
    kind, _, number = rest.partition(" ")
    # The row may have found more in the worker's memory after the lookup. Then the note's ``stop``
    # is about another block.
    is_of_block = word == "missing" and number == str(missing_block(note)) and kind in list(Kind)
    return Kind(kind) if is_of_block else None


def _was_there(case: _Case) -> Explanation | None:
    if case.here is None or not case.was_before(case.here.time_ms):
        return None
    return Explanation(
        "present",
        f"block {case.block} is stored, {case.written}: the worker did not look it up, or it had "
        "not reached a tier yet, or the machines' clocks differ",
    )


def _part_alone(case: _Case) -> Explanation | None:
    """The block was stored, but without the window or state that the model needs."""
    others = [head.time_ms for kind, head in case.look.pieces.items() if kind is not case.kind]
    is_beside = case.here is None or any(map(case.was_before, others))
    return _part(case) if case.kind in _PARTS and others and is_beside else None


def _part(case: _Case) -> Explanation:
    why = "it was never stored, or was evicted"
    if case.kind is Kind.STATE:
        why = (
            "states are stored only where prompts begin to differ, at a prompt's last full block, "
            "and every 16 blocks"
        )
    text = f"to go on after block {case.block} the model needs a {case.kind} of that block, and "
    return Explanation(f"no_{case.kind}", f"{text}none was stored: {why}{case.since}")


def _evicted_before(case: _Case) -> Explanation | None:
    return _evicted(case) if case.was_before(case.look.child_ms) else None


def _evicted(case: _Case) -> Explanation | None:
    # Few blocks have states, so later blocks do not prove that this one had a state.
    if case.look.child_ms is None or case.kind is Kind.STATE:
        return None
    return Explanation(
        "evicted",
        f"block {case.block} was stored before, because blocks after it are stored: it was evicted "
        f"or deleted{case.since}",
    )


def _parted(case: _Case) -> Explanation | None:
    commons = [num for num, time_ms in case.look.siblings.values() if case.is_evidence(time_ms)]
    if not commons:
        return None
    low, size, common = case.block * BLOCK_TOKENS, len(case.note.marks), max(commons)
    stored = f"{'were' if case.here else 'are'} stored"
    if common >= size:  # the marks are equal, so the difference is at the end
        text = f"the prompt differs from those that {stored} in the last tokens of "
        return Explanation(
            "parted", f"{text}block {case.block}{case.since}", low + max(0, size - 1)
        )
    text = f"the prompt differs from those that {stored} at token {low + common:,}"
    return Explanation("parted", f"{text}, in block {case.block}{case.since}", low + common)


def _other_salt(case: _Case) -> Explanation | None:
    if case.block or not case.is_evidence(case.look.other_root_ms):
        return None
    return Explanation(
        "salt",
        "the stored blocks of this model and KV scheme are another tenant's: the worker's salt "
        "differs from that of the writers, or the row or theirs are of a private API key"
        f"{case.since}",
    )


def _other_namespace(case: _Case) -> Explanation | None:
    look, space = case.look, case.note.namespace
    is_empty = look.block_ms is None
    # It was empty if all its blocks came with this job, or later.
    was_empty = case.block == 0 and not case.was_before(look.block_ms)
    if look.is_partial or not (is_empty or was_empty):
        return None
    tense = "is" if is_empty else "was"
    text = f"no block of the worker's model and KV scheme {tense} stored"
    if space not in look.manifests:
        text += ", and no manifest describes these"
    elif fields := look.nearest(space):
        text += f"; the most similar namespace with a manifest differs in {_joined(fields)}"
    else:
        text += ", and no other namespace has a manifest"
    return Explanation("namespace", text + case.since)


def _published(case: _Case) -> Explanation | None:
    if case.here is None:
        return None
    return Explanation("published", f"block {case.block} was not stored then{case.since}")


def _never(case: _Case) -> Explanation:
    if case.kind in _PARTS:
        return _part(case)
    evicted = case.look.num_evicted.items()
    counts = ", ".join(f"{name} has evicted {count(number, 'block')}" for name, number in evicted)
    text = (
        f"block {case.block} was never stored (BATCHKV_CACHE_WRITE chooses which blocks are), or "
        "was evicted with all blocks after it"
    )
    return Explanation("absent", f"{text} ({counts} so far)" if counts else text)


_RULES: tuple[Callable[[_Case], Explanation | None], ...] = (
    *(_was_there, _part_alone, _evicted_before, _parted, _other_salt, _other_namespace),
    *(_published, _evicted),
)


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

"""Why a prompt was computed and not taken from the shared cache, told after its job has ended.

Some of it stands in the note that the worker left in the job's result (``from_result``). For the
rest the tiers are looked at as they are now (``why_look``), and ``from_look`` concludes. By then
the job has most likely stored the missing block itself. So age counts: only what is older than
that block, or than the job, tells what the lookup met.

No token id leaves this module, only the number of the token at which the prompt parts from others.
It needs no MLX, so that it runs wherever results are read.
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

_PARTS = (Kind.WINDOW, Kind.STATE)  # kept beside a block's keys and values, and not everywhere
_AT_ONCE_MS = 1_000  # results tell their end in whole seconds
_UNITS = ((2 * 86_400, 86_400, "day"), (7_200, 3_600, "hour"), (120, 60, "minute"))

_REFUSED = {
    Reason.BAD_MAGIC: "it is no block at all",
    Reason.VERSION: "it is of a format that the worker does not read",
    Reason.TRUNCATED: "it is damaged, namely cut short",
    Reason.TRAILING: "it is damaged, namely longer than it says",
    Reason.LIMITS: "it is larger than a block may be",
    Reason.CHECKSUM: "it is damaged",
    Reason.MAC: "it is not signed with the worker's secret",
    Reason.NO_SECRET: "it is signed, and the worker has no secret to check that with",
    Reason.HEADER: "its header is not one that batchkv writes",
    Reason.TENSORS: "its table of tensors does not fit what it holds",
    Reason.NAMESPACE: "it is of another namespace, so of another model or KV scheme",
    Reason.KEY: "it is another block than its name says",
    Reason.KIND: "it is of another kind than its name says",
    Reason.TOKENS: "it holds other tokens than its key stands for",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """``reason``: one word for scripts. ``sentence``: for people; others wrote parts of it.

    ``parts_at``: number in the prompt, from 0, of the first token that differs from what is stored.
    A mark is one byte: where hundreds of blocks part there, it may be a token or two later.
    """

    reason: str
    sentence: str
    parts_at: int | None = None


def missing_block(note: CacheNote) -> int:
    """Number in the prompt, from 0, of the first block that was computed."""
    return note.local + note.found


def from_result(result: Result) -> Explanation | None:
    """What a job's result explains by itself; None when the tiers must be looked at."""
    note = result.note
    if note is None:
        return _without_note(result.usage.prompt)
    if not note.key:
        return Explanation("complete", f"everything was there: {count(note.wanted, 'block')}")
    block = missing_block(note)
    word, _, rest = note.stop.partition(" ")
    sentences = {
        "gated": f"loading block {block} and what follows was expected to take longer than "
        "computing it",
        "rejected": f"what the store had of block {block} was refused: {_refusal(rest)}",
        "trouble": "the lookup failed in the worker, whose log tells more"
        if rest == "lookup"
        else f"the {rest} tier did not answer",
        "held": f"another worker was computing block {block} and did not publish it in time",
        "slow": "the store did not answer in time",
    }
    return Explanation(word, sentences[word]) if word in sentences else None


def _without_note(num_tokens: int) -> Explanation:
    if num_tokens <= BLOCK_TOKENS:
        return Explanation(
            "short",
            f"the prompt has {count(num_tokens, 'token')}, and what is shared are full blocks of "
            f"{BLOCK_TOKENS} before the last token",
        )
    return Explanation(
        "no_cache",
        "the worker had no cache: BATCHKV_CACHE was not set there, or its memory for prefixes has "
        "no room for one block",
    )


def _refusal(reason: str) -> str:
    try:
        return _REFUSED[Reason(reason)]
    except ValueError:  # of a newer worker
        return reason


@dataclass(frozen=True, slots=True)
class _Case:
    """A job and what was found. ``here``: the missing piece, if it is in a tier now."""

    result: Result
    note: CacheNote
    look: Look
    kind: Kind | None  # of the missing piece; None when the note does not tell
    here: Head | None

    @property
    def started_ms(self) -> int:
        return self.result.created * 1000 - self.result.busy_ms

    def was_before(self, time_ms: int | None) -> bool:
        """Whether something of that age was there before the job, as far as clocks agree."""
        return time_ms is not None and time_ms < self.started_ms

    def is_evidence(self, time_ms: int | None) -> bool:
        """Whether something of that age may be what the lookup met."""
        return time_ms is not None and (self.here is None or time_ms < self.here.time_ms)

    @property
    def block(self) -> int:
        return missing_block(self.note)

    @property
    def since(self) -> str:
        """Who stored the missing piece meanwhile and when, as the end of a sentence."""
        if self.here is None:
            return ""
        return f"; block {self.block} is there now, {self.written}"

    @property
    def written(self) -> str:
        """Who stored the piece that is here, and when."""
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
        return f"published by {self.here.writer or 'somebody'} at {when}, {relation}"


def _span(milliseconds: int) -> str:
    seconds = max(1, milliseconds // 1000)
    for least, size, unit in _UNITS:
        if seconds >= least:
            return count(seconds // size, unit)
    return count(seconds, "second")


def from_look(result: Result, look: Look) -> Explanation:
    """What the tiers explain of a job for which ``from_result`` knew nothing."""
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
    """Which piece of the missing block the lookup did not find."""
    word, _, rest = note.stop.partition(" ")
    kind, _, number = rest.partition(" ")
    # The row may have found more in the worker's memory after the lookup: then it told of another.
    is_of_block = word == "missing" and number == str(missing_block(note)) and kind in list(Kind)
    return Kind(kind) if is_of_block else None


def _was_there(case: _Case) -> Explanation | None:
    if case.here is None or not case.was_before(case.here.time_ms):
        return None
    return Explanation(
        "present",
        f"block {case.block} is there, {case.written}: it was not looked up, or had not reached a "
        "tier yet, or the machines' clocks differ",
    )


def _part_alone(case: _Case) -> Explanation | None:
    """The block was there, but for the part that the model goes on from."""
    others = [head.time_ms for kind, head in case.look.pieces.items() if kind is not case.kind]
    is_beside = case.here is None or any(map(case.was_before, others))
    return _part(case) if case.kind in _PARTS and others and is_beside else None


def _part(case: _Case) -> Explanation:
    why = "it was never stored, or was evicted"
    if case.kind is Kind.STATE:
        why = (
            "states are kept only where prompts part, at a prompt's last full block, and every 16 "
            "blocks"
        )
    text = f"to go on after block {case.block} the model needs a {case.kind} there, and there was "
    return Explanation(f"no_{case.kind}", f"{text}none: {why}{case.since}")


def _evicted_before(case: _Case) -> Explanation | None:
    return _evicted(case) if case.was_before(case.look.child_ms) else None


def _evicted(case: _Case) -> Explanation | None:
    # States are kept here and there: what follows a block does not show that it had one.
    if case.look.child_ms is None or case.kind is Kind.STATE:
        return None
    return Explanation(
        "evicted",
        f"block {case.block} was there once, for blocks that follow it are stored: it was evicted "
        f"or deleted{case.since}",
    )


def _parted(case: _Case) -> Explanation | None:
    commons = [num for num, time_ms in case.look.siblings.values() if case.is_evidence(time_ms)]
    if not commons:
        return None
    low, size, common = case.block * BLOCK_TOKENS, len(case.note.marks), max(commons)
    tense = "was" if case.here else "is"
    if common >= size:  # a difference after which no mark was left to show it
        text = f"the prompt parts from what {tense} stored in the last tokens of block {case.block}"
        return Explanation("parted", text + case.since, low + max(0, size - 1))
    text = f"the prompt parts from what {tense} stored at token {low + common:,}"
    return Explanation("parted", f"{text}, in block {case.block}{case.since}", low + common)


def _other_salt(case: _Case) -> Explanation | None:
    if case.block or not case.is_evidence(case.look.other_root_ms):
        return None
    return Explanation(
        "salt",
        "what is stored for this model and KV scheme is another tenant's: the worker had another "
        f"salt than the writers{case.since}",
    )


def _other_namespace(case: _Case) -> Explanation | None:
    look, space = case.look, case.note.namespace
    is_empty = look.block_ms is None
    # Or it was: all that there is came with this job, or later.
    was_empty = case.block == 0 and not case.was_before(look.block_ms)
    if look.is_partial or not (is_empty or was_empty):
        return None
    tense = "is" if is_empty else "was"
    text = f"nothing of the worker's model and KV scheme {tense} stored"
    if space not in look.manifests:
        text += ", nor is a manifest that tells what these are"
    elif fields := look.nearest(space):
        text += f"; the nearest that has a manifest differs in {_joined(fields)}"
    else:
        text += ", and there is no manifest of any other"
    return Explanation("namespace", text + case.since)


def _published(case: _Case) -> Explanation | None:
    if case.here is None:
        return None
    return Explanation("published", f"block {case.block} was not there then{case.since}")


def _never(case: _Case) -> Explanation:
    if case.kind in _PARTS:
        return _part(case)
    evicted = case.look.num_evicted.items()
    told = ", ".join(f"{name} has evicted {count(number, 'block')}" for name, number in evicted)
    text = (
        f"block {case.block} was never stored (BATCHKV_CACHE_WRITE says what is), or was evicted "
        "with all that followed it"
    )
    return Explanation("absent", f"{text} ({told} so far)" if told else text)


_RULES: tuple[Callable[[_Case], Explanation | None], ...] = (
    *(_was_there, _part_alone, _evicted_before, _parted, _other_salt, _other_namespace),
    *(_published, _evicted),
)


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

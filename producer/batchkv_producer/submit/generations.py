"""Generations of a batch: the same file, computed with other weights or settings, or once more.

A batch's id is made from its file, the name of its model and the generation defaults. It does not
depend on the model's weights or the KV scheme. Answers that were computed with others must not be
returned as those of this submit. So a submit with other weights or another scheme makes the batch's
next generation, whose id has the generation's number in its digest. The first generation keeps the
plain id.

Numbers in the set of all batches are taken, because it keeps ids when results expire. The number of
a forgotten batch is free again. Without ``fresh``, the newest generation that exists and fits is
joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from redis import Redis

from batchkv_producer.errors import BatchkvError
from batchkv_producer.submit import fingerprint
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.maker import Maker

MAX_RACES = 10  # for the next generation, lost in a row
PAGE = 16  # generations looked at in one round trip
NUM_RELATIVES = 100

DigestOf = Callable[[int], str]
T = TypeVar("T")


class OtherMakingError(BatchkvError):
    """Another process made this generation meanwhile, with another maker."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation that a submit makes or joins.

    ``base`` is the id of the first; ``relatives`` are the ids of all. ``why``: the maker of the
    previous generation in words, if it is the reason for a new one; else empty.
    """

    number: int
    digest: str
    base: str
    relatives: frozenset[str]
    why: str = ""

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self.digest[:16]

    def fields(self) -> dict[str, str | int]:
        """Fields of the batch's hash; none for a first generation."""
        return {} if self.number == 1 else {"generation": self.number, "base": self.base}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A generation that is or was on the server."""

    number: int
    is_there: bool
    maker: Maker
    is_mixed: bool

    def fits(self, options: BatchOptions) -> bool:
        """Whether its answers are valid under these options, by the rule of ``create.lua``."""
        wants, own = options.maker, self.maker
        if wants.fingerprint and own.fingerprint and wants.fingerprint != own.fingerprint:
            return False
        if options.mixed:
            return True
        pairs = ((wants.scheme, own.scheme), (wants.dtype, own.dtype))
        if self.is_mixed:
            return not any(wanted for wanted, _ in pairs)
        return not any(wanted and has and wanted != has for wanted, has in pairs)


def informed(options: BatchOptions, model: str) -> BatchOptions:
    """The options with the fingerprint of this machine's model, if the model is here."""
    if options.maker.fingerprint:
        return options
    found = fingerprint.of_model(model)
    return replace(options, maker=replace(options.maker, fingerprint=found)) if found else options


def settled(
    connection: Redis, digest_of: DigestOf, options: BatchOptions, make: Callable[[Generation], T]
) -> tuple[Generation, T]:
    """The generation that ``make`` made or joined, and its result.

    A generation that another process made with another maker is skipped.
    """
    for num_left in reversed(range(MAX_RACES)):
        chosen = choose(connection, digest_of, options)
        try:
            return chosen, make(chosen)
        except OtherMakingError:
            if not num_left:
                raise
    raise AssertionError


def choose(connection: Redis, digest_of: DigestOf, options: BatchOptions) -> Generation:
    """The generation that a submit under these options makes or joins."""
    seen = list(_seen(connection, digest_of))
    newest = max((each.number for each in seen), default=0)
    there = [each for each in reversed(seen) if each.is_there]
    fitting = next((each.number for each in there if each.fits(options)), 0)
    number, why = fitting, ""
    if options.fresh:
        number = newest + 1
    elif not fitting:
        number = newest + 1 if there else 1
        why = (there[0].maker.words() or "several schemes") if there else ""
    return Generation(
        number=number,
        digest=digest_of(number),
        base=digest_of(1)[:16],
        relatives=frozenset(
            digest_of(n)[:16] for n in range(1, max(newest, number, NUM_RELATIVES) + 1)
        ),
        why=why,
    )


def _seen(connection: Redis, digest_of: DigestOf) -> Iterator[_Seen]:
    """All generations in the server's set of batches, first to last."""
    first, is_over = 1, False
    while not is_over:
        numbers = range(first, first + PAGE)
        with connection.pipeline(transaction=False) as pipeline:
            for number in numbers:
                batch_id = digest_of(number)[:16]
                pipeline.zscore(redis_keys.BATCHES, batch_id)
                names = ("digest", "fingerprint", "scheme", "dtype", "mixed")
                pipeline.hmget(redis_keys.batch(batch_id), *names)
            replies: list[Any] = pipeline.execute()
        is_over = True
        for number, score, (digest, *made, mixed) in zip(
            numbers, replies[::2], replies[1::2], strict=True
        ):
            if score is not None or digest is not None:
                is_over = False
                maker = Maker(*((value or b"").decode("utf-8", "replace") for value in made))
                yield _Seen(number, digest is not None, maker, mixed is not None)
        first += PAGE

"""Rows through the engine in many ways, compared token for token with the row alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.sequence import Generation, Sequence
from parity import matrix
from parity.families import VOCABULARY
from support import tiny_models
from support.tiny_models import GreedyStep
from worker.kv.record_backends import WithRecords

CHUNK = 32
_RECORDS_ON_CPU = WithRecords(columns_multiple=64, replays_steps=True)
MOST_TIES = 3  # of one row
MOST_STEPS = 5000  # an engine that has not ended by then never will


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and how many tokens are generated."""

    prompt: list[int]
    count: int

    def after(self, tokens: Items[int]) -> Row:
        """The rest of the row when it has given these tokens."""
        return Row([*self.prompt, *tokens], self.count - len(tokens))


# Prompts of one token to three chunks, of 34 tokens the last chunk has one; the windows (24) are
# crossed in the prompt, while decoding (25 and 5 tokens), or never.
_SHAPES = ((1, 12), (97, 16), (25, 28), (34, 9), (5, 28), (70, 16), (2, 24), (48, 20))


def ragged_rows(seed: int = 0) -> list[Row]:
    """Eight rows of unequal length."""
    rng = random.Random(seed)
    return [Row(random_prompt(rng, length), count) for length, count in _SHAPES]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Tie:
    """A step at which a row took the second of two tokens that were as good as equal."""

    where: str
    step: int
    count: int
    margin: float


# The greedy steps of a row alone that has already given its first ``n`` tokens.
Reference = Callable[[int], Items[GreedyStep]]


@dataclass(slots=True)
class Ledger:
    """How many rows were compared, and at which steps rounding decided."""

    num_rows: int = 0
    ties: list[Tie] = field(default_factory=list)

    @property
    def num_tied(self) -> int:
        """Rows that were not compared to their end in one go."""
        return len({tie.where for tie in self.ties})

    def compare(self, where: str, got: Items[int], reference: Reference, bound: float) -> None:
        """Token for token; AssertionError where a row differs by more than a tie within ``bound``.

        At a tie the row may take the second best token. It has another history from then on, so the
        rest is compared with a row alone that has that history too.
        """
        self.num_rows += 1
        done = ties = 0
        while done < len(got):
            expected = reference(done)
            assert len(got) == done + len(expected), f"{where}: {len(got)} tokens"
            tie = _first_tie(where, got, done, expected, bound)
            if tie is None:
                return
            self.ties.append(tie)
            done, ties = tie.step + 1, ties + 1
            assert ties <= MOST_TIES, f"{where} differs at token after token: {ties} ties"


def _first_tie(
    where: str, got: Items[int], done: int, expected: Items[GreedyStep], bound: float
) -> Tie | None:
    for index, (token, step) in enumerate(zip(got[done:], expected, strict=True), start=done):
        if token == step.token:
            continue
        assert step.margin <= bound and token == step.second, (
            f"{where} differs at token {index} of {len(got)}: {token} for {step.token}, which "
            f"leads {step.second} by {step.margin:.4f}"
        )
        return Tie(where, index, len(got), step.margin)
    return None


LEDGER = Ledger()


class Cell:
    """A family under a scheme: its model, its engines and what each row gives alone."""

    def __init__(self, family: str, scheme: str) -> None:
        self.family, self.scheme = family, scheme
        self.bound = matrix.close(scheme)
        self._engines: dict[int, Engine] = {}
        self._alone: dict[tuple[int, ...], list[GreedyStep]] = {}

    @cached_property
    def model(self) -> Any:
        return tiny_models.build(self.family)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the model's logits."""
        return tiny_models.spread(self.model)

    def new_engine(self, slots: int, prefix_bytes: int = 0) -> Engine:
        path = matrix.path_of(self.family, self.scheme)
        config = EngineConfig(
            scheme=self.scheme.removesuffix(matrix.KERNEL),
            slots=slots,
            chunk_tokens=CHUNK,
            memory_bytes=2**30,
            prefix_bytes=prefix_bytes,
            path=path,
            group_cost=16,  # rows of unequal length are cut into many groups
            backend=self._backend(path),
        )
        return Engine(tiny_models.loaded(self.model), config)

    def _backend(self, path: str) -> Backend:
        """What a start checks is the same for any number of slots, so the first engine checks.

        A CPU has no kernels over records: plain operations take their place.
        """
        if path == "kernel" and device.kind() == "cpu":
            return _RECORDS_ON_CPU
        return tiny_models.measured(self.model, self.scheme, 0, path)

    def engine(self, slots: int) -> Engine:
        """An engine with so many slots; what ran in it before has left its traces there."""
        known = self._engines.get(slots)
        if known is None or not known.is_idle:
            known = self._engines[slots] = self.new_engine(slots)
        return known

    def alone(self, row: Row) -> list[GreedyStep]:
        """The row by itself in an engine of one slot."""
        known = self._alone.get(tuple(row.prompt), [])
        if len(known) < row.count:
            running = self.engine(1)
            submit(running, "alone", row, logprobs=2)
            (ended,) = drain(running).values()
            known = self._alone[tuple(row.prompt)] = self._steps(ended)
        return known[: row.count]

    def _steps(self, ended: Completed) -> list[GreedyStep]:
        assert ended.logprobs is not None
        tops = [item.top for item in ended.logprobs]
        return [
            GreedyStep(token, int(top[1][0]), (top[0][1] - top[1][1]) / self.spread)
            for token, top in zip(ended.token_ids, tops, strict=True)
        ]

    def compare(self, scenario: str, rows: dict[str, Row], ended: dict[str, Completed]) -> None:
        """Every row that ran against itself alone."""
        assert set(ended) == set(rows)
        for job_id, row in rows.items():
            where = f"{self.family} {self.scheme} {scenario} row {job_id} ({len(row.prompt)} long)"
            self.compare_row(LEDGER, where, row, ended[job_id])

    def compare_row(self, ledger: Ledger, where: str, row: Row, ended: Completed) -> None:
        got = ended.token_ids
        ledger.compare(where, got, lambda done: self.alone(row.after(got[:done])), self.bound)


@lru_cache(maxsize=1)
def cell(family: str, scheme: str) -> Cell:
    """One at a time, for the tests of a cell follow each other."""
    return Cell(family, scheme)


def submit(running: Engine, job_id: str, row: Row, logprobs: int | None = None) -> None:
    generation = Generation(row.count, temperature=0.0, logprobs=logprobs)
    running.submit_row(Sequence(job_id, list(row.prompt), generation))


def step(running: Engine, ended: dict[str, Completed], count: int = 1) -> None:
    """``count`` steps, the books checked after each."""
    for _ in range(count):
        for event in running.step():
            assert isinstance(event, Completed), event
            assert event.job_id not in ended
            ended[event.job_id] = event
        running.check_integrity()


def drain(running: Engine, ended: dict[str, Completed] | None = None) -> dict[str, Completed]:
    """Step to the end; what ended, by job."""
    ended = {} if ended is None else ended
    for _ in range(MOST_STEPS):
        if running.is_idle:
            return ended
        step(running, ended)
    raise AssertionError(f"not idle after {MOST_STEPS} steps")

"""Queues for ``bench_plan``, and the least time in which workers can compute them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, takewhile

from benchmarks.plan.simulation import (
    ANSWER_TOKENS_PER_SECOND,
    BLOCK_TOKENS,
    PROMPT_TOKENS_PER_SECOND,
    SLOTS,
    SPEEDS,
    Job,
)

NUM_HALVINGS = 12  # of the interval in which the least time is
NUM_ORDERS = 12  # of the workers, that are tried


class _Maker:
    """Makes jobs from a seed. Lengths of own parts and of answers are exponential."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ids = count()

    def blocks(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))

    def group(self, rows: int, prefix: int, own: float, answer: float) -> Iterator[Job]:
        """Rows with a prefix of so many blocks; means of own blocks and of answer tokens."""
        shared = self.blocks(prefix)
        for _ in range(rows):
            chain = shared + self.blocks(max(1, round(self._rng.expovariate(1 / own))))
            num_prompt = len(chain) * BLOCK_TOKENS - self._rng.randrange(BLOCK_TOKENS)
            yield Job(chain, num_prompt, max(1, round(self._rng.expovariate(1 / answer))))

    def number(self, low: int, high: int) -> int:
        return self._rng.randrange(low, high)

    def mixed(self, jobs: list[Job]) -> list[Job]:
        self._rng.shuffle(jobs)
        return jobs


def few_large_groups(
    num_groups: int = 8, rows: tuple[int, int] = (60, 180), seed: int = 1
) -> list[Job]:
    """Few groups with long prefixes, about ten blocks of its own for each row."""
    make = _Maker(seed)
    groups = (
        make.group(make.number(*rows), make.number(8, 40), 12, 200) for _ in range(num_groups)
    )
    return make.mixed([job for group in groups for job in group])


def many_small_groups() -> list[Job]:
    """Thousands of groups of two to five rows."""
    make = _Maker(2)
    groups = (make.group(make.number(2, 6), make.number(1, 8), 2, 150) for _ in range(2500))
    return make.mixed([job for group in groups for job in group])


def one_giant_group() -> list[Job]:
    """One group of 2,000 rows, and as many single prompts."""
    make = _Maker(3)
    singles = [job for _ in range(1500) for job in make.group(1, 1, 6, 200)]
    return make.mixed([*make.group(2000, 24, 2, 150), *singles])


def answers_only() -> list[Job]:
    """Short prompts that share nothing, and answers of 300 tokens."""
    make = _Maker(4)
    return [job for _ in range(3000) for job in make.group(1, 0, 0.1, 300)]


def few_jobs(seed: int = 1) -> list[Job]:
    """Ten jobs for each worker."""
    return few_large_groups(4, (15, 25), seed)


def least_seconds(order: Sequence[Job], speeds: Sequence[float] = SPEEDS) -> float:
    """A bound of the time: whatever is done, it takes nearly as long as this.

    It is the longest of three times. First, the work of all prompts over the sum of the speeds,
    each prefix charged once for every worker that computes it in the best split of the order into
    consecutive parts that was found. Second, all answers, with all slots full. Third, the longest
    row on the fastest worker.
    """
    rng = random.Random(0)
    orders = [sorted(speeds), sorted(speeds, reverse=True)]
    orders += [rng.sample(speeds, len(speeds)) for _ in range(NUM_ORDERS - len(orders))]
    prompts = min(_least_split(order, each) for each in orders)
    row_rate, top = ANSWER_TOKENS_PER_SECOND, max(speeds)
    answers = sum(job.num_answer for job in order) / (row_rate * SLOTS * sum(speeds))
    longest = max(
        job.num_prompt / PROMPT_TOKENS_PER_SECOND + job.num_answer / row_rate for job in order
    )
    return max(prompts, answers, longest / top)


def pooled_seconds(order: Sequence[Job], speeds: Sequence[float] = SPEEDS) -> float:
    """The time if nobody knows how long answers are, and nothing else is lost.

    One worker as fast as all together computes the prompts in their order, each prefix once. Each
    answer is generated at the speed of the fastest. An answer that is long and begins late takes
    its time, whoever computes it.
    """
    has: set[int] = set()
    now = end = 0.0
    for job in order:
        num_held = sum(1 for _ in takewhile(has.__contains__, job.chain))
        has.update(job.chain)
        num_tokens = max(1, job.num_prompt - num_held * BLOCK_TOKENS)
        now += num_tokens / PROMPT_TOKENS_PER_SECOND / sum(speeds)
        end = max(end, now + job.num_answer / ANSWER_TOKENS_PER_SECOND / max(speeds))
    return end


def _least_split(order: Sequence[Job], speeds: Sequence[float]) -> float:
    low = 0.0
    high = sum(job.num_prompt for job in order) / PROMPT_TOKENS_PER_SECOND / max(speeds)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if _fits(order, speeds, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(order: Sequence[Job], speeds: Sequence[float], seconds: float) -> bool:
    """Whether workers, in this order, can compute consecutive parts in so many seconds each."""
    at = 0
    for speed in speeds:
        has: set[int] = set()
        left = seconds
        while at < len(order):
            job = order[at]
            num_held = next((i for i, b in enumerate(job.chain) if b not in has), len(job.chain))
            num_tokens = max(1, job.num_prompt - num_held * BLOCK_TOKENS)
            left -= num_tokens / PROMPT_TOKENS_PER_SECOND / speed
            if left < 0:
                break
            has.update(job.chain)
            at += 1
    return at == len(order)

"""A row's tokens are its own: alone, in a crowd, after cancels, and as mlx-lm gives them.

The contract of every family of caches under every scheme; ``matrix`` says which are run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from batchkv_worker.errors import ModelError
from batchkv_worker.events import Completed
from parity import matrix
from parity.harness import (
    CHUNK,
    LEDGER,
    Cell,
    Row,
    cell,
    drain,
    ragged_rows,
    random_prompt,
    step,
    submit,
)
from support import tiny_models
from support.tiny_models import GreedyStep

Ran = tuple[dict[str, Row], dict[str, Completed]]
CELLS = [pytest.param(*pair, id="-".join(pair)) for pair in matrix.cells()]
FEW_TIED = 4  # allowed however few rows were chosen: a row may be tied in every scenario
WHOLE = matrix.SERVED if matrix.RUNS_ALL else ()  # of the scenarios that only make parity runs


def numbered(rows: list[Row]) -> dict[str, Row]:
    return {str(index): row for index, row in enumerate(rows)}


def all_at_once(given: Cell) -> Ran:
    """Eight rows of unequal length in eight slots."""
    rows, running = numbered(ragged_rows()), given.engine(8)
    for job_id, row in rows.items():
        submit(running, job_id, row)
    return rows, drain(running)


def joins_and_leaves(given: Cell) -> Ran:
    """More rows than slots, submitted while others decode; they end at different times."""
    rows, running = numbered(ragged_rows()), given.engine(3)
    ended: dict[str, Completed] = {}
    for index, (job_id, row) in enumerate(rows.items()):
        submit(running, job_id, row)
        step(running, ended, count=index % 4)
    return rows, drain(running, ended)


def neighbours_cancel(given: Cell) -> Ran:
    """Rows are cancelled while they decode, wait, and are in prefill; others take their slots."""
    rows, running = numbered(ragged_rows()), given.engine(4)
    ended: dict[str, Completed] = {}
    for job_id in "01234":
        submit(running, job_id, rows[job_id])
    step(running, ended, count=3)
    running.cancel("1")  # the longest, decoding
    running.cancel("4")  # waits for a slot
    submit(running, "again", rows["4"])
    for job_id in "567":
        submit(running, job_id, rows[job_id])
    step(running, ended, count=2)
    running.cancel("2")
    running.cancel("7")
    left = {job_id: row for job_id, row in rows.items() if job_id not in "1247"}
    return {**left, "again": rows["4"]}, drain(running, ended)


def longest_leaves_first(given: Cell) -> Ran:
    """The longest row ends after 3 tokens, the others go on, and a new one takes its place."""
    rows, running = numbered(ragged_rows()), given.engine(4)
    chosen = {"1": Row(rows["1"].prompt, 3), **{job_id: rows[job_id] for job_id in "2465"}}
    for job_id, row in chosen.items():
        submit(running, job_id, row)
    return chosen, drain(running)


SCENARIOS = (all_at_once, joins_and_leaves, neighbours_cancel, longest_leaves_first)


@pytest.mark.few(10)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(("family", "scheme"), CELLS)
def test_rows_equal_themselves_alone(
    family: str, scheme: str, scenario: Callable[[Cell], Ran]
) -> None:
    """Whatever its neighbours do, a row gives the tokens that it gives in an engine by itself."""
    given = cell(family, scheme)
    given.compare(scenario.__name__, *scenario(given))


@pytest.mark.parametrize("family", matrix.SERVED)
def test_float_rows_equal_mlx_lm(family: str) -> None:
    """A row alone in the engine, unpacked, gives what mlx-lm gives on the model's own caches."""
    given = cell(family, "float")
    for index, row in enumerate(ragged_rows()):
        if not matrix.RUNS_ALL and index not in (0, 1, 4):
            continue
        got = [step.token for step in given.alone(row)]

        def expected(done: int, row: Row = row, got: list[int] = got) -> list[GreedyStep]:
            rest = row.after(got[:done])
            return tiny_models.alone_with_margins(
                given.model, rest.prompt, rest.count, chunk_tokens=CHUNK
            )

        LEDGER.compare(f"{family} mlx-lm row {index}", got, expected, given.bound)


@pytest.mark.parametrize("family", matrix.REFUSED)
def test_refused_families_are_refused_for_their_reason(family: str) -> None:
    """What is not served is on the list, with the engine's own words; nothing else is refused."""
    with pytest.raises(ModelError, match=matrix.REFUSED[family]):
        cell(family, "float").new_engine(1)


@pytest.mark.parametrize("scheme", ["float", "affine8"])
@pytest.mark.parametrize("family", WHOLE)
def test_long_rows(family: str, scheme: str) -> None:
    """Hundreds of steps: buffers grow, shift and are cut to windows many times over."""
    given, rng = cell(family, scheme), random.Random(5)
    shapes = ((40, 560), (300, 40), (3, 330), (9, 300), (130, 200))
    rows = numbered([Row(random_prompt(rng, length), count) for length, count in shapes])
    running = given.engine(3)
    for job_id, row in rows.items():
        submit(running, job_id, row)
    given.compare("long", rows, drain(running))


@pytest.mark.parametrize("scheme", ["float", "affine8"])
@pytest.mark.parametrize("family", WHOLE)
def test_rows_behind_a_cached_prefix(family: str, scheme: str) -> None:
    """Rows that take a prefix from memory give what they give when they compute it."""
    given, rng = cell(family, scheme), random.Random(6)
    prefix = random_prompt(rng, 530)
    tails = (20, 1, 60, 33)
    rows = numbered([Row(prefix + random_prompt(rng, length), 12) for length in tails])
    running = given.new_engine(3, prefix_bytes=2**28)
    ended: dict[str, Completed] = {}
    for job_id, row in rows.items():
        submit(running, job_id, row)
        drain(running, ended)
    assert [ended[job_id].usage.cached for job_id in rows] == [0, 512, 512, 512]
    given.compare("prefix", rows, ended)


def test_few_rows_were_tied() -> None:
    """Of all rows compared so far, rounding decided in hardly any."""
    assert LEDGER.num_tied <= max(FEW_TIED, matrix.MOST_TIED * LEDGER.num_rows)

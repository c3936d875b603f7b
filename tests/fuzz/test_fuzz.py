"""Bytes of any kind into the readers of lines, jobs, results and blocks: a verdict, never a crash.

A short run here; ``make fuzz`` runs each for a minute (``FUZZ_SECONDS``). What once went wrong
stands in ``corpus/<reader>/`` and is read first, at every run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.readers import CHECKS
from fuzz.shapes import SHAPES

CORPUS = Path(__file__).with_name("corpus")
NUM_EXAMPLES = 30


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_once_went_wrong(path: Path) -> None:
    """Every file of the corpus ends in a verdict."""
    CHECKS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("reader", CHECKS)
def test_any_bytes_end_in_a_verdict(reader: str) -> None:
    """Bytes that come close to what a reader is for; the same ones at every run."""

    @seed(20_260_101)
    @settings(
        max_examples=NUM_EXAMPLES,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(SHAPES[reader])
    def run(data: bytes) -> None:
        CHECKS[reader](data)

    run()


def test_the_shapes_get_far() -> None:
    """Of what is made for a reader some is accepted and some is refused."""
    from batchkv_producer.errors import WireError
    from batchkv_producer.wire.job import decode_job

    seen = {True: 0, False: 0}

    @seed(1)
    @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(SHAPES["job"]))
    def run(data: bytes) -> None:
        try:
            decode_job(data)
        except WireError:
            seen[False] += 1
        else:
            seen[True] += 1

    run()
    assert min(seen.values()) > 3, seen

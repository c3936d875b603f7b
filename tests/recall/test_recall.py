"""Trained models through the engine: answers are right, and wrong caches make them wrong."""

from __future__ import annotations

import pytest

from recall import engine_faults as faults
from recall.task import Kind
from recall.through_engine import (
    FAMILIES,
    FOUR_BITS,
    RUNS_ALL,
    Plant,
    accuracy,
    schemes_of,
    share_in_spite_of,
)

LEAST_FLOAT = 95.0
MOST_LOST_AT_8_BITS = 0.5
MOST_LOST_AT_4_BITS = 2.0
LEAST_UNSPOILT, MOST_SPOILT = 0.95, 0.5
CELLS = [(family, scheme) for family in FAMILIES for scheme in ("float", *schemes_of(family))]
FAULTS: list[tuple[str, str, Kind, Plant]] = [
    ("full", "float", "recall", faults.drop_a_source),
    ("full", "float", "recall", faults.take_a_neighbours_tokens),
    ("full", "float", "echo", faults.hurry_offsets),
    ("hybrid", "float", "recall", faults.drop_a_source),
    ("hybrid", "float", "recall", faults.zero_states),
    ("sliding", "float", "echo", faults.take_a_neighbours_tokens),
    ("sliding", "affine4", "echo", faults.lag_offsets),
    ("sliding", "affine4", "echo", faults.narrow_windows),
]
if RUNS_ALL:
    FAULTS += [
        ("sliding", "float", "recall", faults.drop_a_source),
        ("sliding", "float", "echo", faults.drop_a_source),
        ("sliding", "affine4", "recall", faults.drop_a_source),
        ("full", "float", "echo", faults.lag_offsets),
        ("hybrid", "float", "echo", faults.hurry_offsets),
        ("sliding", "float", "echo", faults.lag_offsets),
        ("hybrid", "float", "recall", faults.take_a_neighbours_tokens),
        ("sliding", "affine4", "recall", faults.take_a_neighbours_tokens),
        ("sliding", "float", "echo", faults.narrow_windows),
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "scheme"), CELLS)
def test_answers_by_scheme(family: str, scheme: str) -> None:
    """Float answers nearly every prompt; 8 bits lose half a point of that at most."""
    points = accuracy(family, scheme)
    if scheme == "float":
        assert points >= LEAST_FLOAT
    if scheme == "affine8":
        assert points >= accuracy(family, "float") - MOST_LOST_AT_8_BITS


@pytest.mark.timeout(1800)  # chosen alone, it measures its schemes itself
@pytest.mark.parametrize("family", FAMILIES)
def test_four_bits_can_do(family: str) -> None:
    """The best scheme of 4 bits loses two points at most."""
    schemes = [scheme for scheme in schemes_of(family) if scheme in FOUR_BITS]
    measured = {scheme: accuracy(family, scheme) for scheme in schemes}
    assert max(measured.values()) >= accuracy(family, "float") - MOST_LOST_AT_4_BITS, measured


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "scheme", "kind", "plant"), FAULTS)
def test_faults_lower_accuracy(family: str, scheme: str, kind: Kind, plant: Plant) -> None:
    """At most half of the answers stay right; without the fault nearly all are."""
    assert share_in_spite_of(family, scheme, kind, None) >= LEAST_UNSPOILT
    assert share_in_spite_of(family, scheme, kind, plant) <= MOST_SPOILT

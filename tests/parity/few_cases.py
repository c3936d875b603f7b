"""Some cases of a test with many: the suite runs these, and `make parity` all of them.

``@pytest.mark.few(5)`` keeps five. They are the same ones in each run, and together they have as
many values of each parameter as five cases can.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from functools import partial

import pytest

Case = Mapping[str, Hashable]


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that run, and those that do not, in their order."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("few")
        assert marker is not None
        chosen = {cases[place] for place in choose([*map(_values, cases)], *marker.args)}
        left_out.update(item for item in cases if item not in chosen)
    return (
        [item for item in items if item not in left_out],
        [item for item in items if item in left_out],
    )


def choose(cases: Sequence[Case], count: int) -> list[int]:
    """The places of ``count`` cases: each the one that has most values that none before it has.

    Where several have as many, the one that is farthest from those chosen, in the order of cases.
    """
    left, chosen = [*range(len(cases))], list[int]()
    seen = set[tuple[str, Hashable]]()
    while left and len(chosen) < count:
        best = max(left, key=partial(_gain, cases, chosen, seen))
        left.remove(best)
        chosen.append(best)
        seen |= cases[best].items()
    return sorted(chosen)


def _gain(
    cases: Sequence[Case], chosen: Sequence[int], seen: Set[tuple[str, Hashable]], place: int
) -> tuple[int, int, int]:
    apart = min((abs(place - other) for other in chosen), default=0)
    return len(cases[place].items() - seen), apart, -place


def _values(item: pytest.Item) -> Case:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else {key: repr(value) for key, value in callspec.params.items()}

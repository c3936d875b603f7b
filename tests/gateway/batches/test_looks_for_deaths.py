"""A gateway looks again and again for workers of its machine that died."""

from __future__ import annotations

import math
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from batchkv_gateway.batches import driver
from batchkv_gateway.batches.driver import Driver


@pytest.mark.parametrize(
    ("fault", "goes_on"), [(None, True), (OSError("disk"), True), (NoPermissionError("no"), False)]
)
def test_each_look_knows_who_was_silent_at_the_last(
    fault: Exception | None, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of the server, a worker whose process cannot be seen is not dead at once."""
    given: list[Any] = []

    def look(connection: object, silent: Any) -> None:
        given.append(silent)
        if fault is not None:
            raise fault

    monkeypatch.setattr(driver, "reclaim_dead_of_home", look)
    unused: Any = None
    one = Driver(unused, unused, unused, unused)
    one._look_for_deaths()
    one._look_for_deaths()
    assert given[0] is given[1] == set()
    assert (one._next_look < math.inf) is goes_on

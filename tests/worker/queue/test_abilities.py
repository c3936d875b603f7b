"""The abilities that a worker claims are those of what is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from batchkv_producer.wire.maker import ABILITIES
from batchkv_worker.queue import abilities
from batchkv_worker.queue.worker_record import constant_fields


@pytest.mark.parametrize("missing", ["llguidance", "numpy", None])
def test_a_worker_without_the_library_does_not_claim_grammars(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    """Everything else it claims; with the library, all that this version knows."""

    def found(name: str) -> object:
        return None if name == missing else find_spec("json")

    monkeypatch.setattr(abilities, "find_spec", found)
    abilities.own_abilities.cache_clear()
    try:
        claimed = constant_fields()["bkv_abilities"].split()
    finally:
        monkeypatch.undo()
        abilities.own_abilities.cache_clear()
    wanted = [name for name in ABILITIES if name != "grammar" or missing is None]
    assert claimed == wanted and "fields" in claimed

"""A worker whose llguidance does not load claims no grammars, and says so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from batchkv_producer.doctor.contract import Level
from batchkv_producer.wire.maker import ABILITIES, GRAMMAR
from batchkv_worker.doctor.device import grammars_verdict
from batchkv_worker.engine.grammar import available
from batchkv_worker.queue.abilities import log_missing, own_abilities


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found before, and what a test finds, is forgotten."""
    available.why_not.cache_clear()
    yield
    available.why_not.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_worker_that_has_it_claims_all(caplog: pytest.LogCaptureFixture) -> None:
    """No word is lost about it, and doctor names its version."""
    assert own_abilities() == ABILITIES
    log_missing()
    assert not caplog.records
    assert grammars_verdict().level is Level.OK and "llguidance 1." in grammars_verdict().found


@pytest.mark.usefixtures("fresh")
def test_a_worker_that_cannot_load_it_leaves_such_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ability is not claimed; the log at the start and doctor say why."""
    monkeypatch.setitem(sys.modules, available.LIBRARY, None)  # importing it raises ImportError
    assert own_abilities() == tuple(name for name in ABILITIES if name != GRAMMAR)
    with caplog.at_level(logging.WARNING, "batchkv.worker"):
        log_missing()
    assert "left to other workers" in caplog.text and "cannot be loaded" in caplog.text
    verdict = grammars_verdict()
    assert verdict.level is Level.WARN and "cannot be loaded" in verdict.found and verdict.todo

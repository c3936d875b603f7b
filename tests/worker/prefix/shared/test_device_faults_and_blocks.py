"""A device that fails while blocks wait to be sent: others get no block that may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkv_cache_store.lease import LocalLeases
from batchkv_worker.engine.engine import Engine
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.prefix.shared.client import StoreClient
from batchkv_worker.prefix.shared.outbox import Outbox
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from worker.engine.test_device_faults import TIMEOUT
from worker.engine.test_oom import failing
from worker.prefix.engines_on_store import (
    access,
    eventually,
    on_disk,
    random_prompt,
    run,
    running,
)


def outbox_of(engine: Engine) -> Outbox:
    assert isinstance(engine.client, StoreClient)
    return engine.client.outbox


def test_a_failed_device_is_noticed_where_a_block_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX reports it once. Whoever ignored it would serve what the device has not computed."""
    monkeypatch.setattr(Outbox, "_settle", failing(Outbox._settle, {1}, TIMEOUT))
    leases = LocalLeases()
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        expected = run(engine, [random_prompt(5, 700)])
        assert engine._recovery.num_device_faults == 1
        assert len(expected[0].token_ids) == 8
        eventually(lambda: not leases.held())


def test_an_engine_that_ends_by_a_failed_device_sends_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that it has computed last may be wrong, and others would take them."""
    monkeypatch.setattr(Outbox, "send", lambda *_, **__: None)  # they wait
    with (
        pytest.raises(RuntimeError, match="GPU Timeout"),
        running(tiny_models.build("llama"), access(on_disk(tmp_path))) as engine,
    ):
        monkeypatch.setattr(DecodeSlots, "end_step", failing(DecodeSlots.end_step, {1, 3}, TIMEOUT))
        try:
            run(engine, [random_prompt(5, 700)])
        finally:
            monkeypatch.undo()
            assert len(outbox_of(engine)) == 0


def test_blocks_that_cannot_be_read_at_the_end_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine closes all the same, and lets its leases go."""
    leases = LocalLeases()
    with running(tiny_models.build("llama"), access(on_disk(tmp_path), leases)) as engine:
        engine.submit_row(Row("0", random_prompt(5, 700), Generation(400, temperature=0.0)))
        monkeypatch.setattr(Outbox, "_settle", failing(Outbox._settle, {1}, TIMEOUT))
        with monkeypatch.context() as patch:
            patch.setattr(Outbox, "send", lambda *_, **__: None)
            while not len(outbox_of(engine)):
                engine.step()
    assert len(outbox_of(engine)) == 0 and not leases.held()

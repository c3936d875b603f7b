"""Prefixes that another worker has computed: every full block, and the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkv_worker.engine.engine import Engine
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models
from worker.prefix.engines_on_store import (
    access,
    cached,
    finish,
    on_disk,
    random_prompt,
    run,
    running,
    tokens,
)

# One of each way of keeping a cache; the others differ in sizes.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2", "deepseek_v3", "gemma3n")
SCHEMES = ("float", "affine8", "turbo4")
# Each family in two schemes, each scheme with four or five families.
CELLS = [
    (family, SCHEMES[(number + more) % 3])
    for number, family in enumerate(FAMILIES)
    for more in (0, 1)
]


def test_rows_share_blocks_only_with_rows_of_their_salt(tmp_path: Path) -> None:
    """Within a worker and through the store: another salt, or none, finds nothing."""
    model = tiny_models.build("llama")
    shared = random_prompt(1, 770)

    def salted(engine: Engine, *salts: str | None) -> list[int]:
        found = []
        for salt in salts:  # one after the other
            row = Row("0", shared, Generation(4, temperature=0.0), cache_salt=salt)
            engine.submit_row(row)
            found += finish(engine, 1)
        assert len(set(tokens(found))) == 1
        return cached(found)

    with running(model, access(on_disk(tmp_path))) as engine:
        assert salted(engine, "a", "b", None, "a", "b", None) == [0, 0, 0, 768, 768, 768]
    with running(model, access(on_disk(tmp_path))) as engine:
        assert salted(engine, "c", "b", None, "a") == [0, 768, 768, 768]


@pytest.mark.few(5)
@pytest.mark.parametrize(("family", "scheme"), CELLS)
def test_a_second_worker_takes_every_full_block(family: str, scheme: str, tmp_path: Path) -> None:
    """What one engine computed is a hit in another: all full blocks, the same tokens as cold."""
    model = tiny_models.build(family)
    shared = random_prompt(1, 514)
    other = [*shared[:512], *random_prompt(2, 40)]
    with running(model, None, scheme) as engine:
        cold = run(engine, [other])
    with running(model, access(on_disk(tmp_path)), scheme) as engine:
        first = run(engine, [shared])
        assert cached(first) == [0]
    with running(model, access(on_disk(tmp_path)), scheme) as engine:
        second = run(engine, [other])
        counters = engine.client.counters
    assert cached(second) == [512]
    (event,) = second
    assert event.note is not None and event.note.found == 2
    assert event.note.tiers == (("disk", 2),)
    assert tokens(second) == tokens(cold)
    assert not [name for name in counters if name.startswith(("rejected", "error", "unlike"))]

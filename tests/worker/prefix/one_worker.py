"""A worker's process in small: engines of several models over a disk of its own and a shared Redis.

``python -m worker.prefix.one_worker answer DISK URL SEED`` runs a prompt of each model and prints
one line of JSON for each: the model, its cached tokens, its answer. ``... stall DISK URL`` computes
the first blocks of one long prompt, says so, and then stands still, holding its leases.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

from batchkv_cache_store.lease import RedisLeases  # noqa: E402
from batchkv_cache_store.tiers.disk import DiskTier  # noqa: E402
from batchkv_cache_store.tiers.redis import RedisTier  # noqa: E402
from batchkv_worker.prefix.shared.access import Access  # noqa: E402
from batchkv_worker.sequence import Generation  # noqa: E402
from batchkv_worker.sequence import Sequence as Row  # noqa: E402
from parity.few import RUNS_ALL  # noqa: E402
from support import tiny_models  # noqa: E402
from worker.prefix.engines_on_store import access, random_prompt, run, running  # noqa: E402

GIB = 2**30
FAMILIES = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3")
SCHEMES = ("float", "affine8", "turbo4")
# Every family and every scheme; in the long form each family in two schemes.
CELLS = tuple(
    (family, SCHEMES[(number + more) % 3])
    for number, family in enumerate(FAMILIES)
    for more in range(2 if RUNS_ALL else 1)
)
SHARED = random_prompt(1, 1024)
COMMON = SHARED[:512]
LEASE_SECONDS = 2.0


def way(disk: str, url: str) -> Access:
    tiers = [DiskTier(Path(disk), GIB), RedisTier(url, GIB)]
    return access(tiers, RedisLeases(url, LEASE_SECONDS), is_shared=True)


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def prompt_of(seed: int) -> list[int]:
    """Two blocks that all have in common, and tokens of its own."""
    return [*COMMON, *random_prompt(seed, 40)]


def answer(disk: str, url: str, seed: int) -> None:
    """One prompt behind the common blocks in each of ``CELLS``."""
    for family, scheme in CELLS:
        with running(tiny_models.build(family), way(disk, url), scheme) as engine:
            (ended,) = run(engine, [prompt_of(seed)])
        tell(json.dumps([family, scheme, ended.usage.cached, list(ended.token_ids)]))


def stall(disk: str, url: str) -> None:
    """Two chunks of a prompt, written to the shared tier; then this process is of no more use."""
    with running(tiny_models.build("llama"), way(disk, url), chunk_tokens=256) as engine:
        row = Row("0", [*SHARED, 1], Generation(4, temperature=0.0))
        engine.submit_row(row)
        compute: Any = engine._prefill._compute_chunk
        done = []

        def one_chunk(group: Any) -> None:
            if len(done) == 2:
                engine.client.outbox.send(is_idle=True)
                engine.client.flush(30)
                tell("stalled")
                time.sleep(600)
            done.append(compute(group))

        engine._prefill._compute_chunk = one_chunk
        while True:
            engine.step()


if __name__ == "__main__":
    if sys.argv[1] == "stall":
        stall(*sys.argv[2:4])
    else:
        answer(sys.argv[2], sys.argv[3], int(sys.argv[4]))

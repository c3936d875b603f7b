"""A prefix that is stored and read back gives the tokens that it gives when it is computed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.doctor.contract import Verdict, fail, ok, warn

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine
    from batchkv_worker.events import Completed

NUM_BLOCKS = 3
NUM_TAIL = 24  # tokens of a prompt behind its last full block
NUM_TOKENS = 16  # to generate
STORED_SECONDS = 30.0  # for the writer's thread
ROW_SECONDS = 300.0
NEAR = 0.1  # nats between the two likeliest tokens: rounding may exchange them


def verdict(engine: Engine, folder: Path) -> Verdict | None:
    """Compute, store, forget, read back, compare. None for a model with too short a context."""
    num_blocks = min(NUM_BLOCKS, (engine.loaded.context - NUM_TAIL - NUM_TOKENS) // BLOCK_TOKENS)
    if num_blocks < 1:
        return None
    prompt = numbers(engine.loaded.vocabulary, num_blocks * BLOCK_TOKENS + NUM_TAIL)
    (cold,) = answers(engine, [prompt])
    if not wait_for_files(folder, num_blocks):
        return warn(
            "no block of this model was stored",
            "share prefixes in memory only, or use a KV scheme of fewer bytes: see docs/cache.md",
        )
    engine.prefixes.clear()
    (hit,) = answers(engine, [prompt])
    engine.prefixes.clear()
    return judge(cold, hit, num_blocks * BLOCK_TOKENS)


def numbers(vocabulary: int, count: int) -> list[int]:
    """Any tokens; the same each time."""
    rng = random.Random(5)
    return [rng.randrange(vocabulary) for _ in range(count)]


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[Completed]:
    """Greedy answers, in the prompts' order. RuntimeError when a row does not end."""
    from batchkv_worker.events import Completed
    from batchkv_worker.sequence import Generation
    from batchkv_worker.sequence import Sequence as Row

    for index, prompt in enumerate(prompts):
        generation = Generation(NUM_TOKENS, temperature=0.0, logprobs=2)
        engine.submit_row(Row(str(index), list(prompt), generation))
    ended: dict[str, Completed] = {}
    deadline = time.monotonic() + ROW_SECONDS
    while not engine.is_idle:
        if time.monotonic() > deadline:
            raise RuntimeError("the engine does not come to an end")
        for event in engine.step():
            if not isinstance(event, Completed):
                raise RuntimeError(f"a row was refused: {event}")
            ended[event.job_id] = event
    return [ended[str(index)] for index in range(len(prompts))]


def wait_for_files(folder: Path, count: int) -> bool:
    """Whether so many blocks come to lie in the store, and no more are written."""
    deadline = time.monotonic() + STORED_SECONDS
    before = -1
    while time.monotonic() < deadline:
        found = sum(1 for path in folder.rglob("*.kv") if path.is_file())
        found += sum(1 for path in folder.rglob("*.window") if path.is_file())
        found += sum(1 for path in folder.rglob("*.state") if path.is_file())
        if found >= count and found == before:
            return True
        before = found
        time.sleep(0.05)
    return before > 0


def judge(cold: Completed, hit: Completed, num_stored: int) -> Verdict:
    """The same tokens, or a difference where two tokens are about equally likely."""
    if not hit.usage.cached:
        return warn(
            "the stored prefix was not read back",
            "see `batchkv cache why`; loading may be slower than computing here",
        )
    place = first_difference(cold.token_ids, hit.token_ids)
    shown = f"{hit.usage.cached:,} of {num_stored:,} stored tokens were read back"
    if place is None:
        return ok(f"{shown}, and the answer is the same")
    lead = lead_at(cold, place)
    if lead is not None and lead < NEAR:
        return ok(
            f"{shown}; token {place + 1} of the answer differs, where two are about equally likely"
        )
    return fail(
        f"{shown}, and the answer differs from token {place + 1} on",
        "do not use the cache with this model on this machine, and report it",
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place at which two answers differ; None if they are equal."""
    if tuple(left) == tuple(right):
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def lead_at(answer: Completed, place: int) -> float | None:
    """By how much the likeliest token led at a place, in nats; None if it is not known."""
    if not answer.logprobs or place >= len(answer.logprobs):
        return None
    top = sorted((value for _, value in answer.logprobs[place].top), reverse=True)
    return top[0] - top[1] if len(top) > 1 else None

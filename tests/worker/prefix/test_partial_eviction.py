"""Partial blocks in a small memory, and of rows that leave their slots or are cancelled."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.prefix.engines_on_store import (
    behind,
    cached,
    finish,
    random_prompt,
    run,
    running,
    tokens,
)


def test_a_block_whose_beginning_served_stays_longer() -> None:
    """Its beginning was used, and the next block takes the room of one that was not."""
    model = tiny_models.build("llama")
    first, second, third = (random_prompt(seed, 300) for seed in (1, 2, 3))
    with running(model, None) as engine:
        block_bytes = engine.prefixes.block_bytes
    with running(model, None, prefix_bytes=2 * block_bytes) as engine:
        for prompt in (first, second, [*first[:200], 1], third):
            run(engine, [prompt])
        assert cached(run(engine, [first[:200], second[:200]])) == [192, 0]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_block_after_the_common_ones_goes_first_unless_its_beginning_is_wanted(
    is_waited_for: bool,
) -> None:
    """Older blocks go before it if a row waits for 64 of its tokens, and else after it."""
    model = tiny_models.build("llama")
    first, waiting = behind(330, 270, 20)
    older, newer = random_prompt(50, 300), random_prompt(51, 300)
    with running(model, None) as engine:
        block_bytes = engine.prefixes.block_bytes
    with running(model, None, prefix_bytes=3 * block_bytes, slots=1) as engine:
        run(engine, [older])
        prompts = [first, newer, waiting][: 2 + is_waited_for]
        for index, prompt in enumerate(prompts):
            row = Sequence(str(index), prompt, Generation(8, temperature=0.0))
            row.num_common = 330 if prompt is first else None
            engine.submit_row(row)
        found = cached(finish(engine, len(prompts)))
        assert found == ([0, 0, 320] if is_waited_for else [0, 0])
        assert cached(run(engine, [older])) == [0 if is_waited_for else 256]


def test_the_end_of_a_prompt_stays_while_rows_wait_for_it() -> None:
    """Of other prompts there are blocks enough to fill the memory, which nobody waits for."""
    model = tiny_models.build("llama")
    first, *later = behind(150, 20, 21, 22)
    with running(model, None) as engine:
        block_bytes = engine.prefixes.block_bytes
    with running(model, None, prefix_bytes=2 * block_bytes, slots=1) as engine:
        others = [random_prompt(seed, 300) for seed in range(50, 56)]
        assert cached(run(engine, [first, *others, *later])) == [*[0] * 7, 144, 144]
        assert len(engine.prefixes.eviction) == 0


def test_blocks_of_rows_that_were_computed_again_serve() -> None:
    """A block may hold tokens of an answer. Other rows begin with its beginning all the same."""
    model, (first, second) = tiny_models.build("llama"), behind(190, 10, 30)
    end_step, calls = DecodeSlots.end_step, count(1)

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 70:
            raise RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
        return end_step(*args, **options)

    with running(model, None) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeSlots, "end_step", failing)
        run(engine, [first], 100)
        assert len(engine.prefixes) == 1
        assert cached(run(engine, [second])) == [176]


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5])
def test_too_little_memory_for_blocks_changes_no_token(num_blocks: int) -> None:
    """Blocks go while rows wait for their beginnings; those rows compute them again."""
    model = tiny_models.build("llama")
    prompts = [p for seed in (0, 100, 200, 300) for p in behind(330, 20, 21, 300, 22, seed=seed)]
    with running(model, None, prefix_bytes=0) as engine:
        expected = tokens(run(engine, prompts))
    with running(model, None) as engine:
        block_bytes = engine.prefixes.block_bytes
    with running(model, None, prefix_bytes=num_blocks * block_bytes) as engine:
        assert tokens(run(engine, prompts)) == expected
        memory = engine.prefixes
        assert memory.num_bytes <= num_blocks * block_bytes
        assert {*memory._partial._keys} <= {*memory._blocks}
        assert {one for found in memory._partial._sources.values() for one in found} <= {
            *memory._blocks
        }


def test_uses_are_counted_down_to_none() -> None:
    """Whatever becomes of a row, it waits for its partial blocks no more."""
    model = tiny_models.build("llama")
    with running(model, None, slots=2) as engine:
        for index, prompt in enumerate(behind(200, 20, 21, 22, 300, 24)):
            engine.submit_row(Sequence(str(index), prompt, Generation(4, temperature=0.0)))
        assert len(engine.prefixes.eviction) > 0
        engine.cancel("4")
        engine.step()
        engine.cancel("0")
        while not engine.is_idle:
            engine.step()
        assert len(engine.prefixes.eviction) == 0


def test_preempted_rows_begin_again() -> None:
    """Too little room for all: rows leave their slots and come back, with the same tokens."""
    model = tiny_models.build("llama")
    prompts = behind(150, 30, 20, 33, 40, 25, 38)
    with running(model, None, prefix_bytes=0) as engine:
        expected = tokens(run(engine, prompts, 80))
        per_token = engine.bytes_per_token
    small = {"memory_bytes": 2300 * per_token, "chunk_tokens": 256}
    with running(
        model, None, **small, prefix_bytes=3 * 256 * per_token, admission="optimistic"
    ) as engine:
        engine._scheduler.output_lengths._recent.extend([4] * 32)
        assert tokens(run(engine, prompts, 80)) == expected
        assert engine._decode_rows.num_preempted > 0
        assert len(engine.prefixes.eviction) == 0


def test_a_replay_that_was_preempted_uses_no_partial_block() -> None:
    """It repeats its row without the cache."""
    prompt = random_prompt(1, 300)
    row = Sequence("0", prompt, Generation(8))
    replay = Sequence("replay of 0", prompt, Generation(8), replay_of=row)
    with running(tiny_models.build("llama"), None) as engine:
        run(engine, [prompt])
        engine._decode_rows.extend_keys([row, replay])
        assert engine.prefixes.num_cached(row) == 256
        assert engine.prefixes.num_cached(replay) == 0 and replay.partial_keys == []

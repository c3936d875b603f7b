"""Shared prefixes that extend others: whole engines over prompts that branch repeatedly."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest

from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.engine.schedule.prefix_split import PrefixCosts
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.generic import GenericBackend
from parity.matrix import RUNS_ALL
from worker.kv.attention.test_shared_prefix import (
    BLOCK,
    bytes_held,
    check_same,
    engine_of,
    unshared_first,
)
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import x86

Shape = tuple[int, ...]  # tokens that a chain of shared prefixes holds, each for itself


def tree() -> dict[str, list[int]]:
    """A prompt for all; two tasks behind it; examples behind one of them; and rows behind each."""
    everyone = random_prompt(1, 2 * BLOCK)
    tasks = [everyone + random_prompt(2 + n, BLOCK) for n in range(2)]
    examples = tasks[0] + random_prompt(4, BLOCK)
    found = {}
    for n in range(7):
        found[f"everyone {n}"] = everyone + random_prompt(10 + n, 3 + 11 * n)
        found[f"first {n}"] = tasks[0] + random_prompt(20 + n, 2 + 7 * n)
        found[f"second {n}"] = tasks[1] + random_prompt(30 + n, 9 + n)
        found[f"example {n}"] = examples + random_prompt(40 + n, 2 + 5 * n)
    found["exact"] = examples  # its last token is fed by the first step
    found["alone"] = random_prompt(50, 30)
    return found


ALL: set[Shape] = {(2 * BLOCK,), (2 * BLOCK, BLOCK), (2 * BLOCK, BLOCK, BLOCK)}


def grown(family: str, scheme: str, most: int = 4, **changes: Any) -> Crowd:
    """An engine that holds a block for three rows, on whatever it stands."""
    crowd = engine_of(family, scheme, **changes)
    crowd.engine._scheduler._prefix_costs = PrefixCosts(2 * BLOCK, 2 * BLOCK, most)
    return crowd


def in_blocks(shapes: set[Shape]) -> set[Shape]:
    """With whole blocks for parts of them: what "exact" shares ends 16 tokens before a block."""
    return {tuple(-(-part // BLOCK) * BLOCK for part in shape) for shape in shapes}


def shapes_of(crowd: Crowd) -> set[Shape]:
    leaves = crowd.engine._slots.layouts.prefixes.values()
    return {tuple(held.num_own for held in leaf.chain) for leaf in leaves}


def run(crowd: Crowd, late: int = 5) -> set[Shape]:
    """Add the tree's rows, some of them later, and run; the chains that were in use."""
    rows = list(tree().items())
    random.Random(3).shuffle(rows)
    seen: set[Shape] = set()
    for index, (name, prompt) in enumerate(rows):
        if index >= len(rows) - late:
            crowd.step()
            seen |= shapes_of(crowd)
        crowd.add(name, prompt, count=2 + index % 5, logprobs=2)
    while not crowd.engine.is_idle:
        crowd.step()
        seen |= shapes_of(crowd)
        crowd.engine.check_integrity()
    assert len(crowd.ended) == len(rows)
    return seen


CELLS: list[tuple[str, str, Path]] = [
    ("llama", "float", "folded"),
    ("llama", "affine8", "packed"),
    ("gemma3_text", "float", "fused"),
    ("gpt_oss", "float", "folded"),  # with sinks
    ("qwen3_next", "float", "folded"),
    ("qwen3_next", "affine8", "fused"),
    ("llama", "turbo3.5", "spread-packed"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "scheme", "path", "copies"),
    [
        pytest.param(*cell, copies, id=f"{'-'.join(cell)}-{'copies' if copies else 'parts'}")
        for number, cell in enumerate(CELLS)
        for copies in ((False, True) if RUNS_ALL or not number else (number % 2 == 1,))
    ],
)
def test_rows_of_a_tree(family: str, scheme: str, path: Path, copies: bool) -> None:
    """Tokens are those without shared prefixes, with chunks computed as on a CPU or as on a GPU."""
    crowd = grown(family, scheme, path=path, backend=GenericBackend() if copies else x86())
    expected = unshared_first(crowd, run)
    assert in_blocks(run(crowd)) >= ALL
    check_same(crowd, expected, scheme)
    assert not crowd.engine._slots.layouts.all_prefixes


@pytest.mark.parametrize("most", [1, 2, 3])
def test_chains_are_as_long_as_they_may_be(most: int) -> None:
    crowd = grown("llama", "float", most)
    expected = unshared_first(crowd, run)
    assert max(map(len, run(crowd))) == most
    check_same(crowd, expected, "float")


def test_the_switch_reaches_the_scheduler() -> None:
    crowd = engine_of("llama", "float", max_parts=2)
    costs, shapes = crowd.engine._scheduler._prefix_costs, crowd.engine.plan.shapes
    assert costs == PrefixCosts(768, 768 + shapes.group_cost, 2)


def test_what_is_shared_is_held_once() -> None:
    """While all rows of the tree are in slots, each of its parts stands there once."""
    crowd = grown("llama", "float", slots=24)
    for name, prompt in tree().items():
        crowd.add(name, prompt, count=60)
    most: dict[bytes, int] = {}
    while len(most) < 4:
        crowd.step()
        held = crowd.engine._slots.layouts.all_prefixes
        most = max(most, {key: one.num_own for key, one in held.items()}, key=len)
    assert sorted(most.values()) == [BLOCK - 16, BLOCK, BLOCK, 2 * BLOCK]
    per_token = crowd.engine.plan.costs.per_token
    held = crowd.engine._slots.layouts.all_prefixes
    arrays = {id(array): array for one in held.values() for array in one.arrays}
    assert sum(array.nbytes for array in arrays.values()) == (5 * BLOCK - 16) * per_token


def test_a_prefix_lives_as_long_as_what_stands_on_it() -> None:
    """And no longer: the last row of a branch lets go of the branch, the last of all of all."""
    crowd = grown("llama", "float", slots=24)
    names = {"everyone": 5, "first": 20, "second": 10}
    for name, prompt in tree().items():
        kind = name.split()[0]
        if kind in names:
            crowd.add(name, prompt, count=names[kind])
    seen: list[set[int]] = []
    held: list[Any] = []
    while not crowd.engine.is_idle:
        crowd.step()
        prefixes = crowd.engine._slots.layouts.all_prefixes
        if len(prefixes) > len(held):
            held = [weakref.ref(one) for one in prefixes.values()]
        sizes = {one.num_tokens for one in prefixes.values()}
        if not seen or seen[-1] != sizes:
            seen.append(sizes)
        del prefixes
    assert {2 * BLOCK, 3 * BLOCK} in seen
    gc.collect()
    assert len(held) == 3 and [ref() for ref in held] == [None] * 3


def test_rows_of_a_tree_leave_and_come_back() -> None:
    """With too little memory for all answers, rows are parked with their prefixes and go on."""
    whole = grown("llama", "float")
    expected = unshared_first(whole, run)
    costs = whole.engine.plan.costs
    crowd = grown(
        "llama",
        "float",
        slots=24,
        prefix_bytes=8 * BLOCK * costs.per_new_token,
        memory_bytes=(8 + 18) * BLOCK * costs.per_new_token,
    )
    for name in tree():  # short answers, so that long ones are not reckoned with
        crowd.add(f"{name} before", random_prompt(9, 5), count=2)
    crowd.drain()
    rows = {name: prompt for name, prompt in tree().items() if name[:3] in ("fir", "sec")}
    for name, prompt in rows.items():
        crowd.add(name, prompt, count=230 if name[-1] == "0" else 260)
    most = parked = 0
    while not crowd.engine.is_idle:
        crowd.step()
        crowd.engine.check_integrity()
        most = max(most, *map(len, shapes_of(crowd)), 0)
        waiting = crowd.engine._scheduler.waiting
        parked = max([parked, *(row.num_shared for row in waiting if row.parked)])
        assert bytes_held(crowd) <= crowd.engine.config.memory_bytes
    assert most >= 2
    assert parked >= 3 * BLOCK  # after a shared prefix that extends another
    for name in rows:
        start = expected[name].token_ids
        assert crowd.ended[name].token_ids[: len(start)] == start, name


def test_a_row_that_comes_back_grows_no_prefix() -> None:
    """It has its tokens as it left, whatever others wait for by now."""
    crowd = grown("llama", "float", slots=24)
    prefix = random_prompt(1, 2 * BLOCK)
    crowd.add("before", [*prefix, 1, 2], count=1)
    crowd.drain()
    for number in range(6):
        crowd.add(str(number), prefix + random_prompt(2 + number, 9), count=3)
    row = next(iter(crowd.engine._scheduler.waiting))
    grow = crowd.engine._decode_rows._leaders_prefix
    group = PrefillGroup([row])
    found = grow(row, group)
    assert found is not None and found.num_tokens == 2 * BLOCK
    row.parked = b"row"
    assert grow(row, group) is None
    row.parked = b""
    crowd.drain()


def test_what_a_group_was_computed_behind_is_grown_on() -> None:
    """A shared prefix that no slot holds yet: its leader and its followers use the same one."""
    crowd = grown("llama", "float", slots=24, chunk_tokens=2048)
    first = random_prompt(1, 2 * BLOCK)
    second = first + random_prompt(2, BLOCK)
    crowd.add("before", [*first, 1, 2], count=1)
    crowd.drain()
    rows = {f"deep {n}": second + random_prompt(10 + n, 60) for n in range(6)}
    rows |= {f"flat {n}": first + random_prompt(30 + n, 270) for n in range(10)}
    for name, prompt in rows.items():
        crowd.add(name, prompt, count=9)
    seen: set[Shape] = set()
    while not crowd.engine.is_idle:
        crowd.step()
        crowd.engine.check_integrity()  # one object for each key
        seen |= shapes_of(crowd)
    assert seen == {(2 * BLOCK,), (2 * BLOCK, BLOCK)}
    crowd.check_alone("deep 0", "deep 4", "flat 3")


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_with_rows_that_are_cancelled(seed: int) -> None:
    """Prompts that part anywhere, in blocks or between, small memories of prefixes among them."""
    rng = random.Random(seed)
    texts = [random_prompt(1, 700)]
    for number in range(24):
        text = rng.choice(texts)
        cut = rng.randrange(1, len(text) + 1)
        texts.append(text[:cut] + random_prompt(100 + number, rng.randrange(1, 500)))
    texts += [[*rng.choice(texts), 9, number] for number in range(12)]
    prompts = {str(number): text[:1200] for number, text in enumerate(texts)}
    found = []
    for share in (False, True):
        crowd = grown("llama", "float", slots=9, share=share, chunk_tokens=256)
        dice = random.Random(seed)
        for name, prompt in prompts.items():
            crowd.add(name, prompt, count=1 + dice.randrange(12), logprobs=2)
        gone: set[str] = set()
        while not crowd.engine.is_idle:
            crowd.step()
            crowd.engine.check_integrity()
            if share and len(gone) < 6 and dice.random() < 0.2:
                gone.add(name := dice.choice([*prompts]))
                crowd.engine.cancel(name)
        assert set(crowd.ended) >= set(prompts) - gone
        found.append(crowd)
    check_same(found[1], found[0].ended, "float")

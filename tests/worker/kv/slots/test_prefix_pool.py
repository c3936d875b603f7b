"""The pool of shared prefixes: each part has columns of its own, and parts that stay stay put."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.prefix_pool import SPARE, START_CELLS, PrefixPool, levels_of, pays


def parts_of(*lengths: int) -> dict[int, PrefixPart]:
    """Parts without a parent, by rank."""
    parts = [PrefixPart(bytes([number]), length) for number, length in enumerate(lengths)]
    return {part.rank: part for part in parts}


def check(pool: PrefixPool, parts: dict[int, PrefixPart]) -> None:
    """Each part has as many columns as tokens, and shares none of them."""
    places = pool.places()
    assert places.keys() == parts.keys()
    assert all(places[rank][1] - places[rank][0] == part.num_own for rank, part in parts.items())
    ordered = sorted(places.values())
    assert all(one[1] <= other[0] for one, other in pairwise(ordered))
    assert not ordered or (ordered[0][0] >= 0 and ordered[-1][1] <= pool.capacity)


def test_parts_that_stay_are_not_moved_while_there_is_room() -> None:
    """A new part takes the gap that another has left."""
    pool, parts = PrefixPool(), parts_of(512, 256, 1024)
    pool.hold(parts)
    before, version = pool.places(), pool.version
    check(pool, parts)
    gone = sorted(parts)[1]
    new = {rank: part for rank, part in parts.items() if rank != gone} | parts_of(256)
    pool.hold(new)
    check(pool, new)
    assert pool.version == version
    assert all(pool.places()[rank] == before[rank] for rank in new.keys() & before.keys())
    assert pool.places()[max(new)] == before[gone]


@pytest.mark.parametrize(("tokens", "capacity"), [(64, 64), (320, 512), (512, 512), (576, 1024)])
def test_the_buffer_is_the_smallest_power_of_two(tokens: int, capacity: int) -> None:
    pool = PrefixPool()
    pool.hold(parts_of(tokens))
    assert pool.capacity == capacity


def test_any_history_keeps_parts_apart() -> None:
    """Parts come and go; the buffer grows with them, and gets small again."""
    rng, pool, parts = random.Random(1), PrefixPool(), dict[int, PrefixPart]()
    for _ in range(300):
        for rank in rng.sample(sorted(parts), len(parts) // 2):
            del parts[rank]
        parts |= parts_of(*(64 * rng.randint(1, 36) for _ in range(rng.randint(0, 8))))
        pool.hold(parts)
        check(pool, parts)
        assert pool.capacity <= SPARE * sum(part.num_own for part in parts.values())
    pool.hold({})
    assert pool.capacity == 0


def test_the_state_tells_of_every_change() -> None:
    """Layers copy parts again only when it has changed."""
    pool, parts = PrefixPool(), parts_of(256, 256)
    pool.hold(parts)
    state = pool.state
    pool.hold(dict(parts))
    assert pool.state == state
    pool.hold(dict(list(parts.items())[:1]))
    assert pool.state != state


def test_rows_without_a_part_at_a_depth_have_none() -> None:
    """A level has one place for each row."""
    root = PrefixPart(b"root", 256)
    leaf = PrefixPart(b"leaf", 512, root)
    assert levels_of([leaf.chain, [], root.chain]) == [[root, None, root], [leaf, None, None]]
    assert levels_of([[], []]) == []


def test_many_short_prefixes_pay_and_one_long_one_does_not() -> None:
    """Products start kernels for each prefix; the kernel reads a prefix for each row."""
    assert pays([512] * 64, 8)
    assert pays([1024] * 62, 1)
    assert not pays([8192] * 64, 1)
    assert not pays([], 0)
    assert pays([START_CELLS], 1) and not pays([START_CELLS + 1], 1)

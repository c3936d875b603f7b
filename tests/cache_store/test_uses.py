"""Uses of blocks: which blocks are written, and which memory keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_cache_store.uses import EvictionOrder, Uses

Chain = tuple[str, ...]


def chain(path: str) -> Chain:
    """Keys of a prompt, each named by its whole prefix: ``ab`` has ``a`` and ``ab``."""
    return tuple(path[: end + 1] for end in range(len(path)))


CHAINS = st.lists(st.text("ab", min_size=1, max_size=5).map(chain), max_size=12)


def test_only_what_others_can_use_is_written() -> None:
    """Blocks to write: those shared in the batch by its producer, or needed by rows that wait."""
    uses: Uses[str] = Uses()
    uses.add(chain("abx"))
    assert uses.num_worth_writing(chain("abcd"), 0) == 2
    assert uses.num_worth_writing(chain("abcd"), 1) == 2
    assert uses.num_worth_writing(chain("abcd"), 3) == 3
    assert uses.num_worth_writing(chain("abcd"), 9) == 4
    uses.remove(chain("abx"))
    assert uses.num_worth_writing(chain("abx"), 0) == 0
    assert len(uses) == 0


def test_what_nobody_knows_of_is_written() -> None:
    """Without a number from the producer, all blocks of a row may be of use."""
    assert Uses[str]().num_worth_writing(chain("abc"), None) == 3


def test_a_row_that_waits_does_not_count_itself() -> None:
    """A row that looks up its prompt while it waits counts as one use itself."""
    uses: Uses[str] = Uses()
    uses.add(chain("abc"))
    assert uses.num_worth_writing(chain("abc"), 0, num_own=1) == 0
    uses.add(chain("ab"))
    assert uses.num_worth_writing(chain("abc"), 0, num_own=1) == 2


def test_a_row_that_leaves_twice_is_a_fault() -> None:
    """Counts never go below zero."""
    uses: Uses[str] = Uses()
    uses.add(chain("ab"))
    uses.remove(chain("ab"))
    with pytest.raises(KeyError):
        uses.remove(chain("ab"))


@given(CHAINS, st.integers(0, 11), st.integers(0, 5))
def test_what_is_written_is_what_is_wanted_or_shared(
    chains: list[Chain], number: int, num_shared: int
) -> None:
    """For any waiting rows, the blocks to write are the first ones: with a use left, or shared."""
    if not chains:
        return
    uses: Uses[str] = Uses()
    for each in chains:
        uses.add(each)
    mine = chains.pop(number % len(chains))
    uses.remove(mine)
    wanted = {key for each in chains for key in each} | set(mine[:num_shared])
    worth = uses.num_worth_writing(mine, num_shared)
    assert list(mine[:worth]) == [key for key in mine if key in wanted]
    assert all(uses.remaining(key) == sum(key in each for each in chains) for key in mine)


def popped(kept: EvictionOrder[str]) -> list[str]:
    """All blocks in the order of eviction."""
    return [kept.pop() for _ in range(kept.num_kept)]


def test_unwanted_blocks_go_first() -> None:
    """A block with uses is evicted after younger blocks without uses."""
    kept: EvictionOrder[str] = EvictionOrder()
    kept.add(["old"])
    for key in ("old", "x", "y"):
        kept.touch([key])
    assert kept.pop() == "x"
    kept.touch(["w"])
    kept.remove(["old"])  # now it was used before w, and after y
    assert popped(kept) == ["y", "w", "old"]


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    """A block is evicted before the blocks that come before it in its chain."""
    kept: EvictionOrder[str] = EvictionOrder()
    kept.touch(chain("abc"))
    assert kept.num_held(chain("abcd")) == 3
    assert popped(kept) == ["abc", "ab", "a"]


def test_ends_that_nobody_begins_with_go_before_all() -> None:
    """Demoted blocks are evicted first, though they came last, but not while a row needs them."""
    kept: EvictionOrder[str] = EvictionOrder()
    kept.touch(chain("xy"))
    kept.touch(chain("abcd"))
    kept.demote(chain("abcd")[2:])
    assert popped(kept) == ["abcd", "abc", "xy", "x", "ab", "a"]
    kept.add(["q"])
    kept.touch(["q"])
    kept.demote(["q"])
    kept.touch(["r"])
    assert popped(kept) == ["r", "q"]


def test_nothing_kept_is_nothing_to_give_up() -> None:
    """``pop`` without blocks raises KeyError, because then the memory has miscounted."""
    kept: EvictionOrder[str] = EvictionOrder()
    kept.touch(["a"])
    kept.clear()
    assert not kept.has("a")
    with pytest.raises(KeyError):
        kept.pop()


@given(CHAINS, st.integers(0, 8), st.randoms(use_true_random=False))
def test_kept_holds_whole_prefixes(chains: list[Chain], room: int, rng: random.Random) -> None:
    """In any order of operations, every block in the order has its predecessors."""
    kept: EvictionOrder[str] = EvictionOrder()
    waiting = list(chains)
    for each in waiting:
        kept.add(each)
    held: set[str] = set()
    while waiting:
        mine = waiting.pop(rng.randrange(len(waiting)))
        kept.remove(mine)
        kept.touch(mine)
        held |= set(mine)
        others = {key for each in chains if each != mine for key in each}
        kept.demote([key for key in mine if key not in others])
        while kept.num_kept > room:
            held.remove(kept.pop())
        assert kept.num_kept == len(held)
        assert all(kept.has(key) for key in held)
        assert all(set(chain(key)) <= held for key in held)


def test_knowing_the_future_beats_recency() -> None:
    """With rows in random order, a memory that knows the next rows has more hits."""
    rng = random.Random(2)
    heads = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(12)]
    jobs = [chain(rng.choice(heads) + f"{number:04}") for number in range(600)]

    def num_hits(lookahead: int) -> int:
        kept: EvictionOrder[str] = EvictionOrder()
        hits = 0
        for job in jobs[:lookahead]:
            kept.add(job)
        for number, job in enumerate(jobs):
            if lookahead:
                kept.remove(job)
                for coming in jobs[number + lookahead : number + lookahead + 1]:
                    kept.add(coming)
            hits += kept.num_held(job)
            kept.touch(job)
            while kept.num_kept > 30:
                kept.pop()
        return hits

    assert num_hits(8) > num_hits(0)

"""Uses of blocks: what is written, what memory keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_cache_store.uses import Kept, Uses

Chain = tuple[str, ...]


def chain(path: str) -> Chain:
    """Keys of a prompt, each named by its whole prefix: ``ab`` has ``a`` and ``ab``."""
    return tuple(path[: end + 1] for end in range(len(path)))


CHAINS = st.lists(st.text("ab", min_size=1, max_size=5).map(chain), max_size=12)


def test_only_what_somebody_wants_is_written() -> None:
    """The prefix that a waiting job shares goes to the store, a prompt's own end does not."""
    uses: Uses[str] = Uses()
    for path in ("abcd", "abx"):
        uses.add(chain(path))
    uses.remove(chain("abcd"))
    assert uses.worth_writing(chain("abcd")) == ("a", "ab")
    uses.remove(chain("abx"))
    assert uses.worth_writing(chain("abx")) == ()
    assert len(uses) == 0


def test_a_job_that_leaves_twice_is_a_fault() -> None:
    """Counts never go below nothing."""
    uses: Uses[str] = Uses()
    uses.add(chain("ab"))
    uses.remove(chain("ab"))
    with pytest.raises(KeyError):
        uses.remove(chain("ab"))


@given(CHAINS, st.integers(0, 11))
def test_what_is_written_is_a_prefix_that_is_wanted(chains: list[Chain], number: int) -> None:
    """Of any backlog: exactly the blocks with a use left, and they are the first ones."""
    if not chains:
        return
    uses: Uses[str] = Uses()
    for each in chains:
        uses.add(each)
    mine = chains.pop(number % len(chains))
    uses.remove(mine)
    wanted = {key for each in chains for key in each}
    assert list(uses.worth_writing(mine)) == [key for key in mine if key in wanted]
    assert all(uses.remaining(key) == sum(key in each for each in chains) for key in mine)


def test_unwanted_blocks_go_first() -> None:
    """A block that is wanted outlives younger ones that nobody wants."""
    uses: Uses[str] = Uses()
    kept = Kept(uses, 3)
    uses.add(["old"])
    assert kept.touch(["old"]) == []
    assert kept.touch(["x", "y"]) == []
    assert kept.touch(["z"]) == ["y"]
    uses.remove(["old"])
    kept.settle(["old"])
    assert kept.touch(["w"]) == ["x"]
    assert "old" in kept


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    """A block is of no use without those before it."""
    kept: Kept[str] = Kept(Uses(), 3)
    assert kept.touch(chain("abcde")) == ["abcde", "abcd"]
    assert kept.num_held(chain("abcde")) == 3
    assert kept.touch(["x"]) == ["abc"]


def test_a_memory_without_room_keeps_nothing() -> None:
    """Zero blocks are allowed, less are not."""
    kept: Kept[str] = Kept(Uses(), 0)
    assert kept.touch(chain("a")) == ["a"]
    with pytest.raises(ValueError, match="-1 blocks"):
        Kept(Uses(), -1)


@given(CHAINS, st.integers(0, 8), st.randoms(use_true_random=False))
def test_kept_never_overflows_and_holds_whole_prefixes(
    chains: list[Chain], room: int, rng: random.Random
) -> None:
    """Whatever comes and goes, sizes add up, and every block that is kept has its predecessors."""
    uses: Uses[str] = Uses()
    kept = Kept(uses, room)
    waiting = list(chains)
    for each in waiting:
        uses.add(each)
        kept.settle(each)
    held: set[str] = set()
    while waiting:
        mine = waiting.pop(rng.randrange(len(waiting)))
        uses.remove(mine)
        kept.settle(mine)
        held |= set(mine)
        held -= set(kept.touch(mine))
        assert len(kept) == len(held) <= room
        assert all(key in kept for key in held)
        assert all(set(chain(key)) <= held for key in held)


def test_knowing_the_future_beats_recency() -> None:
    """In no good order a memory that knows the next jobs hits more than one that does not."""
    rng = random.Random(2)
    heads = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(12)]
    jobs = [chain(rng.choice(heads) + f"{number:04}") for number in range(600)]

    def num_hits(lookahead: int) -> int:
        uses: Uses[str] = Uses()
        kept, hits = Kept(uses, 30), 0
        for number, job in enumerate(jobs):
            uses.remove(job) if lookahead and number else None
            first = 0 if not number else number + lookahead - 1
            for coming in jobs[first : number + lookahead] if lookahead else ():
                uses.add(coming)
                kept.settle(coming)
            if lookahead and not number:
                uses.remove(job)
            kept.settle(job)
            hits += kept.num_held(job)
            kept.touch(job)
        return hits

    assert num_hits(8) > num_hits(0)

"""Load or compute: the measured speeds decide, and unknown speeds are tried."""

from __future__ import annotations

import pytest

from batchkv_cache_store.load_or_compute import Gate, Option

MB = 1_000_000


def options(*tiers: str, num_bytes: int = 10 * MB, num_tokens: int = 256) -> list[Option]:
    """The options of a chain whose blocks are in these tiers, head first."""
    made: list[Option] = []
    sizes: dict[str, int] = {}
    for depth, tier in enumerate(tiers, start=1):
        sizes[tier] = sizes.get(tier, 0) + num_bytes
        made.append(Option(depth * num_tokens, dict(sizes)))
    return made


def measured(tokens_per_second: float = 1000.0, **bytes_per_second: float) -> Gate:
    """A gate with measured speeds; round trips take a millisecond."""
    gate = Gate()
    gate.observe_prefill(1000, 1000 / tokens_per_second)
    for tier, speed in bytes_per_second.items():
        gate.observe_round_trip(tier, 0.001)
        gate.observe_load(tier, 100 * MB, 0.001 + 100 * MB / speed)
    return gate


def test_what_was_never_measured_is_loaded() -> None:
    """Without a prefill rate, or without a tier's speed, the deepest option is chosen."""
    assert Gate().choose(options("redis", "redis")) == 1
    assert measured().choose(options("redis", "redis")) == 1
    assert Gate().choose([]) is None


def test_a_load_must_be_quicker_than_computing() -> None:
    """256 tokens take 256 ms to compute: to load 10 MB pays at 100 MB/s, but not at 30."""
    assert measured(redis=100 * MB).choose(options("redis")) == 0
    assert measured(redis=30 * MB).choose(options("redis")) is None


def test_a_load_must_be_clearly_quicker() -> None:
    """0.95 of the time to compute saves nothing, for a load also costs copies; 0.7 of it does."""
    for speed, is_worth in [(41 * MB, False), (56 * MB, True)]:
        gate = measured(redis=speed)  # 10 MB, against 256 ms
        assert gate.pays("redis", 256, 10 * MB) is is_worth
        assert gate.choose(options("redis")) == (0 if is_worth else None)


@pytest.mark.parametrize("order", ["rest first", "rest last", "rests only"])
def test_short_rests_of_prompts_do_not_make_computing_look_slow(order: str) -> None:
    """512 tokens take 0.32 s, 40 tokens behind a long prefix 1.2 s: only the first tell the speed.

    A worker that never computes more at once goes by what it computes.
    """
    rest, whole = (40, 1.2), (512, 0.32)
    samples = {"rest first": [rest, whole], "rest last": [whole, rest, rest], "rests only": [rest]}
    gate = Gate()
    for num_tokens, seconds in samples[order]:
        gate.observe_prefill(num_tokens, seconds)
    is_short = order == "rests only"
    assert gate.prefill_seconds(1600) == pytest.approx(48.0 if is_short else 1.0)
    gate.observe_load("redis", 10 * MB, 0.17)  # a block that takes 0.16 s to compute
    assert gate.choose(options("redis", "redis")) == (1 if is_short else None)


def test_the_round_trip_counts_once() -> None:
    """One small block is not worth a round trip of a second, but ten are."""
    gate = measured(redis=1000 * MB)
    for _ in range(50):
        gate.observe_round_trip("redis", 1.0)
    assert gate.choose(options("redis", num_bytes=1000)) is None
    assert gate.choose(options(*["redis"] * 10, num_bytes=1000)) == 9


def test_a_slow_tail_is_computed_and_a_fast_head_loaded() -> None:
    """The chain is loaded as far as its tiers save time."""
    gate = measured(disk=1000 * MB, redis=20 * MB)
    assert gate.choose(options("disk", "disk", "redis")) == 1
    assert gate.choose(options("redis", "disk")) is None
    # A slow head pays if enough blocks after it come quickly.
    assert gate.choose(options("redis", *["disk"] * 8)) == 8


def test_a_tier_that_was_refused_is_probed_within_a_share_of_the_time() -> None:
    """A refused step is tried when 1 % of the computed time covers its loss; speeds recover."""
    gate = measured(redis=20 * MB)  # a block takes 0.5 s to load and 0.256 to compute
    chain = options("redis", "redis", "redis")
    choices = [gate.choose(chain) for _ in range(100)]
    tried = [index for index, choice in enumerate(choices) if choice is not None]
    # Each refusal computes for 0.768 s, and a try loses 0.245 s: one in 32.
    assert tried == [31, 63, 95] and {choices[index] for index in tried} == {0}
    for _ in range(40):
        gate.observe_load("redis", 100 * MB, 0.1)
    assert gate.choose(chain) == 2


def test_a_try_that_would_lose_nothing_is_rare_too() -> None:
    """A block loads in 1.05 of the time to compute it. A quarter of the load counts as lost."""
    gate = measured(redis=37.34 * MB)
    chain = options("redis", "redis", "redis")
    tried = [index for index in range(60) if gate.choose(chain) is not None]
    assert len(tried) == 6  # else it were 30


def test_only_the_first_choice_for_a_prompt_earns_a_try() -> None:
    """Later choices for the same prompt do not count as refusals."""
    gate = measured(redis=20 * MB)
    chain = options("redis", "redis", "redis")
    assert {gate.choose(chain, is_first=False) for _ in range(100)} == {None}


def test_averages_move_and_ignore_nothing_loads() -> None:
    """A new sample counts for a fifth; a load of no bytes does not count."""
    gate = Gate()
    gate.observe_load("disk", 0, 5.0)
    assert gate.load_seconds("disk", MB) == 0.0
    gate.observe_load("disk", MB, 1.0)
    gate.observe_load("disk", MB, 2.0)
    assert gate.load_seconds("disk", MB) == pytest.approx(1.2)
    gate.observe_round_trip("disk", 0.5)
    assert gate.load_seconds("disk", 0) == 0.5


def test_a_round_trip_never_makes_a_load_free() -> None:
    """A load that took less than the average round trip still has a speed."""
    gate = Gate()
    gate.observe_round_trip("redis", 1.0)
    gate.observe_load("redis", MB, 0.5)
    assert gate.load_seconds("redis", MB) > 1.0


def test_writes_stand_for_loads_until_one_was_timed() -> None:
    """A tier that was only written to is judged by its writes, less their two round trips."""
    gate = Gate()
    assert gate.pays("far", 256, 1000) is None
    gate.observe_prefill(1000, 1.0)
    assert gate.pays("far", 256, 1000) is None
    gate.observe_round_trip("far", 0.1)
    gate.observe_write("far", 1000, 0.3)  # 0.1 ms a byte, against 1 ms a token
    assert gate.pays("far", 256, 2000) and gate.pays("far", 256, 3000) is False
    assert gate.pays("far", 256, 3000, slowdown=2.0)
    gate.observe_load("far", 1000, 1.1)  # loads are ten times as slow
    assert gate.pays("far", 256, 2000) is False

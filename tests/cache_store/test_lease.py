"""Leases: one holder at a time, which end with their holder and never stop work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_cache_store.lease import PREFIX, Leases, LocalLeases, RedisLeases
from support.redis_server import running_server

KEY, OTHER = b"k" * 32, b"o" * 32
DEADLINE_SECONDS = 20.0
NAME = PREFIX + KEY.hex()


def eventually(is_so: Callable[[], object]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


@pytest.fixture(params=["local", "redis"])
def leases(request: pytest.FixtureRequest) -> Iterator[Leases]:
    """Both kinds."""
    made: Leases = (
        LocalLeases()
        if request.param == "local"
        else RedisLeases(request.getfixturevalue("redis_url"))
    )
    yield made
    made.close()


def test_one_holder_at_a_time(leases: Leases) -> None:
    """A lease excludes others of its key until it is released, and no other key."""
    lease = leases.acquire(KEY)
    assert lease is not None and leases.acquire(KEY) is None
    assert leases.acquire(OTHER) is not None
    leases.release(lease)
    again = leases.acquire(KEY)
    assert again is not None
    leases.release(lease)  # the old holder, once more: it has nothing to release
    assert leases.acquire(KEY) is None and not again.is_lost


def test_a_lease_that_is_being_asked_for_is_not_taken_by_its_own_renewal(redis_url: str) -> None:
    """A renewal between the request of a lease and its reply does not change the reply."""
    with closing(RedisLeases(redis_url)) as leases:
        ask = leases._redis.set

        def renewed_meanwhile(*args: Any, **options: Any) -> Any:
            leases._renew(leases._renewable())
            return ask(*args, **options)

        leases._redis.set = renewed_meanwhile  # type: ignore[method-assign]
        assert leases.acquire(KEY) is not None
        assert [lease.key for lease in leases._renewable()] == [KEY]


def test_a_chain_is_leased_from_its_first_block_on(leases: Leases) -> None:
    """All free leases of a chain at once; none if another holds the first."""
    keys = [bytes([number]) * 32 for number in range(4)]
    assert leases.acquire_chain([]) == []
    other = leases.acquire(keys[2])
    assert other is not None
    held = leases.acquire_chain(keys)
    assert [lease.key for lease in held] == [keys[0], keys[1], keys[3]]
    assert leases.acquire_chain(keys) == [] == leases.acquire_chain(keys[1:])
    leases.release(held[0])
    assert [lease.key for lease in leases.acquire_chain(keys)] == [keys[0]]


def test_a_chain_that_another_worker_computes_is_left_to_it(
    redis_url: str, redis_connection: Redis
) -> None:
    """Leases of a chain that others hold in Redis are not taken, and not held locally either."""
    keys = [bytes([number]) * 32 for number in range(3)]
    with closing(RedisLeases(redis_url)) as first, closing(RedisLeases(redis_url)) as second:
        (held,) = first.acquire_chain(keys[1:2])
        assert [lease.key for lease in second.acquire_chain(keys)] == [keys[0], keys[2]]
        assert first.acquire_chain(keys) == []
        first.release(held)
        assert second.acquire(keys[1]) is not None
    assert not redis_connection.keys(PREFIX + "*")


def test_workers_exclude_each_other(redis_url: str) -> None:
    """Two workers on one Redis: the second gets the lease when the first releases it."""
    with closing(RedisLeases(redis_url)) as first, closing(RedisLeases(redis_url)) as second:
        lease = first.acquire(KEY)
        assert lease is not None and second.acquire(KEY) is None
        first.release(lease)
        assert second.acquire(KEY) is not None


def test_a_lease_is_renewed_while_it_is_held(redis_url: str, redis_connection: Redis) -> None:
    """The holder's thread renews the time to live repeatedly."""
    with closing(RedisLeases(redis_url, ttl_seconds=6.0)) as leases:
        leases.acquire(KEY)
        redis_connection.pexpire(NAME, 100_000)
        eventually(lambda: 0 < redis_connection.pttl(NAME) <= 6000)


def test_a_dead_holders_lease_is_taken_over(redis_url: str, redis_connection: Redis) -> None:
    """A lease without renewals expires; its old holder can neither renew nor release it."""
    redis_connection.set(NAME, "of a worker that died", px=50)
    with closing(RedisLeases(redis_url, ttl_seconds=0.3)) as leases:
        held = []
        eventually(lambda: held or held.extend(filter(None, [leases.acquire(KEY)])) or held)
        (lease,) = held
        redis_connection.set(NAME, "another", px=100_000)  # as after a pause of this process
        eventually(lambda: lease.is_lost)
        leases.release(lease)
        assert redis_connection.get(NAME) == b"another"


def test_a_lease_is_not_held_for_ever(redis_url: str, redis_connection: Redis) -> None:
    """A worker that hangs loses the lease, though its renewing thread still runs."""
    leases = RedisLeases(redis_url, ttl_seconds=0.3, max_hold_seconds=0.5)
    with closing(leases):
        lease = leases.acquire(KEY)
        assert lease is not None
        eventually(lambda: lease.is_lost and not redis_connection.exists(NAME))
        assert leases.acquire(KEY) is not None


def test_closing_releases(redis_url: str, redis_connection: Redis) -> None:
    """A worker that ends releases its leases."""
    leases = RedisLeases(redis_url)
    leases.acquire(KEY)
    assert redis_connection.exists(NAME)
    leases.close()
    assert not redis_connection.exists(NAME)


def test_without_redis_leases_hold_in_the_process(tmp_path: Path) -> None:
    """Without Redis, one process does not compute a block twice; others may."""
    with closing(RedisLeases(f"unix://{tmp_path}/none")) as leases:
        lease = leases.acquire(KEY)
        assert lease is not None and leases.acquire(KEY) is None
        leases.release(lease)
        assert leases.acquire(KEY) is not None


def test_leases_move_into_redis_when_it_is_back() -> None:
    """A lease taken while Redis was down is in Redis soon after, unless another has it by then."""
    with (
        running_server() as server,
        closing(RedisLeases(server.url, ttl_seconds=2.0)) as leases,
        server.connect() as connection,
    ):
        server.stop()
        lost, kept = leases.acquire(OTHER), leases.acquire(KEY)
        assert lost is not None and kept is not None
        server.start()
        connection.set(PREFIX + OTHER.hex(), "another", px=100_000)
        eventually(lambda: connection.exists(NAME) and lost.is_lost)
        assert not kept.is_lost and leases.acquire(KEY) is None


def test_local_leases_end_by_themselves() -> None:
    """In one process, too, a holder that never releases its lease loses it."""
    now = [0.0]
    leases = LocalLeases(max_hold_seconds=10.0, clock=lambda: now[0])
    lease = leases.acquire(KEY)
    assert lease is not None
    now[0] = 9.9
    assert leases.acquire(KEY) is None
    now[0] = 10.1
    again = leases.acquire(KEY)
    assert again is not None and lease.is_lost
    leases.release(lease)
    assert leases.acquire(KEY) is None

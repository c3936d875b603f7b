"""Rows that may kill workers: how many deaths it takes to find them; no other row fails."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil, log2

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.suspects import deaths_until_failed, is_suspect
from batchkv_producer.wire.transitions import MAX_DEATHS, Pulled, Run
from producer.wire.test_transitions import BATCH, QUEUE, House, job_id, line_of

HOLDERS = ("a", "b", "c")


@pytest.fixture
def house(redis_connection: Redis) -> House:
    """Forty rows in the queue."""
    made = House(redis_connection, 40)
    made.submit(0, range(1, 41))
    return made


def pull(house: House, *, room: int = 40, may_be_apart: bool = True, worker: str = "w") -> Run:
    """What a worker takes whose engine has so much room."""
    return house.transitions.pull_run(
        *(QUEUE, worker, room, 60),
        num_begin=room,
        knows_suspects=True,
        may_be_apart=may_be_apart,
    )


def lines(jobs: list[Pulled]) -> list[int]:
    return [line_of(job.lease) for job in jobs]


def field(house: House, line: int, name: str) -> bytes | None:
    return house.connection.hget(redis_keys.job(job_id(line)), name)


def groups(house: House) -> list[list[int]]:
    """The groups of suspects, each by its lines."""
    found: dict[bytes, list[int]] = {}
    for line in range(1, house.total + 1):
        group = field(house, line, "bkv_suspect")
        if group is not None:
            found.setdefault(group, []).append(line)
    return list(found.values())


def lapse_all(house: House) -> None:
    wip = redis_keys.registry("wip", QUEUE)
    for member in house.connection.zrange(wip, 0, -1):
        house.connection.zadd(wip, {member: 1})


class Trial:
    """Workers that die with rows that kill, until the queue is empty."""

    def __init__(self, house: House, killers: Collection[int], room: int, end_first: int) -> None:
        self.house, self.killers, self.room, self.end_first = house, killers, room, end_first
        self.num_deaths = 0
        self.deaths_of = dict.fromkeys(range(1, house.total + 1), 0)
        self.beside_others = dict.fromkeys(range(1, house.total + 1), 0)

    def run(self) -> None:
        while self.house.waiting():
            found = pull(self.house, room=self.room)
            jobs = found.jobs
            assert jobs
            if not set(lines(jobs)) & set(self.killers):
                self.house.finish(jobs)
                continue
            harmless = [job for job in jobs if line_of(job.lease) not in self.killers]
            early = harmless[: self.end_first]
            self.house.finish(early)
            died_with = [job for job in jobs if job not in early]
            self.num_deaths += 1
            for line in lines(died_with):
                self.deaths_of[line] += 1
                self.beside_others[line] += not found.is_apart
            self.house.transitions.reap(QUEUE, "w", 10_000)


@pytest.mark.parametrize("end_first", [0, 1])
@pytest.mark.parametrize("room", [1, 2, 7, 40])
@pytest.mark.parametrize("killer", [1, 23, 40])
def test_one_row_that_kills_is_found_by_halving(
    house: House, killer: int, room: int, end_first: int
) -> None:
    """It alone fails, after about log2 k + 1 deaths of its group of k; all others end ok, and no
    row that was no suspect died with it twice."""
    trial = Trial(house, {killer}, room, end_first)
    trial.run()
    house.heal()
    assert house.outcomes() == {n: "failed" if n == killer else "ok" for n in range(1, 41)}
    num_beside = min(room, 40)
    assert trial.num_deaths <= 1 + ceil(log2(num_beside)) + MAX_DEATHS
    assert trial.num_deaths <= deaths_until_failed(num_beside)
    assert max(trial.beside_others.values()) <= 1


@pytest.mark.parametrize("killers", [(1, 2), (7, 30), (1, 40), (20, 21)])
@pytest.mark.parametrize("end_first", [0, 2])
def test_two_rows_that_kill_are_both_found(
    house: House, killers: tuple[int, int], end_first: int
) -> None:
    """Each costs about log2 k + 1 deaths, in one group or in two."""
    trial = Trial(house, set(killers), 40, end_first)
    trial.run()
    house.heal()
    assert house.outcomes() == {n: "failed" if n in killers else "ok" for n in range(1, 41)}
    assert trial.num_deaths <= 2 * (ceil(log2(40)) + MAX_DEATHS)
    assert max(trial.beside_others.values()) <= 1


def test_the_begun_rows_of_one_death_are_one_group(house: House) -> None:
    """They keep their order and stand before all others; what had not begun is no suspect."""
    house.pull(6, worker="v", num_begin=4)
    house.transitions.reap(QUEUE, "v")
    assert groups(house) == [[1, 2, 3, 4]]
    assert house.waiting() == list(range(1, 41))
    found = pull(house, room=10)
    assert (lines(found.jobs), found.is_apart) == ([1, 2, 3, 4], True)
    found = pull(house, room=3)
    assert (lines(found.jobs), found.is_apart, found.num_passed) == ([5, 6, 7], False, 0)


def test_a_dead_engine_makes_a_group_too(house: House) -> None:
    """``give_back`` of a worker whose engine died counts as ``reap`` of a dead one."""
    jobs = house.pull(5)
    house.transitions.give_back(QUEUE, [job.lease for job in jobs], died=True)
    assert groups(house) == [[1, 2, 3, 4, 5]]
    jobs = pull(house).jobs
    house.transitions.give_back(QUEUE, [job.lease for job in jobs], died=True)
    assert groups(house) == [[1, 2, 3], [4, 5]]
    assert lines(pull(house).jobs) == [1, 2, 3]
    assert lines(pull(house, worker="v").jobs) == [4, 5]


def test_groups_of_two_deaths_stay_apart(house: House) -> None:
    """Rows of another death are taken by another pull, also where they stand in between."""
    for worker in HOLDERS[:2]:
        house.pull(4, worker=worker)
    for worker in HOLDERS[:2]:
        house.transitions.reap(QUEUE, worker)
    assert groups(house) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    queue = redis_keys.queue(QUEUE)
    mixed = [1, 5, 9, 2, 6, 3, 10, 4, 7, 8, *range(11, 41)]
    house.connection.delete(queue)
    house.connection.rpush(queue, *map(job_id, mixed))
    assert lines(pull(house).jobs) == [1, 2, 3, 4]
    assert house.waiting() == [5, 9, 6, 10, 7, 8, *range(11, 41)]
    found = pull(house, may_be_apart=False, room=4)
    assert (lines(found.jobs), found.num_passed) == ([9, 10, 11, 12], 4)


def test_what_ended_in_its_group_is_cleared(house: House) -> None:
    """The last one that was left when the holder died has died alone."""
    house.transitions.give_back(QUEUE, [job.lease for job in house.pull(4)], died=True)
    jobs = pull(house).jobs
    house.finish(jobs[:3])
    house.transitions.reap(QUEUE, "w")
    found = pull(house)
    assert (lines(found.jobs), found.is_apart) == ([4], True)
    assert house.transitions.reap(QUEUE, "w") == (0, 1)


def test_an_orderly_return_is_no_death(house: House) -> None:
    """A worker that stops gives its group back as it was."""
    house.transitions.give_back(QUEUE, [job.lease for job in house.pull(4)], died=True)
    before = groups(house)
    house.transitions.give_back(QUEUE, [job.lease for job in pull(house).jobs])
    assert groups(house) == before == [[1, 2, 3, 4]]


def test_an_end_that_is_nobodys_fault_counts_nothing(house: House) -> None:
    """Who kills workers himself says so; what they held goes back as it was."""
    house.pull(4, worker="v")
    assert house.transitions.reap(QUEUE, "v", is_death=False) == (4, 0)
    assert groups(house) == []
    assert field(house, 1, "bkv_halves") is None


def test_a_lapse_counts_half(house: House) -> None:
    """Once it makes no suspects; twice it does, and a group is halved after two more."""
    house.pull(4)
    lapse_all(house)
    assert house.transitions.reap(QUEUE) == (4, 0)
    assert groups(house) == [] and field(house, 1, "bkv_deaths") is None
    assert lines(pull(house, may_be_apart=False, room=6).jobs) == [1, 2, 3, 4, 5, 6]
    lapse_all(house)
    house.transitions.reap(QUEUE)
    assert groups(house) == [[1, 2, 3, 4]]
    for expected in ([[1, 2, 3, 4]], [[1, 2], [3, 4]]):
        assert lines(pull(house).jobs) == [1, 2, 3, 4]
        lapse_all(house)
        house.transitions.reap(QUEUE)
        assert groups(house) == expected


def test_rows_alone_survive_three_lapses(house: House) -> None:
    """Four halves are two deaths; a known death and two lapses are as many."""
    for ends in (["lapse"] * 4, ["death", "lapse", "lapse"], ["lapse", "death", "lapse"]):
        line = house.waiting()[0]
        house.transitions.give_back(QUEUE, [house.pull(1)[0].lease], died=True)
        for number, end in enumerate(ends, 1):
            assert lines(pull(house).jobs) == [line]
            if end == "lapse":
                lapse_all(house)
            last = (0, 1) if number == len(ends) else (1, 0)
            assert house.transitions.reap(QUEUE, "w" if end == "death" else "") == last


def test_lapses_of_two_holders_make_two_groups(house: House) -> None:
    """Each holder's rows may hold one that kills."""
    for _ in range(2):
        for worker in HOLDERS[:2]:
            house.pull(3, worker=worker)
        lapse_all(house)
        house.transitions.reap(QUEUE)
    assert sorted(groups(house)) == [[1, 2, 3], [4, 5, 6]]


def test_suspects_of_older_versions_run_apart(house: House) -> None:
    """Those with one death are a group; one with more has died alone, and fails at the next."""
    for line, count in ((1, 1), (2, 1), (3, 3), (4, 2), (5, 1)):
        house.connection.hset(redis_keys.job(job_id(line)), "bkv_deaths", count)
    assert lines(pull(house).jobs) == [1, 2, 5]
    assert lines(pull(house, worker="v").jobs) == [3]
    assert house.transitions.reap(QUEUE, "v") == (0, 1)
    assert house.transitions.reap(QUEUE, "w") == (3, 0)
    assert groups(house) == [[1, 2], [5]] or groups(house) == [[1, 2], [3], [5]]
    assert lines(pull(house).jobs) == [1, 2]


def test_older_versions_are_told_of_one_death(house: House) -> None:
    """They fail a row at the fourth: one of a group that died more often would be no culprit."""
    for _ in range(3):
        house.transitions.give_back(
            QUEUE, [job.lease for job in pull(house, room=8).jobs], died=True
        )
    assert [field(house, 1, name) for name in ("bkv_died", "bkv_deaths")] == [b"3", b"1"]
    assert [field(house, 8, name) for name in ("bkv_died", "bkv_deaths")] == [b"2", b"1"]


def test_a_retry_forgets_suspicions(house: House) -> None:
    """A row that failed and is queued again runs beside others."""
    (job,) = house.pull(1)
    for _ in range(MAX_DEATHS + 1):
        house.transitions.give_back(QUEUE, [job.lease], died=True)
        (job, *_) = [*house.pull(1), job]
    house.heal()
    assert house.transitions.retry(BATCH, QUEUE, [1]) == 1
    names = ("bkv_suspect", "bkv_halves", "bkv_died", "bkv_deaths")
    assert [field(house, 1, name) for name in names] == [None] * 4


@pytest.mark.parametrize("value", ["x y", "\xff", "9" * 400, "", "a:b", "..1", "\n"])
@pytest.mark.parametrize("name", ["bkv_suspect", "bkv_halves"])
def test_a_field_that_is_none(house: House, name: str, value: str) -> None:
    """What somebody wrote there makes no suspect, and keeps no row from being taken back."""
    key = redis_keys.job(job_id(1))
    house.connection.hset(key, name, value)
    found = pull(house, room=3)
    assert (lines(found.jobs), found.is_apart) == ([1, 2, 3], False)
    assert not is_suspect(house.connection.hget(key, "bkv_suspect"), None)
    assert house.transitions.reap(QUEUE, "w") == (3, 0)
    assert groups(house) == [[1, 2, 3]]


def test_python_and_lua_agree_who_is_a_suspect(house: House) -> None:
    """A look at the head of the queue sees what the next pull does."""
    for group, deaths in (
        *((group, None) for group in ("old", "old-1.1", "6a-1f-2.1", "-", "a.1", "a.2", "x" * 51)),
        *((None, deaths) for deaths in ("0", "1", "0001", "00001", "12", "-1", "1e3", " 1")),
    ):
        key = redis_keys.job(job_id(1))
        house.connection.hdel(key, "bkv_suspect", "bkv_deaths")
        if group is not None:
            house.connection.hset(key, "bkv_suspect", group)
        if deaths is not None:
            house.connection.hset(key, "bkv_deaths", deaths)
        found = pull(house, room=2)
        raw = house.connection.hmget(key, "bkv_suspect", "bkv_deaths")
        assert found.is_apart == is_suspect(*raw), (group, deaths)
        house.transitions.give_back(QUEUE, [job.lease for job in found.jobs])

"""What workers tell each other of their pace, and how they measure it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_worker.queue.runs.pace import (
    FIRST_ANSWER_TOKENS,
    MIN_BUSY_SECONDS,
    MOST_ROWS,
    MUTE_SECONDS,
    TOKENS_PER_GENERATED,
    Beats,
    Crowd,
    Meter,
    Pace,
    crowd_of,
    decode_pace,
)

PACES = st.builds(
    Pace,
    speed=st.integers(0, 10**6).map(float),
    held=st.integers(0, 10**9).map(float),
    is_away=st.booleans(),
    free_slots=st.integers(0, 500),
    beat=st.integers(0, 10**9),
    answer=st.integers(0, 10**6).map(float),
)


@given(PACES)
def test_a_stored_pace_is_read_as_it_was(pace: Pace) -> None:
    """What is written is read back."""
    assert decode_pace(pace.encode()) == pace


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 2 0", "1 2 0 3", "1 2 0 3 4", "1 2 0 3 4 5 6", "1 2 0 3 x 5", "1 2 0 3 4 x"),
        *("x 2 0 1 4 5", "nan 2 0 1 4 5", "1 inf 0 1 4 5", "-1 2 0 1 4 5", "1 2 2 1 4 5"),
        *("1 2 0 1.5 4 5", "1 2 0 -1 4 5", "1e300 2 0 1 4 5", "1" * 100 + " 2 0 1 4 5"),
        *("1 2 0 1 4.5 5", "1 2 0 1 4 -5", "1 2 0 1 4 nan"),
    ],
)
def test_other_texts_are_no_pace(text: str) -> None:
    """Whatever else is in the hash counts as nothing told."""
    assert decode_pace(text) is None
    crowd = crowd_of("me", Pace(), {"other": text}, ["me", "other"])
    assert crowd == Crowd(Pace(), (), num_silent=1)


def test_only_workers_of_the_queue_count() -> None:
    """A worker that is gone may have left its pace. The own one is not read from there."""
    told = {"me": "9 9 0 9 0 0", "gone": "9 9 0 9 0 0", "here": "4.0 8 0 2 0 0"}
    crowd = crowd_of("me", Pace(2.0, 4.0), told, ["me", "here", "new"])
    assert crowd == Crowd(Pace(2.0, 4.0), (Pace(4.0, 8.0, free_slots=2),), num_silent=1)
    assert crowd.total_speed == 2 + 4 + 3  # the silent one counts as usual
    assert crowd.top_speed == 4
    assert crowd.seconds_left(24.0) == (24 + 4 + 8) / 9


def test_a_worker_that_is_away_takes_no_share() -> None:
    """What it holds still has to be done."""
    crowd = Crowd(Pace(2.0, 4.0), (Pace(8.0, 6.0, is_away=True),))
    assert crowd.total_speed == crowd.top_speed == 2
    assert crowd.seconds_left(0.0) == 5
    assert not crowd.has_hungry(5.0)


def test_who_tells_nothing_new_is_mute() -> None:
    """Each text counts from the moment at which it was seen first."""
    beats = Beats()
    beats.note({"dead": "1 2 0 3 4", "here": "1 2 0 3 4"}, 0.0)
    beats.note({"dead": "1 2 0 3 4", "here": "1 2 0 3 5"}, MUTE_SECONDS)
    assert beats.mute(MUTE_SECONDS) == {"dead"}
    beats.note({"dead": "1 2 0 3 9"}, MUTE_SECONDS)
    assert beats.mute(MUTE_SECONDS) == set()
    dead = {"dead": "8 6 0 3 0 0"}
    beats.note(dead, MUTE_SECONDS)
    crowd = crowd_of("me", Pace(), dead, ["dead"], beats, 2 * MUTE_SECONDS)
    assert crowd.others == (Pace(8.0, 6.0, is_away=True, free_slots=3),)


def test_what_others_have_computed_since_they_told_counts() -> None:
    """What is new was told between two looks: in the middle, on average."""
    beats, told = Beats(), {"full": "10 90 0 0 1 0", "free": "10 90 0 2 1 0"}
    beats.note(told, 100.0)
    assert beats.ages(100.5) == {"full": 0.5, "free": 0.5}
    told["full"] = "10 90 0 0 2 0"
    beats.note(told, 100.5)
    assert beats.ages(101.0) == {"full": 0.75, "free": 1.0}
    told = {"full": "10 90 0 0 3 0", "free": "10 90 0 2 3 0"}
    beats.note(told, 200.0)  # after an outage: each tells its pace once a second
    assert beats.ages(201.0) == {"full": 1.5, "free": 1.5}
    crowd = crowd_of("me", Pace(1.0, 9.0), told, ["me", *told], beats, 201.0)
    free, full = crowd.others
    assert (free.held, full.held) == (90.0, 75.0)  # with free slots it is slower than its speed
    crowd = crowd.later(3.0)
    assert [pace.held for pace in crowd.others] == [90.0, 45.0]
    assert crowd.own.held == 9.0  # that one is known
    assert crowd.later(60.0).others[1].held == 0.0
    assert replace(full, is_away=True).later(9.0).held == 75.0


def test_a_meter_measures_speed_and_rows() -> None:
    """The speed is known after some seconds; old values fade."""
    meter = Meter()
    assert meter.job_work == TOKENS_PER_GENERATED * FIRST_ANSWER_TOKENS
    meter.add_computed(1000, 0, MIN_BUSY_SECONDS / 2, 4)
    assert meter.speed == meter.row_seconds == 0
    meter.add_computed(2000, 0, MIN_BUSY_SECONDS, 4)
    assert meter.speed == pytest.approx(2000 / MIN_BUSY_SECONDS, rel=0.01)
    meter.add_begun(300.0)
    meter.add_answer(10)
    assert meter.job_work == 300 + TOKENS_PER_GENERATED * 10
    for _ in range(600):
        meter.add_computed(100, 0, 1.0, 4)
    assert meter.speed == pytest.approx(100, rel=0.1)
    job_seconds = meter.job_work / meter.speed
    assert meter.row_seconds == pytest.approx(4 * job_seconds), "four at once: Little's law"


def test_a_worker_that_gets_nothing_done_is_slow() -> None:
    """No token was counted for long. It is not taken for a worker of the usual speed."""
    meter = Meter()
    meter.add_begun(6_000.0, 1)
    meter.add_computed(0, 0, 30.0, 1)
    assert meter.speed == meter.job_work / 30


def test_the_work_of_answers() -> None:
    """Before a row has ended: as long as the other workers' answers, and no longer than allowed."""
    meter = Meter()
    meter.add_begun(1.0, 8)
    assert meter.answer_work == TOKENS_PER_GENERATED * 8
    meter.add_begun(1.0, 1_000_000)
    assert meter.answer_work == TOKENS_PER_GENERATED * FIRST_ANSWER_TOKENS
    meter.told_answer = 300.0
    assert meter.answer_work == TOKENS_PER_GENERATED * 300
    meter.add_answer(50)
    assert (meter.answer, meter.answer_work) == (50, TOKENS_PER_GENERATED * 50)


def test_means_are_of_the_last_rows() -> None:
    """Older rows do not count."""
    meter = Meter()
    for number in range(2 * MOST_ROWS):
        meter.add_answer(10 if number < MOST_ROWS else 20)
    assert meter.answer == pytest.approx(20)


@pytest.mark.parametrize(
    ("speeds", "held", "seconds"),
    [
        ((1.0, 1.0), 100, 50.0),  # as many for each
        ((1.0, 1.0), 3, 2.0),  # one of them does two
        ((1.0, 0.2), 3, 3.0),  # the slow one does none
        ((1.0, 0.2), 6, 5.0),  # five and one
        ((1.0, 0.2), 120, 100.0),
    ],
)
def test_whole_jobs_are_done(speeds: tuple[float, ...], held: int, seconds: float) -> None:
    """With few jobs for each worker, the end is that of the last whole job."""
    own, *others = (Pace(speed) for speed in speeds)
    crowd = Crowd(replace(own, held=held), tuple(others))
    assert crowd.seconds_left(0.0, job_work=1.0) == pytest.approx(seconds)


def test_rows_take_longer_on_slow_workers() -> None:
    """The slow one begins its last row earlier by so much, so that it can do less."""
    crowd = Crowd(Pace(1.0, 60.0), (Pace(0.5),))
    assert crowd.seconds_left(0.0) == 40
    assert crowd.lateness(crowd.others[0], row_seconds=6.0) == 6
    assert crowd.seconds_left(0.0, row_seconds=6.0) == 42  # 42 seconds of one, 36 of the other
    assert crowd.seconds_left(0.0, row_seconds=90.0) == 60


def test_the_others_tell_how_long_answers_are() -> None:
    """The mean of those who know it."""
    assert Crowd(Pace()).answer == 0
    assert Crowd(Pace(), (Pace(answer=10.0), Pace(), Pace(answer=30.0))).answer == 20

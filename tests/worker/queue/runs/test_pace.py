"""What workers tell each other of their pace, and how they measure it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_worker.queue.runs.pace import (
    FIRST_ANSWER_TOKENS,
    MIN_BUSY_SECONDS,
    MUTE_SECONDS,
    TOKENS_PER_GENERATED,
    Beats,
    Crowd,
    Meter,
    Pace,
    crowd_of,
    decode_pace,
    prompt_work,
)

PACES = st.builds(
    Pace,
    speed=st.integers(0, 10**6).map(float),
    held=st.integers(0, 10**9).map(float),
    is_away=st.booleans(),
    free_slots=st.integers(0, 500),
    beat=st.integers(0, 10**9),
)


@given(PACES)
def test_a_stored_pace_is_read_as_it_was(pace: Pace) -> None:
    """What is written is read back."""
    assert decode_pace(pace.encode()) == pace


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "1 2 0",
            "1 2 0 3 4 5",
            "1 2 0 3 x",
            "x 2 0 1",
            "nan 2 0 1",
            "1 inf 0 1",
            "-1 2 0 1",
            "1 2 2 1",
        ),
        *("1 2 0 1.5", "1 2 0 -1", "1e300 2 0 1", "1" * 90 + " 2 0 1"),
    ],
)
def test_other_texts_are_no_pace(text: str) -> None:
    """Whatever else is in the hash counts as nothing told."""
    assert decode_pace(text) is None
    crowd = crowd_of("me", Pace(), {"other": text}, ["me", "other"])
    assert crowd == Crowd(Pace(), (), num_silent=1)


def test_only_workers_of_the_queue_count() -> None:
    """A worker that is gone may have left its pace. The own one is not read from there."""
    told = {"me": "9 9 0 9", "gone": "9 9 0 9", "here": "4.0 8 0 2"}
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
    crowd = crowd_of("me", Pace(), {"dead": "8 6 0 3"}, ["dead"], ["dead"])
    assert crowd.others == (Pace(8.0, 6.0, is_away=True, free_slots=3),)


def test_a_meter_measures_speed_and_rows() -> None:
    """The speed is known after some seconds; old values fade."""
    meter = Meter()
    assert meter.job_work == TOKENS_PER_GENERATED * FIRST_ANSWER_TOKENS
    meter.add_computed(1000, 0, MIN_BUSY_SECONDS / 2, 4)
    assert meter.speed == 0
    meter.add_computed(2000, 0, MIN_BUSY_SECONDS, 4)
    assert meter.speed == pytest.approx(2000 / MIN_BUSY_SECONDS)
    meter.add_pulled(300.0)
    meter.add_answer(10)
    assert meter.job_work == 300 + TOKENS_PER_GENERATED * 10
    for _ in range(600):
        meter.add_computed(100, 0, 1.0, 4)
    assert meter.speed == pytest.approx(100, rel=0.1)
    assert meter.row_seconds >= 4 * meter.job_work / 100 * 0.9  # four at once: Little's law


def test_the_work_of_a_prompt() -> None:
    """What it shares is computed already; the work is never nothing."""
    assert prompt_work(400, None) == 100
    assert prompt_work(400, 200) == 50
    assert prompt_work(10, 400) == 1

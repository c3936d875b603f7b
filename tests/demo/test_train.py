"""The training script: batches, schedule and curriculum, and a model small enough to train here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="needs the worker's packages")

import mlx.core as mx
from mlx_lm.utils import load_config
from tokenizers import Tokenizer

from batchkv_worker.demo import MODEL_PATH
from demo_model.batches import ANSWER_TOKENS, Level, draw_batch
from demo_model.curriculum import Curriculum, Plan
from demo_model.train import RoundingCache, model_config

TOKENIZER = MODEL_PATH / "tokenizer.json"
LEVELS = (Level(4, 192, 4, 6), Level(8, 256, 4, 6))


def test_a_batch_marks_its_answers() -> None:
    """From each marked place five tokens follow: four digits and the end of the turn."""
    batch = draw_batch(str(TOKENIZER), LEVELS[0], "seed")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert batch.tokens.shape == (4, 192) and batch.asked.sum() >= 4
    for row, column in np.argwhere(batch.asked):
        place = batch.answers[row, column]
        answer = batch.tokens[row, place + 1 : place + 1 + ANSWER_TOKENS].tolist()
        text = tokenizer.decode(answer, skip_special_tokens=False)
        assert text[:4].isdecimal() and text[4:] == "<|end|>"


def test_a_batch_is_named_by_its_seed() -> None:
    """The same seed draws the same tokens."""
    first, again, other = (draw_batch(str(TOKENIZER), LEVELS[0], seed) for seed in "aab")
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_the_next_level_comes_when_nine_of_ten_are_right() -> None:
    """Good batches of the current level lead on; those of a level already left do not count."""
    course = Curriculum(LEVELS)
    assert not any(course.record(LEVELS[0], 0.8) for _ in range(100))
    assert any(course.record(LEVELS[0], 1.0) for _ in range(20))
    assert course.is_last and course.score == 0.0
    assert not course.record(LEVELS[0], 1.0) and course.score == 0.0


def test_the_rate_rises_then_falls() -> None:
    """The learning rate warms up, holds until half of the plan and ends at a fiftieth."""
    plan = Plan(num_steps=1000, max_seconds=1e9, peak_rate=1.0, warmup_steps=100)
    rates = [plan.learning_rate(step, plan.progress(step, 0.0)) for step in (0, 99, 500, 750, 1000)]
    assert rates == pytest.approx([0.01, 1.0, 1.0, 0.51, 0.02])
    assert plan.progress(0, 2e9) == 1.0


def test_rounding_has_the_error_of_its_bits() -> None:
    """Keys are off by half a step at most, and gradients pass as if nothing were rounded."""
    keys = mx.random.normal((2, 2, 8, 64), key=mx.random.key(0))
    rounded, _ = RoundingCache(mx.array(15.0)).update_and_fetch(keys, keys)
    step = (keys.max(axis=-1) - keys.min(axis=-1)) / 15
    assert (mx.abs(rounded - keys).max(axis=-1) <= step / 2 + 1e-5).all().item()
    slope = mx.grad(lambda x: RoundingCache(mx.array(15.0)).update_and_fetch(x, x)[0].sum())(keys)
    assert (slope == 1).all().item()


def test_the_script_describes_the_shipped_model() -> None:
    """The configuration in the package is the one that the script writes."""
    shipped = load_config(Path(MODEL_PATH))
    assert {name: shipped[name] for name in model_config()} == model_config()

"""The shipped model: small, and right about ledgers it has never seen."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm", reason="needs the worker's packages")

from batchkv_worker.demo import MODEL_PATH
from demo_model.evaluate import Answerer, Cell, draw_cases
from demo_model.skill_cases import SKILLS, draw_skill_cases

MAX_BYTES = 8_000_000
UNSURE = ("the right one of three tools",)  # every second answer is right


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    """The model in float32."""
    return Answerer(MODEL_PATH)


def test_the_model_is_small_enough_to_ship() -> None:
    """The directory holds what mlx-lm loads, in 8 MB at most."""
    files = {path.name: path.stat().st_size for path in MODEL_PATH.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(files.values()) <= MAX_BYTES


def _share_right(answerer: Answerer, cells: tuple[Cell, ...], bits: int | None) -> float:
    """How many of five questions a cell are answered right, 0 to 1."""
    cases = [case for cell in cells for case in draw_cases(cell, 5, seed=1)]
    return sum(answerer.answer(case.messages, bits) == case.code for case in cases) / len(cases)


def test_recalls_facts_of_unseen_ledgers(answerer: Answerer) -> None:
    """At least 95 % of answers are right, with few facts and many, and behind other text."""
    assert _share_right(answerer, (Cell(4, 0), Cell(24, 6), Cell(64, 0)), None) >= 0.95


@pytest.mark.parametrize("bits", [8, 4])
def test_recalls_facts_from_a_quantized_cache(answerer: Answerer, bits: int) -> None:
    """Keys and values of 8 bits, and even of 4, leave at least 95 % of answers right."""
    assert _share_right(answerer, (Cell(16, 0),), bits) >= 0.95


@pytest.mark.parametrize("skill", [skill for skill in SKILLS if skill not in UNSURE])
def test_has_its_skills(answerer: Answerer, skill: str) -> None:
    """Each of two unseen questions about a skill gets the whole answer, letter for letter."""
    for case in draw_skill_cases(skill, 2, seed=1):
        assert answerer.answer_skill(case) == case.answer


def test_any_bytes_give_finite_logits(answerer: Answerer) -> None:
    """Text that is no ledger, emoji included, gives finite numbers."""
    import mlx.core as mx

    text = "".join(chr(code) for code in (*range(1, 400), *range(0x1F300, 0x1F380)))
    ids = answerer.prompt_ids([{"role": "user", "content": text}])
    logits = answerer.model(mx.array(ids)[None])
    assert mx.isfinite(logits).all().item()

"""Penalties and biases of many rows at once, compared with one row at a time in numpy."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.tokens import biases, penalties
from batchkv_worker.engine.tokens.biases import add_biases
from batchkv_worker.engine.tokens.penalties import TokenCounts, penalize
from batchkv_worker.engine.tokens.sampling import sample
from batchkv_worker.sequence import Generation, Sequence
from worker.engine.tokens.logit_reference import expected_logits

VOCABULARY = 67
EDGES = (0, VOCABULARY - 1)


def random_generation(rng: random.Random) -> Generation:
    """Some fields at random; few tokens, so that they repeat and bad words begin."""

    def some(value: Any) -> Any:
        return rng.random() < 0.6 and value

    def words(count: int) -> tuple[tuple[int, ...], ...]:
        lengths = (rng.randrange(1, 5) for _ in range(count))
        return tuple(tuple(token_of(rng) for _ in range(num)) for num in lengths)

    biased = {token_of(rng): rng.uniform(-100, 100) for _ in range(rng.randrange(9))}
    return Generation(
        100,
        temperature=0.0,
        repetition_penalty=some(rng.uniform(0.5, 2)) or 1.0,
        presence_penalty=some(rng.uniform(-2, 2)) or 0.0,
        frequency_penalty=some(rng.uniform(-2, 2)) or 0.0,
        min_tokens=some(rng.randrange(6)) or 0,
        late_tokens=frozenset({5, VOCABULARY - 2}),
        logit_bias=some(tuple(sorted(biased.items()))) or (),
        bad_words=some(words(40)) or (),
    )


def token_of(rng: random.Random) -> int:
    return rng.choice((*EDGES, *range(1, 5), rng.randrange(VOCABULARY)))


class Row:
    """A row with all the tokens that it has, of which its sequence may not know the last."""

    def __init__(self, index: int, rng: random.Random) -> None:
        self.rng = rng
        self.prompt = [token_of(rng) for _ in range(rng.randrange(1, 20))]
        self.output = list[int]()
        self.sequence = Sequence(str(index), self.prompt, random_generation(rng))

    @property
    def newest(self) -> int:
        return (self.prompt + self.output)[-1]

    def advance(self) -> None:
        """Have a token more, and read those before; or lose the newest, which was not read."""
        lost = self.rng.random() < 0.1
        if lost:
            self.output = self.sequence.generated[:]
        else:
            self.output = [*self.output, token_of(self.rng)]
        self.sequence.num_dispatched = len(self.output)
        is_read = lost or self.rng.random() < 0.2
        self.sequence.generated = self.output[:] if is_read else self.output[:-1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_many_rows_are_as_each_alone_in_numpy(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fields at random, over many steps: tokens read late, read at once, and sampled again."""
    monkeypatch.setattr(penalties, "WIDTH_STEP", 8)
    monkeypatch.setattr(biases, "WIDTH_STEP", 2)
    rng = random.Random(3)
    mx.random.seed(3)
    made = [Row(index, rng) for index in range(12)]
    for _ in range(25):
        logits = (4 * mx.random.normal((13, VOCABULARY))).astype(dtype)
        rows: list[Sequence | None] = [*(one.sequence for one in made), None]
        inputs = mx.array([*(one.newest for one in made), 0])
        found = np.array(penalize(add_biases(logits, inputs, rows), inputs, rows))
        tokens = sample(logits, inputs, rows).tokens.tolist()
        plain = np.array(logits.astype(mx.float32))
        assert (found[-1] == plain[-1]).all()
        for index, one in enumerate(made):
            asked = one.sequence.generation
            expected = expected_logits(plain[index], one.prompt, one.output, asked)
            barred = np.isneginf(expected)
            assert (found[index][barred] < -1e15).all()
            np.testing.assert_allclose(found[index][~barred], expected[~barred], 1e-4, 1e-4)
            assert expected[tokens[index]] == pytest.approx(expected.max(), rel=1e-4, abs=1e-4)
            one.advance()


def test_neighbours_change_no_bit() -> None:
    """A row's logits are the same alone and among rows with other fields and many more tokens."""
    rng = random.Random(4)
    mx.random.seed(4)
    made = [Row(index, rng) for index in range(9)]
    made[3].sequence.prompt = [token % VOCABULARY for token in range(2000)]
    for _ in range(6):
        for one in made:
            one.advance()
    logits = mx.random.normal((9, VOCABULARY))
    inputs = mx.array([one.newest for one in made])
    rows: list[Sequence | None] = [one.sequence for one in made]
    together = penalize(add_biases(logits, inputs, rows), inputs, rows)
    for index, one in enumerate(made):
        part = slice(index, index + 1)
        alone = add_biases(logits[part], inputs[part], [one.sequence])
        alone = penalize(alone, inputs[part], [one.sequence])
        assert mx.array_equal(alone[0], together[index]).item()


def test_a_barred_token_comes_only_when_nothing_else_may() -> None:
    """A bad word is not sampled, even with a bias of 100, unless all else is forbidden."""
    asked: dict[str, Any] = {"bad_words": ((1,), (2,)), "logit_bias": ((1, 100.0),)}
    for temperature in (0.0, 1.0, 100.0, 2e-5):
        row = Sequence("x", [1], Generation(9, temperature, repetition_penalty=100.0, **asked))
        inputs = mx.array([1])
        assert sample(mx.array([[0.0, 50.0, 9.0, -80.0]]), inputs, [row]).tokens.item() in (0, 3)
        only = mx.array([[-mx.inf, 50.0, -mx.inf, -mx.inf]])
        assert sample(only, inputs, [row]).tokens.item() == 1


def test_counts_are_kept_from_step_to_step() -> None:
    """Each token is counted once, also beyond the first capacity; a prompt's have the count 0."""
    row = Sequence("x", [7, 7, 3], Generation(9999, repetition_penalty=1.5))
    assert TokenCounts.of(row).size == 2
    row.generated = [*range(1000), 7]
    known = TokenCounts.of(row)
    assert known is TokenCounts.of(row) is row.token_counts
    tokens, counts = known.entries[:, : known.size].tolist()
    assert dict(zip(tokens, counts, strict=True)) == {**dict.fromkeys(range(1000), 1), 7: 2}
    row.generated.append(3)
    assert TokenCounts.of(row).entries[1, tokens.index(3)] == 2
    other = Sequence("y", [7], Generation(9, presence_penalty=1.0))
    assert TokenCounts.of(other).size == 0  # the prompt is of no concern to it

"""Sampling: one call for all rows, the same choice as mlx-lm's samplers."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from batchkv_worker.engine.tokens import sampling
from batchkv_worker.engine.tokens.sampling import sample, uniform
from batchkv_worker.sequence import Generation, Sequence


def row(prompt: list[int] | None = None, dispatched: int = 0, **params: Any) -> Sequence:
    made = Sequence("x", prompt or [1], Generation(max_tokens=100, **params))
    made.num_dispatched = dispatched
    return made


def draws(logits: mx.array, count: int, **params: Any) -> Counter[int]:
    """How often each token is drawn in ``count`` draws of one row's stream."""
    rows: list[Sequence | None] = [row(dispatched=i, **params) for i in range(count)]
    many = mx.broadcast_to(logits, (count, logits.shape[-1]))
    return Counter(sample(many, mx.zeros((count,), mx.int32), rows).tokens.tolist())


def test_greedy_rows_take_the_likeliest_token() -> None:
    """Temperature 0 is the arg max, among sampled rows too, and free slots change no row."""
    logits = mx.random.normal((4, 50))
    rows = [row(temperature=0.0), None, row(temperature=1.0, seed=3), row(temperature=0.0)]
    tokens = sample(logits, mx.zeros((4,), mx.int32), rows).tokens.tolist()
    best = mx.argmax(logits, axis=-1).tolist()
    assert tokens[0] == best[0] and tokens[3] == best[3]


def test_frequencies_follow_the_distribution() -> None:
    """10,000 draws land within 2 points of the softmax, with and without temperature."""
    logits = mx.array([[1.0, 0.0, -1.0, 2.0]])
    for temperature in (1.0, 0.5, 2.0):
        expected = mx.softmax(logits[0] / temperature).tolist()
        counts = draws(logits, 10_000, temperature=temperature, seed=9)
        for token, share in enumerate(expected):
            assert counts[token] / 10_000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("params", "reference"),
    [
        ({"top_k": 3}, lambda lp: apply_top_k(lp, 3)),
        ({"top_p": 0.6}, lambda lp: apply_top_p(lp, 0.6)),
        ({"top_p": 0.0}, lambda lp: apply_top_k(lp, 1)),
        ({"min_p": 0.2}, lambda lp: apply_min_p(lp, 0.2)),
        ({"top_p": 0.8, "top_k": 4}, lambda lp: apply_top_k(apply_top_p(lp, 0.8), 4)),
    ],
)
def test_filters_keep_what_mlx_lm_keeps(params: dict[str, Any], reference: Any) -> None:
    """The tokens that can be drawn are exactly those that mlx-lm's filters leave."""
    mx.random.seed(4)
    logits = mx.random.normal((1, 12)) * 1.5
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    allowed = {i for i, lp in enumerate(reference(logprobs)[0].tolist()) if lp > -float("inf")}
    seen = set(draws(logits, 4000, temperature=1.5, seed=2, **params))
    assert seen == allowed


def test_rows_with_and_without_filters_share_a_call() -> None:
    """A row's filter does not leak to its neighbours."""
    logits = mx.broadcast_to(mx.array([0.0, 0.0, 0.0, 0.1]), (400, 4))
    rows: list[Sequence | None] = [
        row(dispatched=i, temperature=1.0, top_k=1 if i % 2 else 0, seed=1) for i in range(400)
    ]
    tokens = sample(logits, mx.zeros((400,), mx.int32), rows).tokens.tolist()
    assert set(tokens[1::2]) == {3} and set(tokens[0::2]) == {0, 1, 2, 3}


@pytest.mark.few(2)
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 20, "top_p": 0.95}, {"top_k": 1}, {"top_k": 64, "min_p": 0.05}],
)
def test_a_few_tokens_are_drawn_as_from_a_sorted_vocabulary(
    params: dict[str, Any], has_ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens for the same seeds, whichever way finds the likeliest."""
    mx.random.seed(6)
    logits = 3 * mx.random.normal((4000, 333))
    if has_ties:
        logits = mx.round(logits)
    rows: list[Sequence | None] = [
        row(seed=index, temperature=0.8, **params) for index in range(len(logits))
    ]
    inputs = mx.zeros((len(rows),), mx.int32)
    found = sample(logits, inputs, rows).tokens.tolist()
    monkeypatch.setattr(sampling, "MAX_COUNT", 0)
    assert found == sample(logits, inputs, rows).tokens.tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_models_vocabulary_gives_the_tokens_of_a_sort(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 151,936 tokens; in bfloat16 several of them are equal where ``top_k`` ends."""
    mx.random.seed(8)
    logits = (3 * mx.random.normal((12, 151_936))).astype(dtype)
    counts = (1, 16, 17, 20, 40, 64)
    rows: list[Sequence | None] = [
        row(seed=index, temperature=9.0, top_k=counts[index % 6], top_p=0.95 if index % 2 else 1.0)
        for index in range(len(logits))
    ]
    inputs = mx.zeros((len(rows),), mx.int32)
    found = sample(logits, inputs, rows).tokens.tolist()
    monkeypatch.setattr(sampling, "MAX_COUNT", 0)
    assert found == sample(logits, inputs, rows).tokens.tolist()


def test_neighbours_do_not_change_how_a_row_draws() -> None:
    """A small ``top_k`` among rows without one, with a larger one, greedy rows and free slots."""
    mx.random.seed(7)
    logits = mx.random.normal((600, 700))
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 9},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 60, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 300},
    ]
    rows = [row(seed=index, **asked[index % len(asked)]) for index in range(len(logits))]
    rows_and_free: list[Sequence | None] = [*rows[:-1], None]
    tokens = sample(logits, mx.zeros((len(rows),), mx.int32), rows_and_free).tokens.tolist()
    for index, one in enumerate(rows[:-1]):
        alone = sample(logits[index : index + 1], mx.zeros((1,), mx.int32), [one])
        assert alone.tokens.item() == tokens[index]


def test_log_probabilities_are_the_models_own() -> None:
    """Neither biases nor penalties, filters or temperature change them; they only choose."""
    mx.random.seed(5)
    logits = mx.random.normal((2, 40))
    asked: dict[str, Any] = {"temperature": 0.0, "logprobs": 3}
    changed = {"repetition_penalty": 3.0, "presence_penalty": 2.0, "logit_bias": ((7, 100.0),)}
    rows = [row([3, 9], **asked), row([3, 9], **asked, **changed)]
    found = sample(logits, mx.array([9, 9]), [*rows])
    assert found.chosen is not None and found.top_tokens is not None
    assert found.tokens.tolist() == [mx.argmax(logits[0]).item(), 7]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for index, token in enumerate(found.tokens.tolist()):
        assert found.chosen[index].item() == pytest.approx(logprobs[index, token].item(), abs=1e-6)
        best = mx.argsort(-logprobs[index])[:3].tolist()
        assert found.top_tokens[index, :3].tolist() == best


def test_rows_that_change_no_logits_cost_nothing() -> None:
    """Their graph has the same operations whether the fields are at their defaults or used up."""

    def drawn(**params: Any) -> str:
        graph = io.StringIO()
        made = row([3, 9], 5, temperature=0.7, top_p=0.9, logprobs=2, **params)
        made.generated = [1, 2, 3, 4, 5]
        sampled = sample(mx.zeros((1, 40)), mx.array([5]), [made])
        mx.export_to_dot(graph, *sampled.arrays)
        return re.sub(r"[0-9]{3,}", "", graph.getvalue())

    plain = drawn()
    is_over = drawn(min_tokens=5, late_tokens=frozenset({1}))
    neutral = drawn(stop_token_ids=frozenset({8}), ignore_eos=True, hidden_tokens=frozenset({7}))
    assert plain == is_over == neutral
    assert plain != drawn(min_tokens=6, late_tokens=frozenset({1}))


def test_streams_are_stable_and_distinct() -> None:
    """A seed's stream is the same in every process; golden values pin it. Seeds differ."""
    assert [round(uniform(0, i), 12) for i in range(2)] == [0.883310808214, 0.431527997049]
    assert uniform(1, 0) != uniform(2, 0)
    assert all(0 <= uniform(s, i) < 1 for s in (-1, 0, 2**64 - 1) for i in range(100))


def test_no_number_of_the_stream_leaves_the_vocabulary() -> None:
    """Points at both ends of [0, 1) fall on tokens that have weight."""
    logits = mx.array([[0.0, -1e9, 0.0, -1e9]])
    seen = set(draws(logits, 2000, temperature=1.0, seed=77))
    assert seen == {0, 2}

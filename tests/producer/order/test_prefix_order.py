"""Prefix order: keys, what neighbours share, leaders, groups, longest first."""

from __future__ import annotations

import random
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_producer.order import prefix_order as order
from batchkv_producer.order.prefix_order import (
    Entry,
    arrange,
    in_windows,
    shared_bytes,
    starts_prefix,
    text_key,
    with_shared,
    work_of,
)


def entry(line: int, text: str, max_tokens: int | None = None) -> Entry:
    raw = text.encode()
    return Entry(line, text_key(raw), len(raw), work_of(len(raw), max_tokens))


def in_key_order(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda row: (row.key, row.line))


def words(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("etaoin shrdlu", k=length))


def num_common(left: str, right: str) -> int:
    """Characters that both begin with."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def total_shared(rows: list[Entry]) -> int:
    """Whole steps that each row shares with the one before: what one worker need not compute."""
    return sum(shared_bytes(a, b) // order.STEP_BYTES for a, b in pairwise(rows))


@pytest.mark.parametrize("length", [600, 5_000, 16_384, 20_000, 524_288, 600_000])
def test_what_two_rows_share(length: int) -> None:
    """Never more than there is; less by no more than a piece of the key."""
    rng = random.Random(length)
    common = words(rng, length)
    left, right = entry(1, common + "a" * 900), entry(2, common + "b" * 700)
    assert length - order.COARSE_BYTES < shared_bytes(left, right) <= length or length > 524_288
    assert shared_bytes(left, right) <= length
    assert shared_bytes(left, left) == left.size


def test_sharing_less_than_a_step_is_none() -> None:
    """Half a kilobyte in common saves nobody a block."""
    assert shared_bytes(entry(1, "x" * 511 + "a"), entry(2, "x" * 511 + "b")) == 0
    assert shared_bytes(entry(1, "x" * 512 + "a"), entry(2, "x" * 512 + "b")) == 512
    assert shared_bytes(entry(1, "short"), entry(2, "short")) == 0


def test_the_first_row_of_each_prefix_is_known() -> None:
    """Also of a longer one behind a short one that all have; not a row that shares nothing, and
    not one that shares most of its prefix with the row before."""
    rng = random.Random(3)
    system, other = words(rng, 1024), words(rng, 2048)
    books = [system + words(rng, 3000) for _ in range(2)]
    texts = [book + words(rng, 600) for book in books for _ in range(3)]
    texts += [other + words(rng, 600) for _ in range(2)] + [words(rng, 900)]
    rows = [*in_windows(with_shared(in_key_order([entry(n, t) for n, t in enumerate(texts)])))]
    before = [None, *rows]
    firsts = [row.line for last, row in zip(before, rows, strict=False) if starts_prefix(last, row)]
    parts = [{0, 1, 2}, {3, 4, 5}, {6, 7}]
    assert sorted(next(n for n, part in enumerate(parts) if line in part) for line in firsts) == [
        0,
        1,
        2,
    ]
    order_of = [row.line for row in rows]
    for line, part in zip(sorted(firsts), parts, strict=True):
        assert order_of.index(line) == min(order_of.index(one) for one in part)


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_every_row_knows_how_much_others_begin_with(num_rows: int) -> None:
    """The longest beginning that another row has, from a step on; up to a small piece more, or,
    where pieces are large, up to a piece less."""
    rng = random.Random(num_rows)
    heads = [words(rng, rng.choice((100, 700, 5_000, 40_000))) for _ in range(3)]
    texts = [rng.choice(heads) + words(rng, rng.randrange(900)) for _ in range(num_rows)]
    rows = in_key_order([entry(line, text) for line, text in enumerate(texts)])
    found = {row.line: row.shared for row in with_shared(rows)}
    assert len(found) == num_rows
    for line, text in enumerate(texts):
        others = [other for index, other in enumerate(texts) if index != line]
        most = max((num_common(text, other) for other in others), default=0)
        if most < order.STEP_BYTES:
            assert found[line] == 0
        else:
            least = most if most < order.FINE_END else most - order.COARSE_BYTES
            assert least <= found[line] <= min(len(text), most + order.FINE_BYTES)


@given(st.data())
def test_shared_bytes_are_really_shared(data: st.DataObject) -> None:
    """What the keys say is common is common."""
    rng = random.Random(data.draw(st.integers(0, 99)))
    common = words(rng, data.draw(st.integers(0, 40_000)))
    left = common + words(rng, data.draw(st.integers(0, 9_000)))
    right = common + words(rng, data.draw(st.integers(0, 9_000)))
    num_bytes = shared_bytes(entry(1, left), entry(2, right))
    assert left[:num_bytes] == right[:num_bytes]
    assert num_bytes <= min(len(left), len(right))


def test_a_leader_goes_before_its_followers_and_long_rows_before_short_ones() -> None:
    """Of the rows behind one prefix the shortest goes first, then the longest to the shortest."""
    prefix = "p" * 2048
    rows = [entry(n, prefix + f"{n}" * 40 * n, 100) for n in (3, 1, 4, 2)]
    assert [row.line for row in arrange(in_key_order(rows))] == [1, 4, 3, 2]


def test_the_answer_counts_for_more_than_the_prompt() -> None:
    """A row that may generate much is long, however short its prompt is."""
    rows = [entry(1, "a" * 400, 10), entry(2, "b", 1000), entry(3, "c" * 100)]
    assert [row.line for row in arrange(in_key_order(rows))] == [2, 3, 1]


def test_rows_that_share_nothing_go_last() -> None:
    """At the end of the queue, where single rows are taken, there is nothing to lose."""
    rng = random.Random(1)
    rows = [entry(n, words(rng, 3000), 2000) for n in range(30)]
    prefix = words(rng, 3000)
    rows += [entry(n, prefix + words(rng, 100), 1) for n in range(30, 60)]
    ordered = [row.line for row in arrange(in_key_order(rows))]
    assert sorted(ordered[:30]) == list(range(30, 60))


def test_groups_within_groups_stay_together() -> None:
    """System prompt, document, question: each level is one stretch; big groups go first."""
    rng = random.Random(2)
    system, rows = words(rng, 2000), []
    for document in range(5):
        text = system + words(rng, 3000)
        rows += [entry(100 * document + n, text + words(rng, 50)) for n in range(4 + document)]
    rng.shuffle(rows)
    ordered = arrange(in_key_order(rows))
    runs = [(document, len(list(run))) for document, run in groupby(r.line // 100 for r in ordered)]
    assert runs == [(4, 8), (3, 7), (2, 6), (1, 5), (0, 4)]


@given(st.integers(0, 10_000))
def test_arranging_loses_no_row_and_no_hit(seed: int) -> None:
    """Any tree of prefixes: a permutation, the same every time, in which neighbours share as much
    as in the order of the keys."""
    rng = random.Random(seed)
    texts = [""]
    for _ in range(rng.randrange(1, 40)):
        texts.append(rng.choice(texts) + words(rng, rng.choice((100, 512, 700, 3000))))
    rows = in_key_order([entry(n, rng.choice(texts), rng.choice((1, 50))) for n in range(60)])
    ordered = arrange(rows)
    assert sorted(row.line for row in ordered) == sorted(row.line for row in rows)
    assert ordered == arrange(rows)
    assert total_shared(ordered) >= total_shared(rows)


def test_a_long_file_is_arranged_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come out as windows fill; each window is arranged by itself."""
    monkeypatch.setattr(order, "WINDOW_ROWS", 3)
    rows = [entry(n, f"{n:04}", n) for n in range(1, 9)]
    source = iter(rows)
    result = in_windows(source)
    assert [next(result).line for _ in range(3)] == [3, 2, 1]
    assert next(source).line == 4
    assert [row.line for row in result] == [7, 6, 5, 8]
    assert list(in_windows([])) == []


@pytest.mark.parametrize("max_tokens", [-5, 0, 10**30])
def test_an_absurd_answer_length_is_no_absurd_work(max_tokens: int) -> None:
    """Work is a number that the plan can hold, and never less than none."""
    assert 0 <= work_of(100, max_tokens) <= work_of(100, max_tokens, 128) < 2**63


def test_each_choice_is_work() -> None:
    """A row with several choices has their work, and one prompt."""
    assert work_of(400, 10, 3) - work_of(400, 10) == 2 * (work_of(0, 10) - work_of(0, 0))

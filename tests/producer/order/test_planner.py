"""The order of a batch, its chunks, and repeated ids."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from itertools import groupby, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_producer.errors import BatchkvError
from batchkv_producer.intake.formats import Row, RowError
from batchkv_producer.order import planner
from batchkv_producer.order import prefix_order as order
from batchkv_producer.order.canonical import canonical_text, num_shared_tokens
from batchkv_producer.order.planner import BatchPlan, Chunk, PlanCounts
from batchkv_producer.wire.job import Request, SamplingParams, decode_job


def prompt_row(line: int, prompt: str, custom_id: str | None = None) -> Row:
    """A completion row."""
    return Row(line, Request(custom_id or f"line-{line}", "completion", prompt=prompt))


def bad_row(line: int, custom_id: str | None = None) -> RowError:
    """A row that was refused."""
    return RowError(line, custom_id or f"line-{line}", "chat", "invalid_json", "no")


def planned(
    *rows: Row | RowError, defaults: SamplingParams | None = None
) -> tuple[PlanCounts, list[Chunk]]:
    """Counts and chunks of these rows."""
    with BatchPlan(defaults or SamplingParams()) as plan:
        plan.add(rows)
        return plan.seal(), list(plan.chunks())


def num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with in common."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def order_of(*prompts: str) -> list[str]:
    """The prompts in the order in which they would be queued."""
    _, chunks = planned(*(prompt_row(line, prompt) for line, prompt in enumerate(prompts, 1)))
    return [decode_job(data).prompt or "" for chunk in chunks for _, data, _ in chunk.jobs]


# ---- order ----


def test_rows_with_a_common_prefix_stand_together() -> None:
    """Prompts behind one long prefix are queued one after the other, wherever they stood."""
    rng = random.Random(3)
    prefixes = ["".join(rng.choices("abc ", k=length)) for length in (300, 900, 5000, 40_000)]
    prompts = [prefix + f"question {n}" for n in range(20) for prefix in prefixes]
    rng.shuffle(prompts)
    owners = [next(p for p in prefixes if prompt.startswith(p)) for prompt in order_of(*prompts)]
    assert [len(list(group)) for _, group in groupby(owners)] == [20, 20, 20, 20]


def test_prefixes_within_prefixes_stand_together() -> None:
    """Under one system prompt, rows that also share a document stand together."""
    rng = random.Random(4)
    system = "".join(rng.choices("abc ", k=2000))
    documents = ["".join(rng.choices("def ", k=3000)) for _ in range(5)]
    prompts = [system + document + f"q{n}" for n in range(8) for document in documents]
    ordered = order_of(*prompts)
    owners = [next(d for d in documents if d in prompt) for prompt in ordered]
    assert [len(list(group)) for _, group in groupby(owners)] == [8] * 5


def test_short_prompts_are_in_alphabetical_order() -> None:
    """Short prompts are sorted as they are, so that those that begin alike stand together."""
    assert order_of("b 1", "a 2", "b", "a 1") == ["a 1", "a 2", "b", "b 1"]


def test_equal_prompts_keep_the_order_of_the_file() -> None:
    """Lines decide between equal prompts."""
    _, (chunk,) = planned(*(prompt_row(line, "same") for line in (1, 2, 3)))
    assert [line for line, _, _ in chunk.jobs] == [1, 2, 3]


def test_jobs_say_how_much_of_them_others_begin_with() -> None:
    """Bytes of text, to within a piece; nothing for a row that is alone, and none for bad rows."""
    system = "".join(random.Random(5).choices("abc ", k=3000))
    rows = [prompt_row(1, system + "one"), prompt_row(2, "alone"), bad_row(3)]
    _, (chunk,) = planned(*rows, prompt_row(4, system + "another"))
    shared = {line: num_bytes for line, _, num_bytes in chunk.jobs}
    assert shared == {1: 3003, 2: 0, 4: 3007}
    assert chunk.starts == {next(line for line, _, num_bytes in chunk.jobs if num_bytes)}


def test_canonical_text_has_all_that_a_template_renders() -> None:
    """Tools come first, then roles, contents and calls: two rows differ where their prompts do."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    base = Request("a", "chat", messages=[{"role": "user", "content": "x"}])
    others = [
        Request("a", "chat", messages=[{"role": "system", "content": "x"}]),
        Request("a", "chat", messages=[{"role": "user", "content": "y"}]),
        Request("a", "chat", messages=base.messages, tools=[{"function": {"name": "f"}}]),
        Request("a", "chat", messages=[{"role": "user", "content": "x", "tool_calls": [call]}]),
        Request("a", "completion", prompt="x"),
    ]
    texts = [canonical_text(request) for request in (base, *others)]
    assert len(set(texts)) == len(texts)
    assert canonical_text(others[2]).startswith("[{")


def test_prompts_of_token_ids_are_ordered_by_their_prefixes() -> None:
    """Rows whose ids begin alike are queued one after the other, and know how much they share."""
    rng = random.Random(6)
    stems = [[rng.randrange(2**24) for _ in range(length)] for length in (200, 900, 4000)]
    prompts = [[*stem, line] for line in range(6) for stem in stems]
    prompts.append([rng.randrange(2**24) for _ in range(300)])
    rng.shuffle(prompts)
    rows = [
        Row(line, Request(f"{line}", "completion", prompt_tokens=ids))
        for line, ids in enumerate(prompts, 1)
    ]
    _, (chunk,) = planned(*rows)
    ordered = [(decode_job(data).prompt_tokens or [], shared) for _, data, shared in chunk.jobs]
    lengths = [len(ids) for ids, _ in ordered]
    assert sorted(len(list(group)) for _, group in groupby(lengths)) == [1, 6, 6, 6]
    for ids, shared in ordered:
        alone = len(ids) == 300
        assert (
            num_shared_tokens(shared) == 0 if alone else len(ids) - 1 <= num_shared_tokens(shared)
        )


@given(
    st.lists(st.integers(0, 2**24 - 1), max_size=9),
    st.lists(st.integers(0, 2**24 - 1), max_size=9),
    st.lists(st.integers(0, 2**24 - 1), max_size=9),
)
def test_common_text_of_token_ids_is_their_common_prefix(
    stem: list[int], left: list[int], right: list[int]
) -> None:
    """Two prompts have as many tokens in common as their canonical texts say."""
    first, second = [*stem, *left], [*stem, *right]
    texts = [
        canonical_text(Request("a", "completion", prompt_tokens=ids)) for ids in (first, second)
    ]
    num_common = num_equal(first, second)
    num_bytes = num_equal(*texts)
    assert num_shared_tokens(num_bytes) == num_common
    assert len(set(map(str, (first, second)))) == len(set(texts))
    assert not canonical_text(Request("a", "completion", prompt="a")).startswith(texts[0][:1])


@given(st.text(max_size=2000), st.text(max_size=2000), st.integers(0, 700_000))
def test_keys_keep_prefixes(left: str, right: str, num_shared: int) -> None:
    """Keys are bounded, equal for equal texts, and equal where whole blocks are."""
    shared = ("shared text " * (num_shared // 12 + 1))[:num_shared]
    first, second = (order.text_key((shared + tail).encode()) for tail in (left, right))
    assert max(len(first), len(second)) <= 1008
    assert first == order.text_key((shared + left).encode())
    num_fine = min(len(shared), order.FINE_END) // order.FINE_BYTES
    num_equal = 256 + 4 * (num_fine - 1) if num_fine else len(shared)
    assert first[:num_equal] == second[:num_equal]


# ---- chunks ----


def test_chunks_cover_every_row_once() -> None:
    """1,250 rows are three chunks; bad rows come first, in the order of their lines."""
    rows: list[Row | RowError] = [prompt_row(n, f"prompt {n:04}") for n in range(1, 1200)]
    rows += [bad_row(n) for n in range(1200, 1251)]
    counts, chunks = planned(*rows)
    assert counts == PlanCounts(1250, 51, 1199 * 11, 1250, 3)
    assert [chunk.number for chunk in chunks] == [0, 1, 2]
    assert [len(chunk.jobs) + len(chunk.bad_rows) for chunk in chunks] == [500, 500, 250]
    assert [row.line for row in chunks[0].bad_rows] == list(range(1200, 1251))
    lines = [line for chunk in chunks for line, _, _ in chunk.jobs]
    assert lines == list(range(1, 1200))


def test_chunks_can_be_read_from_the_middle() -> None:
    """Reading on from a chunk gives the same chunks as reading them all."""
    with BatchPlan(SamplingParams()) as plan:
        plan.add(prompt_row(n, f"prompt {n * 7919 % 1300}") for n in range(1, 1301))
        plan.seal()
        everything = list(plan.chunks())
        assert list(plan.chunks(1)) == everything[1:]
        assert list(plan.chunks(3)) == []
        assert [plan.num_rows_before(n) for n in range(4)] == [0, 500, 1000, 1300]


def test_long_prompts_make_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk ends early when its text is large, by the text alone."""
    monkeypatch.setattr(planner, "CHUNK_BYTES", 100)
    _, chunks = planned(*(prompt_row(n, f"{n}" + "x" * 59) for n in range(1, 6)))
    assert [len(chunk.jobs) for chunk in chunks] == [2, 2, 1]


def test_an_empty_plan() -> None:
    """No rows give no chunks."""
    assert planned() == (PlanCounts(0, 0, 0, 0, 0), [])


def test_defaults_fill_what_a_row_has_not_said() -> None:
    """A generation default counts for rows that say nothing, and only for them."""
    said = SamplingParams(max_tokens=3, temperature=0.0, stop=("a",))
    rows = [
        Row(1, Request("a", "completion", prompt="1", params=said)),
        prompt_row(2, "2"),
    ]
    defaults = SamplingParams(max_tokens=9, temperature=0.7, seed=4, stop=("b", "c"))
    _, (chunk,) = planned(*rows, defaults=defaults)
    first, second = (decode_job(data).params for _, data, _ in sorted(chunk.jobs))
    assert first == SamplingParams(max_tokens=3, temperature=0.0, seed=4, stop=("a",))
    assert second == defaults


# ---- repeated ids ----


def test_a_repeated_id_fails_the_later_row() -> None:
    """The first row keeps the id; every later one names the first line."""
    rows = [prompt_row(1, "a", "x"), prompt_row(2, "b", "y"), prompt_row(5, "c", "x")]
    rows.append(prompt_row(9, "d", "x"))
    counts, (chunk,) = planned(*rows)
    assert (counts.total, counts.num_bad) == (4, 2)
    assert [(row.line, row.custom_id, row.code) for row in chunk.bad_rows] == [
        (5, "x", "duplicate_custom_id"),
        (9, "x", "duplicate_custom_id"),
    ]
    assert chunk.bad_rows[0].message == 'custom_id "x" is taken by line 1'
    assert chunk.bad_rows[0].endpoint == "completion"


def test_a_bad_row_holds_its_id_and_keeps_its_error() -> None:
    """A good row cannot take the id of an earlier bad one; a bad one keeps its own fault."""
    counts, (chunk,) = planned(bad_row(1, "x"), prompt_row(2, "a", "x"), bad_row(3, "x"))
    assert counts.num_bad == 3
    codes = [row.code for row in chunk.bad_rows]
    assert codes == ["invalid_json", "duplicate_custom_id", "invalid_json"]


def test_a_given_id_can_collide_with_a_default_one() -> None:
    """Who calls his row ``line-2`` takes the name of the second line."""
    counts, (chunk,) = planned(prompt_row(1, "a", "line-2"), prompt_row(2, "b"))
    assert [row.line for row in chunk.bad_rows] == [2]
    assert counts.num_bad == 1


def test_ids_are_compared_exactly() -> None:
    """Case, accents and NUL bytes tell ids apart."""
    ids = ["a", "A", "á", "a\x00", "a\x00b", "a "]
    counts, _ = planned(*(prompt_row(n, "p", custom_id) for n, custom_id in enumerate(ids, 1)))
    assert counts.num_bad == 0


def test_the_first_errors() -> None:
    """The errors shown are the first by line, as many as asked for."""
    with BatchPlan(SamplingParams()) as plan:
        plan.add([bad_row(3), prompt_row(4, "p"), bad_row(7), bad_row(9)])
        plan.seal()
        assert [row.line for row in plan.errors(2)] == [3, 7]


def test_a_full_disk_is_one_clear_error() -> None:
    """A fault of the temporary file is an error that says which file it was."""
    message = r"temporary file .* disk is full; set TMPDIR"
    with pytest.raises(BatchkvError, match=message), BatchPlan(SamplingParams()):
        raise sqlite3.OperationalError("database or disk is full")

"""The engine against rows computed alone by mlx-lm: token for token, float32, greedy."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.errors import ModelError, SettingsError
from batchkv_worker.events import Completed, Event, Rejected, Work
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import joint_product
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.kv.reference import x86

CHUNK = 256
LENGTHS = (1, 2, 3, 255, 256, 257, 258, 511, 512, 513, 700, 768, 40, 41, 42, 64)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Rows of 1 token to 3 chunks, ragged, in a random order."""
    rng = random.Random(seed)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    rng.shuffle(lengths)
    return [[rng.randrange(tiny_models.VOCABULARY) for _ in range(n)] for n in lengths]


def engine(model: Any, scheme: str = "float", **changes: Any) -> Engine:
    """An engine; what it could choose by measurement is fixed."""
    fixed = {"path": "fused", "group_cost": 64, "prefix_cells": 64}
    sizes = {"slots": 6, "chunk_tokens": CHUNK, "memory_bytes": 2**30}
    values: dict[str, Any] = {**fixed, **sizes, **changes}
    config = tiny_models.with_measured(model, EngineConfig(scheme=scheme, **values))
    return Engine(tiny_models.loaded(model), config)


def drain(running: Engine) -> dict[str, Completed]:
    """Run to the end, and check the layouts after each step."""
    ended: dict[str, Completed] = {}
    while not running.is_idle:
        for event in running.step():
            assert isinstance(event, Completed)
            ended[event.job_id] = event
        running.check_integrity()
    return ended


@cache
def alone_of(family: str, prompt: tuple[int, ...], count: int, bits: int | None) -> list[int]:
    """The tokens that mlx-lm gives, for tests with several engines of one model."""
    return tiny_models.alone(tiny_models.build(family), list(prompt), count, bits)


def work(job_id: str, prompt: str = "1 2 3", **params: Any) -> Work:
    values = {"max_tokens": 4, "temperature": 0.0, **params}
    request = Request(job_id, "completion", prompt=prompt, params=SamplingParams(**values))
    return Work(job_id, request)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "float"),
        ("llama", "affine8"),
        ("llama", "affine4"),
        ("mistral", "affine8"),
        ("qwen2", "affine4"),
        ("qwen3", "float"),
        ("phi3", "affine8"),
    ],
)
def test_rows_equal_themselves_alone(family: str, scheme: str) -> None:
    """10 ragged rows that join and leave at different times give the tokens of each row alone."""
    model = tiny_models.build(family)
    rows = prompts(10)
    counts = [random.Random(i).randrange(1, 24) for i in range(len(rows))]
    running = engine(model, scheme)
    for index, (prompt, count) in enumerate(zip(rows, counts, strict=True)):
        running.submit_row(Sequence(str(index), prompt, Generation(count, temperature=0.0)))
    ended = drain(running)
    fitted = {str(layer.keys) for layer in running.plan.schemes}
    bits = int(scheme[-1]) if fitted == {f"{scheme}/g64"} else None
    if scheme != "float" and bits is None:
        return  # mlx-lm's cache has one group size for all; test_group_sizes covers these
    for index, (prompt, count) in enumerate(zip(rows, counts, strict=True)):
        assert list(ended[str(index)].token_ids) == tiny_models.alone(model, prompt, count, bits)


def test_many_rows_of_one_to_three_chunks() -> None:
    """32 prompts of 1 token to 3 chunks through 6 slots: every row as if it were alone."""
    model = tiny_models.build("llama")
    rows = prompts(32, seed=3)
    running = engine(model)
    for index, prompt in enumerate(rows):
        running.submit_row(
            Sequence(str(index), prompt, Generation(1 + index % 13, temperature=0.0))
        )
    ended = drain(running)
    for index, prompt in enumerate(rows):
        expected = tiny_models.alone(model, prompt, 1 + index % 13)
        assert list(ended[str(index)].token_ids) == expected, (index, len(prompt))


@pytest.mark.parametrize("path", ["fused", "folded", "packed"])
def test_every_attention_path_gives_the_same_tokens(path: Path) -> None:
    """Fused, folded and packed attention agree, whichever the probe would choose."""
    model = tiny_models.build("qwen3")
    rows = prompts(12, seed=4)
    running = engine(model, "affine8", path=path)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(10, temperature=0.0)))
    ended = drain(running)
    for index, prompt in enumerate(rows):
        assert list(ended[str(index)].token_ids) == alone_of("qwen3", tuple(prompt), 10, 8)


def test_group_sizes_follow_the_head_size() -> None:
    """Head sizes that 64 does not divide take groups of 32, those that 32 does not stay float."""
    by_size = {
        size: engine(tiny_models.build("llama", head_dim=size), "affine8").plan.schemes[0].keys
        for size in (64, 96, 80)
    }
    assert list(map(str, by_size.values())) == ["affine8/g64", "affine8/g32", "float"]


def test_chunk_size_and_slots_change_nothing() -> None:
    """The same rows with other chunk sizes and slot counts: the same tokens."""
    model = tiny_models.build("llama")
    rows = prompts(10, seed=6)
    seen = []
    for slots, chunk in ((1, 256), (3, 512), (10, 1024)):
        running = engine(model, "affine8", slots=slots, chunk_tokens=chunk)
        for index, prompt in enumerate(rows):
            running.submit_row(Sequence(str(index), prompt, Generation(8, temperature=0.0)))
        ended = drain(running)
        seen.append([ended[str(i)].token_ids for i in range(len(rows))])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("path", ["folded", "fused", "packed"])
def test_rounded_shapes_change_nothing(path: Path) -> None:
    """Columns, rows and widths rounded up for a backend that likes few shapes: the same tokens."""
    model = tiny_models.build("llama")
    rows = prompts(10, seed=7)
    running = engine(model, "affine8", backend=x86(columns_multiple=64, rows_multiple=8), path=path)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(8, temperature=0.0)))
    ended = drain(running)
    for index, prompt in enumerate(rows):
        assert list(ended[str(index)].token_ids) == alone_of("llama", tuple(prompt), 8, 8)


@pytest.mark.parametrize("path", ["folded", "fused", "packed"])
def test_rows_of_one_length_need_no_mask_where_shapes_are_rounded(path: Path) -> None:
    """They are read as they are, by the fused kernel unless the codes are; the same tokens."""
    model = tiny_models.build("llama")
    rows = [[index + 3 * place for place in range(30)] for index in range(4)]
    running = engine(model, "affine8", backend=x86(columns_multiple=64, rows_multiple=8), path=path)
    masks: list[bool] = []
    view = running._slots._views.view

    def watched(layouts: Any) -> Any:
        made = view(layouts)
        masks.append(made.spans[None].mask is not None)
        assert [(g.mask, g.high - g.low) for g in made.spans[None].exact_groups] == [
            (None, 30 + len(masks) - 1)
        ]
        return made

    running._slots._views.view = watched  # type: ignore[method-assign]
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(8, temperature=0.0)))
    ended = drain(running)
    assert masks == [True] * 8  # rounded columns would need one
    for index, prompt in enumerate(rows):
        assert list(ended[str(index)].token_ids) == tiny_models.alone(model, prompt, 8, 8)


def test_planted_fault_is_seen() -> None:
    """The comparison can fail: dropped columns of keys change tokens."""
    model = tiny_models.build("llama")
    rows = prompts(6, seed=8)
    running = engine(model)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(24, temperature=0.0)))
    for _ in range(4):
        running.step()
    for layer in running._slots.layers:
        write = running._slots.layouts.main.write
        layer.arrays[0][:, :, write - 20 : write] = 0.0
    ended = drain(running)
    expected = [tiny_models.alone(model, prompt, 24) for prompt in rows]
    assert any(list(ended[str(i)].token_ids) != tokens for i, tokens in enumerate(expected))


def test_cancel_frees_the_slot_and_spares_the_neighbours() -> None:
    """A cancelled row gives no event; the other rows give their tokens."""
    model = tiny_models.build("llama")
    rows = prompts(8, seed=9)
    running = engine(model, slots=4)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(10, temperature=0.0)))
    ended: dict[str, Event] = {}
    for _ in range(3):
        ended |= {event.job_id: event for event in running.step() if isinstance(event, Completed)}
    decoding = next(iter(running._rows.values())).job_id
    for job_id in (decoding, "7", "unknown", decoding):
        running.cancel(job_id)
    running.check_integrity()
    ended |= drain(running)
    assert set(ended) == {str(i) for i in range(8)} - {decoding, "7"}
    for job_id, event in ended.items():
        assert isinstance(event, Completed)
        expected = tiny_models.alone(model, rows[int(job_id)], 10)
        assert list(event.token_ids) == expected


def test_rows_that_wait_are_recalled() -> None:
    """Of the rows asked for, those that wait are forgotten, the last first, and no others."""
    model = tiny_models.build("llama")
    rows = prompts(8, seed=9)
    running = engine(model, slots=2)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(10, temperature=0.0)))
    while len(running._rows) < 2:
        running.step()
    begun = {row.job_id for row in running._rows.values()}
    waiting = [str(index) for index in range(8) if str(index) not in begun]
    assert running.recall([*begun, *waiting[1:]], 3) == waiting[:-4:-1]
    assert running.recall(["unknown", *begun], 8) == []
    running.check_integrity()
    ended = drain(running)
    assert set(ended) == {*begun, *waiting[:3]}
    for job_id, event in ended.items():
        assert isinstance(event, Completed)
        assert list(event.token_ids) == tiny_models.alone(model, rows[int(job_id)], 10)


def test_a_cancelled_row_leaves_its_slot_to_the_next_in_one_step() -> None:
    """The slot is free at once, and the step after the cancel has the row that waited."""
    running = engine(tiny_models.build("llama"), slots=2)
    for job_id in "abc":
        running.submit_row(Sequence(job_id, [1, 2, 3], Generation(50, temperature=0.0)))
    while len(running._rows) < 2:
        running.step()
    assert {row.job_id for row in running._rows.values()} == {"a", "b"}
    running.cancel("a")
    assert [row.job_id for row in running._rows.values()] == ["b"]
    running.step()
    assert {row.job_id for row in running._rows.values()} == {"b", "c"}
    running.check_integrity()


def test_cancel_everything_leaves_the_engine_idle() -> None:
    """Rows may be cancelled in every state: waiting, in prefill, decoding, at the last token."""
    model = tiny_models.build("llama")
    for steps in range(5):
        running = engine(model, slots=2)
        running.submit_row(Sequence("a", list(range(300)), Generation(2, temperature=0.0)))
        running.submit_row(Sequence("b", [1, 2], Generation(2, temperature=0.0)))
        for _ in range(steps):
            running.step()
        for job_id in "ab":
            running.cancel(job_id)
        for _ in range(3):
            running.step()
        assert running.is_idle
        running.check_integrity()


def test_one_token_answers_and_one_token_prompts() -> None:
    """max_tokens 1 gives one token, also for a prompt of one token."""
    model = tiny_models.build("llama")
    running = engine(model)
    running.add(work("x", prompt="5", max_tokens=1))
    ended = drain(running)["x"]
    assert list(ended.token_ids) == tiny_models.alone(model, [5], 1)
    assert (ended.finish_reason, ended.usage.prompt, ended.usage.completion) == ("length", 1, 1)


def test_end_token_stops_and_is_not_text() -> None:
    """A row ends with its end token, which counts as generated and is no text."""
    model = tiny_models.build("llama")
    expected = tiny_models.alone(model, [1, 2, 3], 8)
    running = engine(model)
    running.loaded.tokenizer.eos_token_ids = frozenset({expected[2]})
    cut = expected.index(expected[2]) + 1
    running.add(work("x", max_tokens=8))
    ended = drain(running)["x"]
    assert list(ended.token_ids) == expected[:cut] and ended.finish_reason == "stop"
    assert ended.text.split() == [str(token) for token in expected[: cut - 1]]


def test_stop_string_cuts_the_text() -> None:
    """Text ends before the stop string; generation ends with the token that completes it."""
    model = tiny_models.build("llama")
    expected = tiny_models.alone(model, [1, 2, 3], 8)
    stop = f" {expected[3]} "
    running = engine(model)
    running.add(work("x", max_tokens=8, stop=(stop,)))
    ended = drain(running)["x"]
    whole = "".join(f"{token} " for token in expected)
    assert ended.text == whole[: whole.index(stop)] and ended.finish_reason == "stop"


def test_row_that_can_never_fit_is_rejected_at_once() -> None:
    """More prompt and answer than the context, or than the memory, is an event, not a wait."""
    model = tiny_models.build("llama")
    running = engine(model, memory_bytes=2**20)
    running.add(work("context", max_tokens=5000))
    running.add(work("memory", prompt=" ".join(["1"] * 900), max_tokens=500))
    running.add(work("good"))
    events: list[Event] = []
    while not running.is_idle:
        events += running.step()
    codes = {e.job_id: e.code for e in events if isinstance(e, Rejected)}
    assert codes == {"context": "context_length_exceeded", "memory": "context_length_exceeded"}
    assert [e.job_id for e in events if isinstance(e, Completed)] == ["good"]


def test_chat_without_template_is_refused_by_row() -> None:
    """Messages to a model that has no chat template fail that row with a reason."""
    running = engine(tiny_models.build("llama"))
    request = Request("x", "chat", messages=[{"role": "user", "content": "hi"}])
    running.add(Work("x", request))
    (event,) = running.step()
    assert isinstance(event, Rejected) and "chat template" in event.message


def test_seeded_rows_do_not_depend_on_their_neighbours() -> None:
    """A sampled row's tokens are the same alone and among greedy and sampled neighbours."""
    model = tiny_models.build("llama")
    sampled = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 11, "max_tokens": 20}
    lonely = engine(model, slots=1)
    lonely.add(work("x", **sampled))
    alone = drain(lonely)["x"].token_ids
    crowded = engine(model, slots=5)
    crowded.add(work("g", prompt="4 5 6 7", max_tokens=9))
    crowded.add(work("h", prompt="9", temperature=1.3, seed=4, max_tokens=15))
    crowded.add(work("x", **sampled))
    crowded.add(work("p", temperature=0.5, repetition_penalty=1.3, seed=5, max_tokens=11))
    assert drain(crowded)["x"].token_ids == alone
    other = engine(model, slots=1)
    other.add(work("x", **{**sampled, "seed": 12}))
    assert drain(other)["x"].token_ids != alone


def test_logprobs_are_those_of_the_model() -> None:
    """Reported log-probabilities are the model's, and the alternatives are sorted."""
    model = tiny_models.build("llama")
    running = engine(model)
    running.add(work("plain", prompt="9 9", max_tokens=3))
    running.add(work("x", prompt="1 2 3", max_tokens=3, logprobs=4))
    ended = drain(running)
    assert ended["plain"].logprobs is None
    reported = ended["x"].logprobs
    assert reported is not None and len(reported) == 3
    tokens = [1, 2, 3]
    for token, item in zip(ended["x"].token_ids, reported, strict=True):
        logits = model(mx.array([tokens]))[0, -1]
        expected = (logits - mx.logsumexp(logits))[token].item()
        assert item.logprob == pytest.approx(expected, abs=1e-4)
        assert len(item.top) == 4 and item.top[0][0] == item.token
        assert [p for _, p in item.top] == sorted((p for _, p in item.top), reverse=True)
        tokens.append(token)


def test_quantized_slots_are_smaller() -> None:
    """The live buffers shrink as the scheme says: half and about a quarter of float32's bytes."""
    model = tiny_models.build("llama")
    num_bytes = {}
    for scheme in ("float", "affine8", "affine4"):
        running = engine(model, scheme)
        running.submit_row(Sequence("a", list(range(300)), Generation(5, temperature=0.0)))
        running.step()
        num_bytes[scheme] = running.kv_bytes
        drain(running)
    assert num_bytes["affine8"] / num_bytes["float"] == pytest.approx((8 + 1) / 32)
    assert num_bytes["affine4"] / num_bytes["float"] == pytest.approx((4 + 1) / 32)


def test_memory_is_flat_over_many_rows() -> None:
    """Rows that come and go leave nothing behind: 160 rows keep the arrays of the first 40."""
    model = tiny_models.build("llama")
    running = engine(model, "affine8", slots=4)
    rng = random.Random(2)
    seen = []
    for batch in range(4):
        for index in range(40):
            prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 60))]
            row = Sequence(f"{batch}-{index}", prompt, Generation(5, temperature=0.0))
            running.submit_row(row)
        drain(running)
        mx.clear_cache()
        seen.append(mx.get_active_memory())
    assert max(seen[1:]) <= seen[0] * 1.02


@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_shared_prefixes_are_computed_once_and_change_no_token(scheme: str) -> None:
    """Rows with one prefix compute it once, to a multiple of 16 tokens, with the same tokens."""
    model = tiny_models.build("llama")
    rng = random.Random(12)
    prefix = [rng.randrange(512) for _ in range(600)]
    tails = [[rng.randrange(512) for _ in range(n)] for n in (1, 9, 30, 200, 300, 0, 168, 169)]
    cold = engine(model, scheme, prefix_bytes=0)
    warm = engine(model, scheme)
    for running in (cold, warm):
        for index, tail in enumerate(tails):
            row = Sequence(str(index), prefix + tail, Generation(8, temperature=0.0))
            running.submit_row(row)
    expected, got = drain(cold), drain(warm)
    for job_id, event in expected.items():
        assert got[job_id].token_ids == event.token_ids
        assert event.usage.cached == 0
    assert sorted(event.usage.cached for event in got.values()) == [0, *[592] * 7]
    again = Sequence("again", prefix[:513], Generation(3, temperature=0.0))  # nothing to prefill
    warm.submit_row(again)
    event = drain(warm)["again"]
    assert event.usage.cached == 512
    bits = None if scheme == "float" else 8
    assert list(event.token_ids) == tiny_models.alone(model, prefix[:513], 3, bits)


def test_prefix_cache_keeps_to_its_bytes() -> None:
    """Least recently used blocks are evicted at the limit; rows still get their tokens."""
    model = tiny_models.build("llama")
    running = engine(model, prefix_bytes=3 * 256 * 1024)
    for index in range(6):
        prompt = [(index * 7 + i) % 512 for i in range(520)]
        running.submit_row(Sequence(str(index), prompt, Generation(2, temperature=0.0)))
    ended = drain(running)
    assert len(ended) == 6
    assert 0 < running.prefixes.num_bytes <= running.prefixes.max_bytes


def test_a_row_whose_text_breaks_ends_alone() -> None:
    """A tokenizer or template that raises anything ends that row; the others go on."""
    running = engine(tiny_models.build("llama"))
    healthy = running.loaded.tokenizer

    class Broken(type(healthy)):  # type: ignore[misc]
        def encode(self, text: str) -> list[int]:
            if "bad" in text:
                raise ZeroDivisionError("in a template")
            return super().encode(text)

        def decode(self, tokens: list[int]) -> str:
            raise OverflowError("in a token")

    object.__setattr__(running.loaded, "tokenizer", Broken())
    running.add(work("bad", prompt="bad"))
    running.add(work("good"))
    running.add(work("unreadable", logprobs=1))
    events: dict[str, Event] = {}
    while not running.is_idle:
        events |= {e.job_id: e for e in running.step() if isinstance(e, Completed | Rejected)}
        running.check_integrity()
    codes = {job_id: e.code for job_id, e in events.items() if isinstance(e, Rejected)}
    assert codes == {"bad": "invalid_request", "unreadable": "engine_error"}
    assert isinstance(events["good"], Completed)


def test_unfiltered_rows_do_not_depend_on_filtered_neighbours() -> None:
    """A row without top_p draws the same tokens together with a row that has it."""
    model = tiny_models.build("llama")
    lonely = engine(model)
    lonely.add(work("x", temperature=1.0, seed=3, max_tokens=12))
    alone = drain(lonely)["x"].token_ids
    crowded = engine(model)
    crowded.add(work("x", temperature=1.0, seed=3, max_tokens=12))
    crowded.add(work("y", temperature=1.0, top_p=0.9, seed=8, max_tokens=12))
    assert drain(crowded)["x"].token_ids == alone


def test_one_long_row_after_many_short_ones_keeps_to_the_memory() -> None:
    """Buffers without rows shrink to the next row, instead of growing with all rows."""
    model = tiny_models.build("llama")
    running = engine(model, slots=16, prefix_bytes=0)
    per_token = running.bytes_per_token  # and half as much again while a buffer is rebuilt
    running = engine(model, slots=16, prefix_bytes=0, memory_bytes=9000 * per_token)
    for index in range(16):
        running.submit_row(Sequence(str(index), [1, 2], Generation(4, temperature=0.0)))
    drain(running)
    row = Sequence("long", list(range(500)) * 4, Generation(300, temperature=0.0))
    running.submit_row(row)
    while not running.is_idle:
        running.step()
        assert running.kv_bytes <= 9000 * per_token


def test_old_buffers_make_way_for_a_row_that_fits_only_alone() -> None:
    """A row that fits an empty engine fits it after a wider one too; nothing exceeds the memory."""
    model = tiny_models.build("llama")
    per_token = engine(model).bytes_per_token
    limit = 2112 * per_token  # half of it again stands there while a buffer is rebuilt
    running = engine(model, slots=1, prefix_bytes=0, memory_bytes=limit)
    for name, length, count in (("wide", 2, 1150), ("long", 550, 25)):
        running.submit_row(
            Sequence(name, [i % 512 for i in range(length)], Generation(count, temperature=0.0))
        )
        while not running.is_idle:
            running.step()
            running.check_integrity()
            held = running._prefill.is_active
            assert running.kv_bytes + (550 * per_token if held else 0) <= limit


@pytest.mark.parametrize(
    ("family", "scheme"), [("llama", "affine4,9=float"), ("mamba2", "affine8,last=float")]
)
def test_a_layer_that_the_model_has_not_is_a_setting_to_mend(family: str, scheme: str) -> None:
    """The worker ends with the configuration's exit code instead of dying again and again."""
    with pytest.raises(SettingsError, match="does not fit model") as caught:
        engine(tiny_models.build(family), scheme)
    assert caught.value.exit_code == 2


def test_a_tail_is_evicted_before_its_head() -> None:
    """With room for part of a chain, its beginning is kept: an end alone is of no use."""
    model = tiny_models.build("llama")
    block = 256 * engine(model).bytes_per_token
    running = engine(model, prefix_bytes=3 * block)
    cached = []
    for turn in range(3):
        prompt = [(7 * i) % 512 for i in range(256 * 4 + 1)]
        running.submit_row(Sequence(str(turn), prompt, Generation(1, temperature=0.0)))
        cached.append(drain(running)[str(turn)].usage.cached)
    assert cached == [0, 768, 768]
    assert running.prefixes.num_bytes <= 3 * block
    assert engine(model, prefix_bytes=block - 1).prefixes.max_bytes == 0


def test_a_cancelled_prefill_is_dropped() -> None:
    """The rest of a cancelled long prompt is not computed."""
    model = tiny_models.build("llama")
    running = engine(model)
    prompt = [i % 512 for i in range(256 * 12)]
    running.submit_row(Sequence("long", prompt, Generation(5, temperature=0.0)))
    running.step()
    running.cancel("long")
    running.step()
    assert running.is_idle
    running.check_integrity()


def test_gemma2_computes_attention_itself_and_is_served() -> None:
    """gemma2 folds its query heads on its own: decode masks get an axis more, and rows agree."""
    model = tiny_models.build("gemma2")
    running = engine(model, "float")
    assert running.plan.traits.mask_rank == 5
    assert set(running.plan.paths.values()) == {None}


def test_a_model_that_disagrees_with_itself_is_refused() -> None:
    """A model whose attention ignores the batch's mask is refused with a sentence."""
    model = tiny_models.build("llama")
    attend = llama.Attention.__call__

    def unmasked(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return attend(self, x, None if x.shape[1] == 1 else mask, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.Attention, "__call__", unmasked)
        with pytest.raises(ModelError, match="not served"):
            engine(model, "affine8", backend=choose_backend())  # measured here


def test_a_row_that_finds_no_room_is_computed_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits again, though a second chunk may be computed; and goes on when there is room."""
    running = engine(tiny_models.build("llama"), slots=4)
    running.submit_row(Sequence("first", [1, 2], Generation(40, temperature=0.0)))
    while not running._rows:
        running.step()
    other = Sequence("other", [3] * 30, Generation(4, temperature=0.0))
    running.submit_row(other)
    with monkeypatch.context() as patch:
        patch.setattr(running._decode_rows, "_place", lambda *_: None)
        running.step()
        assert other.num_preempted == 1
    assert drain(running).keys() == {"first", "other"}


@pytest.mark.parametrize("is_live", [False, True])
def test_rows_that_decode_wait_for_few_chunks(is_live: bool) -> None:
    """Between two decode steps one chunk of a long prompt is computed, however many prompts wait.

    Where it is the prompt's last one, and more slots are free, the next prompt's first follows;
    but not if somebody waits for a row. A row that has only just come in does not decode yet.
    """
    running = engine(tiny_models.build("llama"), slots=4, lane_chunk=256)
    seen: list[tuple[int, bool]] = []  # since the last decode step: (chunks, whether one was last)
    begun: list[bool] = []
    advance, build = running._prefill._compute_chunk, running._build_step

    def chunk(group: Any) -> None:
        if any(row.num_dispatched for row in running._rows.values()):
            begun.append(False)
        advance(group)
        begun[-1:] = [group.is_computed] if begun else []

    def decode() -> Any:
        seen.append((len(begun), any(begun)))
        begun.clear()
        return build()

    running._prefill._compute_chunk = chunk  # type: ignore[method-assign]
    running._build_step = decode  # type: ignore[method-assign]
    running.submit_row(Sequence("first", [1, 2], Generation(60, temperature=0.0)))
    if is_live:
        running._live._until = math.inf
    for index in range(6):
        row = Sequence(str(index), [index] * (256 * 5), Generation(20, temperature=0.0))
        running.submit_row(row)
    drain(running)
    assert sum(count for count, _ in seen) > 10
    assert all(count <= 1 for count, ends in seen if is_live or not ends)
    assert max(count for count, _ in seen) == (1 if is_live else 2)


def test_rows_that_come_in_together_start_together() -> None:
    """Before any row decodes, chunk after chunk is computed, so that rows of one length end at once

    and their attention needs no mask.
    """
    running = engine(tiny_models.build("llama"), slots=8, chunk_tokens=32)
    views: list[tuple[int, bool]] = []
    view = running._slots._views.view

    def watched(layouts: Any) -> Any:
        made = view(layouts)
        views.append((made.num_rows, made.spans[None].mask is None))
        return made

    running._slots._views.view = watched  # type: ignore[method-assign]
    for index in range(16):  # a chunk takes two of them
        row = Sequence(str(index), [index + 1] * 16, Generation(5, temperature=0.0))
        running.submit_row(row)
    drain(running)
    assert views == [(8, True)] * 10


@pytest.mark.few(3)
@pytest.mark.parametrize("scheme", ["float", "affine8"])
@pytest.mark.parametrize(
    "backend",
    [
        GenericBackend(),
        x86(),
        MetalBackend(replays_steps=False),
        CudaBackend(replays_steps=False),
    ],
    ids=["generic", "x86", "metal", "cuda"],
)
def test_engines_answer_alike_under_every_backend(
    backend: Backend, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a common prefix and rows of their own give the tokens of each row alone."""
    monkeypatch.setattr(joint_product, "is_faster", lambda *_: True)
    model = tiny_models.build("qwen3")
    common = random.Random(9).choices(range(tiny_models.VOCABULARY), k=512)
    rows = prompts(4, seed=5) + [[*common, *row[:40]] for row in prompts(4, seed=6)]
    running = engine(model, scheme, backend=backend, path=None)
    for index, prompt in enumerate(rows):
        running.submit_row(Sequence(str(index), prompt, Generation(10, temperature=0.0)))
    ended = drain(running)
    running.close()
    for index, prompt in enumerate(rows):
        expected = alone_of("qwen3", tuple(prompt), 10, 8 if scheme == "affine8" else None)
        assert list(ended[str(index)].token_ids) == expected, (index, len(prompt))

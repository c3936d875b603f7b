"""Partial blocks: what prompts have in common after their last common block is computed once."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import chain, root_key
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.engine.engine import Engine
from batchkv_worker.events import Completed
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.prefix.partial_blocks import (
    MOST,
    PARTIAL_TOKENS,
    PartialBlocks,
    partial_keys,
    within,
)
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.kv.reference import attention_kind, bits
from worker.prefix.engines_on_store import (
    access,
    behind,
    cached,
    finish,
    random_prompt,
    run,
    running,
    tokens,
)

ROOT = root_key(b"")
MIB = 2**20


def computed(engine: Engine) -> int:
    """Tokens of prompts that the engine has computed."""
    return engine._prefill.num_computed


# -- keys and the index


def test_a_partial_key_names_all_tokens_up_to_there() -> None:
    """One for every 16 tokens; another token before or another root gives another key."""
    prompt = random_prompt(1, 300)
    keys = partial_keys(ROOT, prompt)
    assert len(keys) == 300 // PARTIAL_TOKENS == 18
    assert partial_keys(ROOT, prompt[:140]) == keys[:8]
    changed = [*prompt[:70], (prompt[70] + 1) % 512, *prompt[71:]]
    same = [a == b for a, b in zip(partial_keys(ROOT, changed), keys, strict=True)]
    assert same == [*[True] * 4, *[False] * 14]
    assert not {*partial_keys(root_key(b"other"), prompt)} & {*keys}
    assert not {*chain(ROOT, prompt, 16)} & {*keys}  # nor is it ever a block's key


def test_the_keys_within_a_block_are_those_before_its_end() -> None:
    """All but one of a whole block, fewer of the prompt's last tokens, none after them."""
    keys = partial_keys(ROOT, random_prompt(2, 2 * 256 + 130))
    assert within(keys, 0) == keys[:15] and within(keys, 1) == keys[16:31]
    assert within(keys, 2) == keys[32:40] and within(keys, 3) == []
    assert MOST == 15


def test_the_index_gives_the_longest_known_beginning() -> None:
    """Of any block that begins so, until that block has gone."""
    known = PartialBlocks()
    ours, others = [b"16", b"32", b"48"], [b"16", b"32 of another", b"48 of another"]
    assert known.longest(ours) == 0
    known.add(b"first", ours)
    assert known.longest(ours) == 48 and known.longest(ours[:2]) == 32
    assert known.longest(others) == 16 and known.source(b"16") == b"first"
    known.add(b"second", others[:2])
    assert known.longest(others) == 32
    known.drop(b"first")
    assert known.longest(ours) == 16 and known.source(b"16") == b"second"
    known.drop(b"second")
    known.drop(b"never there")
    assert known.longest(others) == 0 and len(known) == 0


def test_whoever_knows_a_long_beginning_knows_the_short_one() -> None:
    """Blocks that begin alike come and go in any order; rows may start after less than they found.

    An engine died of a short beginning that was lost with the last block that had brought it.
    """
    known = PartialBlocks()
    known.add(b"first", [b"16", b"32", b"48"])
    known.add(b"second", [b"16", b"other 32"])
    known.drop(b"second")
    assert known.longest([b"16", b"32", b"48"]) == 48 and known.source(b"16") == b"first"
    rng, held = random.Random(3), dict[bytes, list[bytes]]()
    for step in range(2000):
        if held and rng.random() < 0.5:
            known.drop(gone := rng.choice([*held]))
            del held[gone]
            continue
        path = rng.choice(["aaa", "aab", "abb", "bcd"])[: rng.randrange(1, 4)]
        held[b"%d" % step] = keys = [path[: n + 1].encode() for n in range(len(path))]
        known.add(b"%d" % step, keys)
        assert all(known.source(key) in held for keys in held.values() for key in keys)


def test_a_block_that_is_stored_again_keeps_its_entry() -> None:
    """Parts of a block come one by one; it is dropped once, and nothing stays behind."""
    known = PartialBlocks()
    for _ in range(2):
        known.add(b"block", [b"16"])
    known.add(b"empty", [])
    known.drop(b"block")
    assert len(known) == 0
    known.add(b"block", [b"16"])
    known.clear()
    assert known.longest([b"16"]) == 0


# -- engines


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "float"),
        ("llama", "affine8"),
        ("llama", "turbo4"),
        ("qwen3", "affine4"),
        # Not affine8: with one thread of OpenBLAS an AMD processor rounds a tie otherwise.
        ("gemma3_text", "affine4"),
        ("gpt_oss", "float"),
        ("deepseek_v3", "affine8"),
    ],
)
@pytest.mark.parametrize("num_common", [600, 150])
def test_common_tokens_are_computed_once_and_change_no_token(
    family: str, scheme: str, num_common: int
) -> None:
    """Prompts that part within a block, with own ends of 20 to 400 tokens, as without a cache."""
    model = tiny_models.build(family)
    prompts = behind(num_common, 30, 20, 33, 40, 25, 400, 38, 31)
    with running(model, None, scheme, prefix_bytes=0) as engine:
        expected = tokens(run(engine, prompts))
        whole = computed(engine)
    with running(model, None, scheme) as engine:
        events = run(engine, prompts)
        once = computed(engine)
    assert tokens(events) == expected
    found = num_common - num_common % PARTIAL_TOKENS
    assert sorted(cached(events)) == [0, *[found] * 7]
    assert once == whole - 7 * found


def test_rows_of_one_group_take_beginnings_of_different_blocks() -> None:
    """Each its own: of two blocks that begin with the same 64 tokens, and not with the same 192."""
    model = tiny_models.build("llama")
    common, (one, other) = random_prompt(1, 64), (random_prompt(seed, 236) for seed in (2, 3))
    first, second = [*common, *one], [*common, *other]
    later = [[*prompt[:200], *random_prompt(4, 20)] for prompt in (first, second)]
    with running(model, None, prefix_bytes=0) as engine:
        expected = tokens(run(engine, later))
    with running(model, None) as engine:
        for prompt in (first, second):
            run(engine, [prompt])
        events = run(engine, later)
    assert tokens(events) == expected and cached(events) == [192, 192]


@pytest.mark.parametrize(("length", "found"), [(320, 304), (321, 320)])
def test_the_last_token_of_a_prompt_is_never_cached(length: int, found: int) -> None:
    """The first step takes it, so a partial block may not end with it."""
    model, prompt = tiny_models.build("llama"), random_prompt(1, 600)
    with running(model, None, prefix_bytes=0) as engine:
        expected = tokens(run(engine, [prompt[:length]]))
    with running(model, None) as engine:
        run(engine, [prompt])
        events = run(engine, [prompt[:length]])
    assert tokens(events) == expected and cached(events) == [found]


def test_partial_keys_are_of_the_tokens_that_may_be_cached() -> None:
    """No keys beyond the room for blocks, and other ones under another root."""
    kinds = [attention_kind("float")]
    costs = costs_of(kinds)
    row = Sequence("0", random_prompt(1, 1000), Generation(1))
    found = []
    for root in (b"one", b"another"):
        memory = PrefixCache(2 * 256 * costs.per_new_token, costs, kinds, root)
        memory.name(row)
        assert len(row.block_keys) == 2 and len(row.partial_keys) == 32
        found.append(row.partial_keys)
    assert not {*found[0]} & {*found[1]}


def test_a_model_with_states_takes_whole_blocks_alone() -> None:
    """A state is of a block's last token: it cannot be cut."""
    model = tiny_models.build("qwen3_next")
    prompts = behind(600, 30, 20, 33)
    with running(model, None, prefix_bytes=0) as engine:
        expected = tokens(run(engine, prompts))
    with running(model, None) as engine:
        events = run(engine, prompts)
    assert tokens(events) == expected
    assert sorted(cached(events)) == [0, 512, 512]


@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_a_shared_prefix_may_end_within_a_block(scheme: str) -> None:
    """And a row behind it still stores whole blocks: the first with what the prefix has of it."""
    model = tiny_models.build("llama")
    prompts = behind(600, 30, 20, 33, 400, 31)
    with running(model, None, scheme, share=False) as engine:
        expected = tokens(run(engine, prompts))
        wanted = first_layer(engine, prompts[3])
        keys = engine.prefixes.keys(prompts[3], None)
    seen = set[tuple[int, ...]]()
    with running(model, None, scheme, prefix_cells=1) as engine:
        for index, prompt in enumerate(prompts):
            engine.submit_row(Sequence(str(index), prompt, Generation(8, temperature=0.0)))
        ended = {}
        while not engine.is_idle:
            for event in engine.step():
                assert isinstance(event, Completed)
                ended[event.job_id] = event
            held = engine._slots.layouts.prefixes.values()
            seen |= {tuple(part.num_own for part in leaf.chain) for leaf in held}
        assert seen == {(592,)}
        assert tokens([ended[str(index)] for index in range(len(prompts))]) == expected
        assert len(keys) == 3 and bits(first_layer(engine, prompts[3])) == bits(wanted)
        block = engine.prefixes._blocks[keys[2]].parts[Kind.KV]
        row = Sequence("0", prompts[0], Generation(1))
        engine.prefixes.name(row)
        leaders = engine.prefixes.prefix_pieces(row, 512, 592)
        assert leaders is not None
        for layer, pieces in leaders.items():
            own = tuple(part[..., :80, :] for part in block.layer(layer) or ())
            assert bits(own) == bits(pieces)


def first_layer(engine: Engine, prompt: list[int]) -> Pieces:
    """What an engine's memory has of a prompt's whole blocks; no attention comes before it."""
    row = Sequence("0", prompt, Generation(1))
    engine.prefixes.name(row)
    found = engine.prefixes.prefix_pieces(row, 0, len(row.block_keys) * 256)
    assert found is not None
    return found[0]


def test_a_leader_shares_what_is_stored_of_its_prompt() -> None:
    """Rows that came after its end was computed: it is stored for nobody, whole blocks are."""
    model, prompt = tiny_models.build("llama"), random_prompt(1, 590)
    greedy = Generation(40, temperature=0.0, ignore_eos=True)
    with running(model, None, prefix_cells=1) as engine:
        begun = prompt[:64] + random_prompt(9, 300)  # decodes, and has the first 64 tokens stored
        engine.submit_row(Sequence("begun", begun, replace(greedy, max_tokens=400)))
        while not engine._rows:
            engine.step()
        engine.submit_row(Sequence("leader", prompt, greedy))
        while engine._scheduler.group is None:
            engine.step()
        assert engine._scheduler.group.position == 64 + 512
        for index in range(5):
            late = prompt + random_prompt(20 + index, 30)
            engine.submit_row(Sequence(str(index), late, greedy))
        shared: dict[str, int] = {}
        while len(shared) < 4:
            engine.step()
            held = engine._slots.layouts.prefixes
            shared |= {engine._rows[slot].job_id: one.num_tokens for slot, one in held.items()}
        assert shared["leader"] == 512 and {shared[str(index)] for index in range(3)} == {576}


@pytest.mark.parametrize("points", [(16,), (192,), (512, 592), (256, 448, 512)])
def test_a_part_of_a_block_holds_no_whole_block(points: tuple[int, ...]) -> None:
    """Also when the block is evicted: no more is in memory than is counted."""
    model, prompt = tiny_models.build("llama"), random_prompt(1, 1000)
    with running(model, None, path="folded") as engine:
        run(engine, [prompt])
        row = Sequence("0", prompt, Generation(1))
        engine.prefixes.name(row)
        prefix = engine._builder.build(row, points)
        assert prefix is not None
        mx.eval([part.arrays for part in prefix.chain])
        engine.prefixes.clear()
        engine._slots.drop()
        gc.collect()
        before = mx.get_active_memory()
        counted = prefix.num_tokens * engine.plan.costs.per_prefix_token
        del prefix
        gc.collect()
        assert before - mx.get_active_memory() < 1.05 * counted + 2**16


@pytest.mark.parametrize("count", [1, 4])
def test_choices_share_a_prompt_that_ends_within_a_block(count: int) -> None:
    """No other row waits for its end, so it is stored for them; a row alone stores none."""
    model = tiny_models.build("llama")
    with running(model, None, prefix_cells=1) as engine:
        row = Sequence("0", random_prompt(1, 600), Generation(8, temperature=0.0))
        engine.submit_row(row, count)
        seen = set[int]()
        while not engine.is_idle:
            engine.step()
            seen |= {one.num_tokens for one in engine._slots.layouts.prefixes.values()}
    assert seen == ({592} if count > 1 else set())


def test_the_end_of_a_prompt_is_stored_only_for_rows_that_wait() -> None:
    """One row alone stores its full blocks; with others behind the same tokens, 64 more."""
    model = tiny_models.build("llama")
    prompts = behind(256 + 70, 20, 21)
    with running(model, None) as engine:
        run(engine, prompts[:1])
        assert len(engine.prefixes) == 1
    with running(model, None) as engine:
        run(engine, prompts)
        assert len(engine.prefixes) == 2


def test_a_later_row_takes_the_beginning_of_a_whole_block() -> None:
    """Also when nobody waited for it: every full block is there, and any begins with something."""
    model = tiny_models.build("llama")
    first, second = behind(200, 100, 90)
    with running(model, None) as engine:
        run(engine, [first])
        (event,) = run(engine, [second])
    with running(model, None, prefix_bytes=0) as engine:
        assert tokens([event]) == tokens(run(engine, [second]))
    assert event.usage.cached == 192


def test_rows_of_another_salt_find_nothing() -> None:
    """As with blocks: what one key's prompts begin with is nobody else's to see."""
    model = tiny_models.build("llama")
    first, second = behind(200, 100, 90)
    with running(model, None) as engine:
        run(engine, [first])
        salted = Sequence("0", second, Generation(8, temperature=0.0), cache_salt="other")
        engine.submit_row(salted)
        (event,) = finish(engine, 1)
    assert event.usage.cached == 0


def test_beginnings_of_blocks_from_the_shared_store_serve() -> None:
    """A second engine fetches a block, and another row takes the beginning of that block."""
    model, tier = tiny_models.build("gemma3_text"), MemoryTier(256 * MIB)
    first, second = behind(256 + 140, 150, 30)
    with running(model, access([tier])) as engine:
        run(engine, [first])
    with running(model, access([tier])) as engine:
        (again,) = run(engine, [first])
        (event,) = run(engine, [second])
    with running(model, None, prefix_bytes=0) as engine:
        assert tokens([again, event]) == tokens(run(engine, [first, second]))
    assert cached([again, event]) == [512, 256 + 128]


def test_a_row_on_the_beginning_of_a_converted_block_publishes_nothing() -> None:
    """What it computes depends on values that another scheme has rounded."""
    model, tier = tiny_models.build("llama"), MemoryTier(256 * MIB)
    first, second = behind(140, 200, 400)
    with running(model, access([tier]), "float") as engine:
        run(engine, [first])
    with running(model, access([tier], adopts_float=True), "affine8") as engine:
        assert cached(run(engine, [first])) == [256]
        assert cached(run(engine, [second])) == [128]
        assert engine.client.flush(30) and engine.client.counters.get("published", 0) == 0

"""Whole engines whose chunks are packed by one kernel give the tokens of MLX's operations.

The kernel is compiled as C++; shapes are those of CUDA.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.kv.backends.contract import Change, ChunkKernels, DrawKernel, Pacing
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.gpu import (
    joint_product,
    residual_blocks,
    rotary_chunks,
    rotary_layers,
)
from batchkv_worker.kv.backends.gpu.residual_blocks import num_blocks
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.pacing import UNPACED
from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Constant, Input, Launch, Run, View
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from batchkv_worker.kv.layers import chunk_packing
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.start import chunkcheck, plan
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

NAME, DENSE, BEHIND = "batchkv_chunk", "batchkv_chunk_d", "batchkv_chunk_db"
PREFIX = random_prompt(99, 258)


@dataclass(frozen=True, eq=False)
class Backend(CudaBackend):
    """CUDA's shapes. ``made`` makes the kernel for chunks; without it there is none."""

    made: Launch | None = None
    fuses: bool = False

    def launch(self) -> Launch:
        assert self.made is not None
        return self.made

    def chunk_kernels(self, scheme: LayerScheme, dtype: mx.Dtype) -> ChunkKernels | None:
        return None if self.made is None else super().chunk_kernels(scheme, dtype)

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        return super().changes(model, dtype, rows) if self.fuses else ()

    def draw_kernel(self) -> DrawKernel | None:
        return None

    def record_kernels(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> None:
        return None

    def pacing(self, launches: Launches) -> Pacing:
        return UNPACED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


@pytest.fixture
def launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CppLaunch:
    """The kernel wins each comparison of times."""
    monkeypatch.setattr(chunkcheck, "gain", lambda *_: 2.0)
    monkeypatch.setattr(chunkcheck, "TOKENS", 16)
    monkeypatch.setattr(chunkcheck, "_MORE_TOKENS", 20)
    return CppLaunch(folder)


def crowd_of(family: str, scheme: str, launch: Launch | None, **changes: Any) -> Crowd:
    how: dict[str, Any] = {"path": "folded", "scheme": scheme, "prefix_cells": 1, **changes}
    fields = ("most_joined", "joins_groups")
    backend = Backend(
        made=launch,
        fuses=how.pop("fuses", False),
        **{name: how.pop(name, getattr(CudaBackend, name)) for name in fields},
    )
    return Crowd(family, backend=backend, **how)


def prompts() -> dict[str, list[int]]:
    """Groups of one and several rows, of unequal length; two are behind one prefix."""
    found = {f"row {n}": random_prompt(n, 5 + 9 * n) for n in range(5)}
    return found | {f"behind {n}": PREFIX + random_prompt(n + 9, 7 + 4 * n) for n in range(3)}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "affine8"),
        ("qwen3", "affine4r+affine8"),
        ("llama", "affine8+affine4r"),
        ("gpt_oss", "affine8"),  # windows and sinks
        ("gear", "affine6"),  # windows and states
    ],
)
def test_whole_engines_give_the_same_tokens(family: str, scheme: str, launch: CppLaunch) -> None:
    """Short prompts, prompts of two chunks and behind a prefix: each form of the kernel serves."""
    crowd = crowd_of(family, scheme, launch, chunk_tokens=256)
    launch.counts.clear()
    found = crowd.answers(prompts())
    assert set(launch.counts) == {NAME, DENSE, BEHIND}
    launch.counts.clear()
    assert found == crowd_of(family, scheme, None, chunk_tokens=256).answers(prompts())
    assert not launch.counts


def test_values_are_read_where_one_product_gave_them(
    launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one kernel for norms and positions of chunks, values are no copy.

    All kernels of ours serve here at once.
    """
    monkeypatch.setattr(rotary_layers, "_is_faster", lambda *shape: True)
    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: True)
    monkeypatch.setattr(rotary_chunks, "gain", lambda *_, **__: 2.0)
    monkeypatch.setattr(residual_blocks, "_gain", lambda *_: 2.0)
    values: list[Input] = []

    def noting(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)
        if not body.name.startswith(NAME):
            return run
        return lambda inputs, *rest: (values.append(inputs[1]), run(inputs, *rest))[1]

    crowd = crowd_of("qwen3", "affine8", noting, fuses=True, chunk_tokens=256)
    values.clear()
    found = crowd.answers(prompts())
    assert values and all(isinstance(one, View) for one in values)
    assert num_blocks(crowd.model) == len(crowd.model.layers) == crowd.engine.plan.num_packed
    assert VALUE_PARTS._last is None
    assert found == crowd_of("qwen3", "affine8", None, chunk_tokens=256).answers(prompts())


@pytest.mark.parametrize("scheme", ["float", "turbo4", "affine8+float"])
def test_other_schemes_are_packed_by_mlx(scheme: str, launch: CppLaunch) -> None:
    """There is no kernel for them."""
    crowd = crowd_of("llama", scheme, launch)
    crowd.run("0", random_prompt(0, 20))
    assert not launch.counts


def prefill_layer(launch: Launch, **changes: Any) -> tuple[AttentionPrefill, Crowd]:
    """The first layer of a group of prompts, whose dense arrays nobody reads."""
    crowd = crowd_of("llama", "affine8", launch)
    kind: Any = crowd.engine.plan.kinds[0]
    layer = kind.prefill(64, 64)
    assert isinstance(layer, AttentionPrefill) and not kind.is_read
    return layer, crowd


def numbers(layer: AttentionPrefill, rows: int, tokens: int) -> list[mx.array]:
    shape = layer._scheme.shape
    heads = shape.num_heads
    mx.random.seed(tokens)
    size = shape.key_size
    return [mx.random.normal((rows, count, tokens, size)) for count in (2 * heads, heads, heads)]


def attended(layer: AttentionPrefill, queries: mx.array, mask: Any) -> mx.array:
    attend = layer.attend
    assert attend is not None
    return attend(queries, 0.2, mask, None)


@pytest.mark.parametrize("gains", [(2.0, 0.9), (1.01, 2.0)])
def test_a_kernel_that_loses_in_larger_chunks_is_not_used(
    gains: tuple[float, float], launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches count in small chunks, and bytes in large ones."""
    found = iter(gains)
    monkeypatch.setattr(chunkcheck, "gain", lambda *_: next(found))
    crowd = crowd_of("llama", "affine8", launch)
    assert crowd.engine.plan.num_packed == 0


def test_a_layer_with_a_window_has_no_pads_behind_it(launch: CppLaunch) -> None:
    """Its mask is no causal one then, and would not hide them."""
    crowd = crowd_of("gpt_oss", "affine8", launch)
    kind: Any = next(one for one in crowd.engine.plan.kinds if one.window is not None)
    for tokens, rows in ((kind.window + 1, 3), (kind.window, 8)):
        layer = kind.prefill(64, 64)
        _, keys, values = numbers(layer, 3, tokens)
        layer.update_and_fetch(keys, values)
        assert layer._chunk is not None and layer._chunk.keys.shape[0] == rows


def test_a_prefix_of_too_few_numbers_is_not_joined(launch: CppLaunch) -> None:
    """Metal binds small arrays in another address space, which the kernel does not read."""
    layer, _ = prefill_layer(launch)
    _, keys, values = numbers(layer, 2, 9)
    count = layer._scheme.shape.num_heads * layer._scheme.shape.key_size // 64
    for tokens, form in ((7 // count, DENSE), (-(-8 // count), BEHIND)):
        layer, _ = prefill_layer(launch)
        before = numbers(layer, 1, tokens)
        prefix = layer._scheme.keys.pack(before[1]), layer._scheme.values.pack(before[2])
        layer.share([prefix], tokens)
        launch.counts.clear()
        layer.update_and_fetch(keys, values)
        assert set(launch.counts) == {form}


def test_longer_chunks_than_a_grid_are_packed_by_mlx(
    launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's grids have an end."""
    layer, _ = prefill_layer(launch)
    _, keys, values = numbers(layer, 2, 9)
    launch.counts.clear()
    monkeypatch.setattr(chunk_packing, "MOST_COLUMNS", 8)
    layer.update_and_fetch(keys, values)
    assert not launch.counts and layer._chunk is None
    layer, _ = prefill_layer(launch)
    launch.counts.clear()
    monkeypatch.setattr(chunk_packing, "MOST_COLUMNS", 100)
    layer.update_and_fetch(keys, values)
    assert set(launch.counts) == {DENSE} and layer._chunk and layer._chunk.keys.shape[2] == 100


@pytest.mark.parametrize("mask", ["causal", None, "array"])
def test_attention_has_no_pads(mask: Any, launch: CppLaunch) -> None:
    """A causal mask hides zeros behind a row; without it, or with another, they are cut off."""
    layer, _ = prefill_layer(launch)
    queries, keys, values = numbers(layer, 3, 9)
    shown = mx.random.uniform(shape=(9, 9)) < 0.7 if mask == "array" else mask
    if mask == "array":
        shown = shown | mx.eye(9).astype(mx.bool_)
    layer.update_and_fetch(keys, values)
    chunk = layer._chunk
    assert chunk is not None and chunk.keys.shape[0] == 8 and chunk.keys.shape[2] == 128
    found = attended(layer, queries, shown)
    assert layer._chunk is None
    again = attended(layer, queries, shown)  # as a layer that shares these keys does
    assert found.shape == again.shape == queries.shape
    assert mx.allclose(found, again, atol=1e-5)


def test_a_chain_of_prefixes_comes_before_a_chunk(launch: CppLaunch) -> None:
    """The kernel joins one with it. More are given back by MLX, with the same result."""
    layer, _ = prefill_layer(launch)
    queries, keys, values = numbers(layer, 2, 9)
    prefixes = [
        (layer._scheme.keys.pack(one[1]), layer._scheme.values.pack(one[2]))
        for one in (numbers(layer, 1, 5), numbers(layer, 1, 7))
    ]
    layer.share(prefixes, 12)
    launch.counts.clear()
    layer.update_and_fetch(keys, values)
    assert set(launch.counts) == {DENSE}
    found = attended(layer, queries, "causal")
    assert mx.allclose(found, attended(layer, queries, "causal"), atol=1e-5)


def test_numbers_of_another_dtype_are_packed_by_mlx(launch: CppLaunch) -> None:
    """A layer may give other numbers than the model's."""
    layer, _ = prefill_layer(launch)
    _, keys, values = numbers(layer, 2, 9)
    launch.counts.clear()
    layer.update_and_fetch(keys.astype(mx.bfloat16), values.astype(mx.bfloat16))
    assert not launch.counts and layer.arrays[1].dtype == mx.bfloat16


@pytest.mark.parametrize("is_attended", [True, False])
def test_dense_numbers_are_dropped(is_attended: bool, launch: CppLaunch) -> None:
    """When they were attended to, or else at the chunk's end: layers hold parts alone."""
    layer, _ = prefill_layer(launch)
    queries, keys, values = numbers(layer, 2, 9)
    mx.eval(queries, keys, values)
    gc.collect()
    before = mx.get_active_memory()
    layer.update_and_fetch(keys, values)
    chunk = layer._chunk
    assert chunk is not None
    dense_bytes = chunk.keys.nbytes + chunk.values.nbytes
    del chunk
    if is_attended:
        mx.eval(attended(layer, queries, "causal"))
    else:
        layer.end()
    mx.eval(layer.arrays)
    gc.collect()
    held = sum(one.nbytes for one in layer.arrays)
    assert held < dense_bytes / 16
    assert mx.get_active_memory() - before < dense_bytes / 2


@pytest.mark.parametrize("changes", [{"most_joined": 1}, {}], ids=["numbers", "columns"])
def test_a_long_prefix_is_not_copied_for_each_row(
    changes: dict[str, int], launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a limit a few rows are joined with it at a time, as without the kernel."""
    if not changes:
        monkeypatch.setattr(chunk_packing, "MOST_COLUMNS", 64)
    rows = {name: prompt for name, prompt in prompts().items() if "behind" in name}
    crowd = crowd_of("llama", "affine8", launch, **changes)
    launch.counts.clear()
    found = crowd.answers(rows)
    assert DENSE in launch.counts and BEHIND not in launch.counts
    assert found == crowd_of("llama", "affine8", None).answers(rows)


@pytest.mark.parametrize("scheme", ["affine8", "float", "k8v4", "turbo4"])
def test_few_rows_behind_each_of_several_prefixes_are_one_chunk(
    scheme: str, launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each behind its own, whatever its length of prompt; and they share them in their slots."""
    groups = {f"{n} {m}": random_prompt(n, 330) + random_prompt(10 * n + m, 9 + 20 * m)
              for n in range(5) for m in range(3)}  # fmt: skip
    chunks: list[tuple[int, bool]] = []
    real = Prefill._compute_chunk

    def noted(prefill: Prefill, group: PrefillGroup) -> None:
        chunks.append((len(group.rows), group.is_apart))
        real(prefill, group)

    monkeypatch.setattr(Prefill, "_compute_chunk", noted)
    found = []
    for joins in (True, False):
        crowd = crowd_of("llama", scheme, launch, joins_groups=joins, slots=16, chunk_tokens=1024)
        chunks.clear()
        launch.counts.clear()
        for name, prompt in groups.items():
            crowd.add(name, prompt, count=6)
        shared = set()
        while not crowd.engine.is_idle:
            crowd.step()
            shared |= {one.num_tokens for one in crowd.engine._slots.layouts.prefixes.values()}
        found.append({name: crowd.tokens(name) for name in groups})
        assert (BEHIND in launch.counts) == (scheme in ("affine8", "k8v4"))
        assert shared == {320}
        if joins:
            assert [one for one in chunks if one[1]] == [(6, True), (4, True)]
        else:
            assert chunks.count((2, False)) == 6 and not any(apart for _, apart in chunks)
    assert found[0] == found[1]


@dataclass(frozen=True, eq=False)
class WithRecords(Backend):
    """Slots that keep records."""

    def record_kernels(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> Any:
        return PlainKernels(RecordLayout.of(scheme, dtype))


@pytest.mark.parametrize("has_room", [True, False], ids=["sharing", "no room to share"])
@pytest.mark.parametrize(("scheme", "path"), [("float", "folded"), ("affine8", "kernel")])
def test_rows_behind_several_warm_prefixes(
    scheme: str, path: str, has_room: bool, launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot has the prefixes any more. Rows share them again, or keep them as their own."""
    if not has_room:
        monkeypatch.setattr(Memory, "fits_shared_prefix", lambda *_: False)
    apart: list[int] = []
    real = Prefill._compute_chunk

    def noted(prefill: Prefill, group: PrefillGroup) -> None:
        apart.extend([len(group.rows)] * group.is_apart)
        real(prefill, group)

    monkeypatch.setattr(Prefill, "_compute_chunk", noted)
    found = []
    for joins in (True, False):
        apart.clear()
        backend = WithRecords(made=launch, joins_groups=joins)
        how = {"slots": 16, "chunk_tokens": 1024, "prefix_cells": 1}
        crowd = Crowd("llama", backend=backend, path=path, scheme=scheme, **how)
        most = 0
        for wave in range(2):
            for group in range(4):
                for row in range(2 + group % 3):  # other numbers of rows, and of tokens
                    own = random_prompt(1000 * wave + 10 * group + row, 20 + (7 * group + row) % 5)
                    crowd.add(f"{wave} {group} {row}", random_prompt(group, 330) + own, 6)
            while not crowd.engine.is_idle:
                crowd.step()
                parts = crowd.engine._slots.layouts.prefixes
                most = max(most, len(parts)) if wave else most
        assert apart == ([11] if joins else [])
        assert most == (11 if has_room or not joins else 0)
        found.append({name: crowd.tokens(name) for name in crowd.prompts})
    assert found[0] == found[1]


@pytest.mark.parametrize("what", ["other numbers", "slower", "refused", "unfinished"])
def test_a_kernel_that_is_not_better_is_not_used(
    what: str,
    folder: Path,
    tmp_path: Path,
    launch: CppLaunch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other numbers in one of its forms, no gain, a compiler's refusal, starts that ended in it."""
    said = {
        "other numbers": "packs chunks of affine8/g64 differently",
        "slower": "",
        "refused": "chunks of affine8/g64 are not packed by one kernel: no such word",
        "unfinished": "the kernel for chunks is not used for affine8/g64",
    }[what]
    made: Any = launch
    kept = Measurements.in_home(tmp_path, {})
    if what == "other numbers":
        fault = "GIVEN_BACK(T, packed.scale, packed.codes.at[i], packed.bias)", "0.0f"
        made = CppLaunch(folder, faults=(fault,))
    if what == "slower":
        monkeypatch.setattr(chunkcheck, "gain", lambda *_: 1.01)
    if what == "refused":

        def refuse(*_: Any) -> Any:
            raise RuntimeError("no such word")

        made = lambda *_: refuse  # noqa: E731
    if what == "unfinished":
        monkeypatch.setattr(Measurements, "begin_try", lambda *_: False)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        how: Any = {"path": "folded", "scheme": "affine8"}
        crowd = Crowd("llama", backend=Backend(made=made, measurements=kept), **how)
    assert said in caplog.text and bool(said) == bool(caplog.text)
    launch.counts.clear()
    crowd.run("0", random_prompt(0, 20))
    assert not launch.counts


def test_a_start_with_another_kernel_checks_anew(
    tmp_path: Path, launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier start checked was a model without it; afterwards nothing is checked."""
    checked: list[bool] = []
    real = plan.find_traits

    def noting(*given: Any) -> Any:
        checked.append(True)
        return real(*given)

    monkeypatch.setattr(plan, "find_traits", noting)
    for made, count in ((None, 1), (launch, 2), (launch, 2), (None, 2)):
        kept = Measurements.in_home(tmp_path, {})
        how: Any = {"path": "folded", "scheme": "affine8"}
        Crowd("llama", backend=Backend(made=made, measurements=kept), **how)
        assert len(checked) == count


def test_a_second_start_compares_nothing(
    tmp_path: Path, launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is kept."""
    how: Any = {"path": "folded", "scheme": "affine8"}
    for is_first in (True, False):
        kept = Measurements.in_home(tmp_path, {})
        crowd = Crowd("llama", backend=Backend(made=launch, measurements=kept), **how)
        kind: Any = crowd.engine.plan.kinds[0]
        assert kind.chunks is not None
        if is_first:
            monkeypatch.setattr(chunkcheck, "are_better", lambda *_: pytest.fail("compared again"))


def test_attention_alone_is_padded_to_few_shapes(
    launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the model computes an eighth of padding at most, and eight tokens."""
    lengths: set[tuple[int, int]] = set()
    widths: list[tuple[int, int]] = []
    attention, begin = mx.fast.scaled_dot_product_attention, AttentionPrefill.begin

    def watched(queries: mx.array, keys: mx.array, *rest: Any, **named: Any) -> mx.array:
        if queries.shape[2] > 1:
            lengths.add((queries.shape[2], keys.shape[2] - queries.shape[2]))
        return attention(queries, keys, *rest, **named)

    def noted(layer: AttentionPrefill, chunk: Chunk) -> None:
        widths.append((chunk.width, max(chunk.lengths or [chunk.width])))
        begin(layer, chunk)

    wanted = crowd_of("llama", "affine8", None).answers(prompts())
    crowd = crowd_of("llama", "affine8", launch)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(AttentionPrefill, "begin", noted)
    assert crowd.answers(prompts()) == wanted
    behind = {length for length, history in lengths if history}
    first = {length for length, history in lengths if not history}
    assert behind == {64} and first <= {128, 256, 384}
    assert {width for width, _ in widths} == {16, 32, 288}
    assert all(width <= max(tokens * 9 / 8 + 1, tokens + 7) for width, tokens in widths), widths

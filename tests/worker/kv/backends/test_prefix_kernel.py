"""The kernel for shared prefixes: its callers on any device, the kernel itself on CUDA.

Elsewhere a function of MLX operations replaces it, which reads its inputs by the kernel's names.
The kernel's source is also compiled for a CPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.schedule.prefix_split import PrefixCosts
from batchkv_worker.kv.attention import paths, shared_prefix
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.attention.paths import Path as AttentionPath
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend, Change, PrefixKernel
from batchkv_worker.kv.backends.cuda import prefix_kernel
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.cuda.prefix_kernel import CudaPrefixKernel
from batchkv_worker.kv.backends.cuda.prefix_kernel_source import Variant
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu.backend import GpuBackend
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.schemes.packing import LayerScheme, LayerShape, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.start import decision, layer_choice, pathcheck, prefix_cost
from batchkv_worker.kv.types import PackedKV
from worker.kv.block_of_threads import in_threads, is_there_a_compiler
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import x86

SCALE = 0.2
SHAPES = (LayerShape(2, 64, 64), LayerShape(1, 32, 64), LayerShape(4, 128, 128))
has_cuda = device.kind() == "cuda"


def in_place_of(variant: Variant) -> Callable[..., list[mx.array]]:
    """A function in place of the kernel. It computes the same and checks the shapes it gets."""

    def kernel(
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        given = dict(zip(variant.inputs, inputs, strict=True))
        constants = dict(template)
        queries = given["queries"]
        rows, heads, lines, size = queries.shape
        assert (constants["KEY_SIZE"], constants["LINES"]) == (size, lines)
        assert constants["VALUE_SIZE"] == given["values"].shape[-1]
        same = ("queries", "keys", "values", *(["sinks"] if variant.has_sinks else []))
        assert {given[name].dtype for name in same} == {constants["T"]}
        warps = constants["WARPS"] * 32
        assert (grid, threadgroup) == ((heads * warps, rows, 1), (warps, 1, 1))
        scores = [queries.astype(mx.float32) @ given["keys"].astype(mx.float32).swapaxes(-1, -2)]
        if variant.has_mask:
            assert given["mask"].shape == (rows, scores[0].shape[-1])
            scores[0] = mx.where(given["mask"][:, None, None], scores[0], -1e30)
        scores[0] = scores[0].swapaxes(0, 1)
        for n in range(variant.prefixes):
            prefix = given[f"prefix_scores{n}"]
            assert prefix.shape[:-1] == (1, heads, rows * lines)
            scores.append(prefix.reshape(heads, rows, lines, -1).astype(mx.float32))
        scores += [given[f"score{n}"] for n in range(variant.partials)]
        if variant.has_sinks:
            sinks = given["sinks"].reshape(heads, 1, lines, 1).astype(mx.float32)
            scores.append(mx.broadcast_to(sinks, (heads, rows, lines, 1)))
        top = mx.concatenate([part.max(axis=-1, keepdims=True) for part in scores], axis=-1)
        weights = [mx.exp(part - top.max(axis=-1, keepdims=True)) for part in scores]
        total = sum(part.sum(axis=-1, keepdims=True) for part in weights)
        suffix = weights[0] @ given["values"].astype(mx.float32).swapaxes(0, 1)
        for n, weight in enumerate(weights[1 + variant.prefixes :][: variant.partials]):
            suffix = suffix + weight * given[f"value{n}"].astype(mx.float32)
        found = [suffix, *weights[1 : 1 + variant.prefixes]]
        return [
            (part / total).reshape(shape).astype(dtype)
            for part, shape, dtype in zip(found, output_shapes, output_dtypes, strict=True)
        ]

    return kernel


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernel by a function of MLX operations, which may be chosen on any device."""
    monkeypatch.setattr(prefix_kernel, "_kernel", in_place_of)
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))  # long samples take long in its place


class AnyCuda(CudaBackend):
    """CUDA's backend for layers of any size, without changes of the model."""

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        return ()

    def prefix_kernel(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> PrefixKernel:
        return CudaPrefixKernel(lines, dtype)


BACKEND = AnyCuda(columns_multiple=1, rows_multiple=1)


def layer_of(
    scheme: LayerScheme, dtype: mx.Dtype, path: AttentionPath = "folded"
) -> LayerAttention:
    return LayerAttention(BACKEND, scheme, dtype, path)


def scheme_of(name: str, shape: LayerShape, path: AttentionPath = "folded") -> LayerScheme:
    return paths.in_slots(fit_model(SchemeSpec.parse(name), [shape])[0], path)


def line(scheme: LayerScheme, rows: int, columns: int, dtype: mx.Dtype) -> PackedKV:
    shape = scheme.shape
    keys, values = (
        mx.random.normal((rows, shape.num_heads, columns, size)).astype(dtype)
        for size in (shape.key_size, shape.value_size)
    )
    return scheme.keys.pack(keys), scheme.values.pack(values)


def check(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    lines: int,
    variant: Variant,
    *,
    rows: int = 5,
    loud: float = 1,
) -> None:
    """Attention gives the same with and without the kernel; large ``loud`` spreads the scores."""
    mx.random.seed(rows)
    heads, columns = scheme.shape.num_heads * lines, 21
    queries = (loud * mx.random.normal((rows, heads, 1, scheme.shape.key_size))).astype(dtype)
    shared = [line(scheme, 1, 9 + 40 * n, dtype) for n in range(variant.prefixes)]
    # As in slots, the keys and values are some columns of a larger buffer.
    wide = line(scheme, rows, columns + 7, dtype)
    own = tuple(tuple(part[..., 3 : 3 + columns, :] for part in parts) for parts in wide)
    mask = mx.arange(columns) >= 4 * mx.arange(rows).reshape(-1, 1, 1, 1)
    # Models may store sinks in float32. These are large enough to take some of the weight.
    sinks = 6 + mx.random.normal((heads,)) if variant.has_sinks else None
    # As in groups, the rows are some of those that share a prefix.
    more = mx.concatenate([queries[:1], queries, queries[:1]])
    layer = layer_of(scheme, dtype)
    before = [
        shared_prefix.attend_partial(layer, more, line(scheme, 1, 30, dtype), SCALE).of(
            slice(1, rows + 1)
        )
        for _ in range(variant.partials)
    ]
    answers = []
    for kernel in (None, CudaPrefixKernel(lines, dtype)):
        rest = (shared, own, SCALE, mask if variant.has_mask else None, sinks, before)
        answers.append(shared_prefix.attend(replace(layer, kernel=kernel), queries, *rest))
    plain, found = answers
    assert found.shape == plain.shape
    assert found.dtype == plain.dtype
    apart = mx.abs(plain - found).max().item()
    bound = 1e-3 if dtype == mx.float32 else 0.02  # CUDA's products may round to 19 bits
    assert apart <= bound * mx.abs(plain).max().item(), (variant, apart)


VARIANTS = [
    Variant(prefixes, partials, has_mask, has_sinks)
    for prefixes, partials in product((0, 1, 2), (0, 1, 2))
    for has_mask, has_sinks in product((False, True), (False, True))
    if prefixes or partials
]


@pytest.mark.parametrize("name", ["float", "affine8", "affine4r"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rest_of_attention_fits_the_kernel(
    replaced: None, name: str, shape: LayerShape
) -> None:
    """Attention gives the kernel inputs of the right names and shapes, for every variant."""
    for lines, variant in product((1, 3), VARIANTS):
        check(scheme_of(name, shape), mx.float32, lines, variant)


@pytest.mark.skipif(not is_there_a_compiler(), reason="there is no compiler of C++20")
@pytest.mark.parametrize(
    ("variant", "shape", "lines"),
    [
        (Variant(1, 0, has_mask=False, has_sinks=False), SHAPES[0], 2),
        (Variant(0, 1, has_mask=True, has_sinks=False), SHAPES[1], 4),
        (Variant(2, 2, has_mask=True, has_sinks=True), SHAPES[2], 1),
    ],
    ids=str,
)
def test_the_source_computes_what_mlx_does(
    variant: Variant,
    shape: LayerShape,
    lines: int,
    replaced: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On a CPU, with one thread for each thread of the kernel."""
    monkeypatch.setattr(prefix_kernel, "_kernel", in_threads(tmp_path))
    for scheme, loud in (("float", 1), ("affine8", 1), ("float", 20)):
        check(scheme_of(scheme, shape), mx.float32, lines, variant, loud=loud)


@pytest.mark.skipif(not has_cuda, reason="the kernel is CUDA's")
def test_the_kernel_answers_what_mlx_does() -> None:
    """Each variant with one kind of layer, because all pairs would compile for minutes."""
    dtypes = (mx.float32, mx.bfloat16, mx.float16)
    layers = cycle(product(dtypes, SHAPES, ("float", "affine8"), (4, 1)))
    for variant, (dtype, shape, name, lines) in zip(VARIANTS, layers, strict=False):
        check(scheme_of(name, shape), dtype, lines, variant)


def test_there_is_no_kernel_without_cuda() -> None:
    """No other backend has the kernel."""
    scheme = scheme_of("float", SHAPES[2])
    for backend in (GenericBackend(), GpuBackend(), x86()):
        assert backend.prefix_kernel(scheme, 2, mx.bfloat16) is None


@pytest.mark.parametrize(
    ("lines", "key_size", "value_size", "fits"),
    [
        (1, 32, 32, True),
        (2, 128, 128, True),
        (10, 128, 128, True),
        (11, 128, 128, False),  # more than fits into shared memory
        (2, 80, 96, False),
        (2, 96, 80, False),
    ],
)
def test_layers_that_fit(lines: int, key_size: int, value_size: int, fits: bool) -> None:
    """CUDA's backend has a kernel for these layers, for one number of heads and one dtype each."""
    scheme = scheme_of("float", LayerShape(2, key_size, value_size))
    kernel = CudaBackend().prefix_kernel(scheme, lines, mx.bfloat16)
    assert (kernel is not None) is fits
    if kernel is not None:
        assert kernel.takes(lines, mx.bfloat16)
        assert not kernel.takes(lines + 1, mx.bfloat16)
        assert not kernel.takes(lines, mx.float32)


def test_each_variant_has_a_name_and_a_source_of_its_own() -> None:
    """MLX knows kernels by their names alone. A source uses all inputs and has no placeholder."""
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        words = set(re.findall(r"\w+", variant.source))
        assert {name for name in (*variant.inputs, *variant.outputs)} <= words
        unknown = {word for word in words if word.isupper()} - {
            *("T", "KEY_SIZE", "VALUE_SIZE", "LINES", "WARPS", "KEY_EACH", "VALUE_EACH"),
        }
        assert not unknown
        assert variant.source.count("{") == variant.source.count("}")


def choice(name: str = "float", path: AttentionPath = "folded", backend: Backend = BACKEND) -> bool:
    """Whether the kernel is chosen for such layers."""
    layer = LayerAttention(backend, scheme_of(name, SHAPES[0], path), mx.float32, path)
    found = layer_choice.choose_kernel(layer, 2 * SHAPES[0].num_heads, 4)
    assert found in (None, CudaPrefixKernel(2, mx.float32))
    return found is not None


def test_it_is_chosen_where_it_is_faster(replaced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is chosen only if its gain exceeds the margin."""
    for margin, is_chosen in ((0.0, True), (float("inf"), False), (0.0, True)):
        monkeypatch.setattr(prefix_cost, "_MARGIN", margin)
        assert choice() == is_chosen


def test_with_the_kernel_is_timed_against_without(
    replaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice compares a run without the kernel to one with it, and follows the gain."""
    asked: list[Variant] = []
    kernel = prefix_kernel._kernel
    monkeypatch.setattr(
        prefix_kernel, "_kernel", lambda variant: (asked.append(variant), kernel(variant))[1]
    )
    for won, is_chosen in ((1.2, True), (1.0, False)):

        def play_gain(*ways: Callable[[], mx.array], times: int, won: float = won) -> float:
            states = []
            for way in ways:
                asked.clear()
                mx.eval(way())
                states.append(bool(asked))
            assert states == [False, True] and times > 1
            return won

        monkeypatch.setattr(prefix_cost, "gain", play_gain)
        assert choice() == is_chosen


def test_it_is_compared_with_float32_before_it_is_timed(
    replaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every length; a kernel that differs at one of them is not even timed."""
    monkeypatch.setattr(pathcheck, "LENGTHS", (64, 100))
    compared: list[int] = []
    check = pathcheck._compared

    def noting(name: str, columns: int, *rest: Any) -> Any:
        found = check(name, columns, *rest)
        assert name == pathcheck.KERNEL
        compared.append(columns)
        return replace(found, error=0.5) if columns == 100 else found

    monkeypatch.setattr(pathcheck, "_compared", noting)
    monkeypatch.setattr(prefix_cost, "gain", lambda *_, **__: pytest.fail("timed"))
    assert not choice()
    assert compared == [64, 64, 100, 100]


@pytest.mark.parametrize("why", ["it answers otherwise", "it does not compile", "no CUDA"])
def test_it_is_not_chosen(
    why: str, replaced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong answers, a failing compiler or another device exclude it; wrong answers are logged."""
    monkeypatch.setattr(prefix_cost, "_MARGIN", 0.0)
    assert choice()
    if why == "it answers otherwise":
        monkeypatch.setattr(
            prefix_kernel,
            "_kernel",
            lambda variant: lambda **how: [1.1 * part for part in in_place_of(variant)(**how)],
        )
    if why == "it does not compile":

        def refuse(variant: Variant) -> Any:
            raise RuntimeError("no compiler")

        monkeypatch.setattr(prefix_kernel, "_kernel", refuse)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        assert not choice(backend=GpuBackend() if why == "no CUDA" else BACKEND)
    assert ("differs by 0.1 of the largest" in caplog.text) == (why == "it answers otherwise")


def test_schemes_of_one_model_are_chosen_apart(
    replaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer gets the choice for its scheme; layers that are read packed get no kernel."""
    chosen: dict[str, PrefixKernel | None] = {}

    def choose(layer: LayerAttention, heads: int, rows: int) -> PrefixKernel | None:
        kernel = CudaPrefixKernel(heads, layer.dtype) if not chosen else None
        return chosen.setdefault(str(layer.scheme), kernel)

    monkeypatch.setattr(decision, "choose_kernel", choose)
    crowd = Crowd("llama", scheme="float,first=affine8", path="folded", backend=BACKEND)
    kinds = [kind for kind in crowd.engine.plan.kinds if isinstance(kind, AttentionKind)]
    assert len(chosen) == 2 and None in chosen.values()
    assert [kind.kernel for kind in kinds] == [chosen[str(kind.scheme)] for kind in kinds]
    assert not choice("affine4", "packed")


def test_packed_parts_are_read_packed(replaced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads dense keys and values. Paths that read packed ones do not call it."""
    scheme = scheme_of("affine8", SHAPES[0], "packed")
    monkeypatch.setattr(prefix_kernel, "_kernel", lambda *_: pytest.fail("asked"))
    layer = replace(layer_of(scheme, mx.float32, "packed"), kernel=CudaPrefixKernel(2, mx.float32))
    queries = mx.random.normal((3, 4, 1, 64))
    own, shared = line(scheme, 3, 8, mx.float32), [line(scheme, 1, 8, mx.float32)]
    found = shared_prefix.attend(layer, queries, shared, own, SCALE, None)
    assert found.shape == (3, 4, 1, 64)


@pytest.mark.parametrize("scheme", ["float", "affine8"])
@pytest.mark.parametrize(("family", "group_cost"), [("llama", 1), ("gpt_oss", 1), ("llama", 10**6)])
def test_whole_engines_give_the_same_tokens_both_ways(
    family: str, group_cost: int, scheme: str, replaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of prompts gives chains, partials and rows of several lengths; tokens are the same.

    If a group costs much, all rows are in one group, with a mask.
    """
    root, branches = random_prompt(1, 512), [random_prompt(2 + n, 256) for n in range(2)]
    prompts = {
        f"row {n}": [*root, *branches[n % 2], *random_prompt(9 + n, 5 + 31 * n)] for n in range(6)
    }
    asked: list[Variant] = []
    kernel = prefix_kernel._kernel
    monkeypatch.setattr(
        prefix_kernel, "_kernel", lambda variant: (asked.append(variant), kernel(variant))[1]
    )
    found, served = [], []
    for margin in (0.0, float("inf")):
        monkeypatch.setattr(prefix_cost, "_MARGIN", margin)
        changes: dict[str, Any] = {"slots": 6, "prefix_cells": 1, "backend": BACKEND}
        crowd: Any = Crowd(family, group_cost=group_cost, path="folded", scheme=scheme, **changes)
        crowd.engine._scheduler._prefix_costs = PrefixCosts(1, 1)
        at_start = len(asked)
        found.append(crowd.answers(prompts))
        served.append(asked[at_start:])
    assert found[0] == found[1]
    by_kernel, plain = served
    assert not plain
    assert max(variant.prefixes for variant in by_kernel) > 0
    assert max(variant.partials for variant in by_kernel) > 0
    assert any(variant.has_mask for variant in by_kernel) == (group_cost > 1)

"""Chunks of prompts by one kernel for norms and positions: when, and with the same answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from batchkv_worker.kv.backends.compare import difference
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import (
    fused_linear,
    fused_rotary,
    joint_product,
    residual_blocks,
    rotary_chunks,
    rotary_layers,
)
from batchkv_worker.kv.backends.gpu.fused_linear import FuseLinears
from batchkv_worker.kv.backends.gpu.fused_rotary import FuseRotary
from batchkv_worker.kv.backends.gpu.rotary_chunks import are_faster
from batchkv_worker.kv.backends.gpu.rotary_heads import FusedRope, in_use
from batchkv_worker.kv.backends.gpu.rotary_layers import Names
from batchkv_worker.kv.backends.measurements import ROTARY_CHUNKS_AGREE, Measurements
from batchkv_worker.kv.backends.rebind import install, restore
from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Constant, Input, Run, View
from batchkv_worker.kv.kernels.rotary import ROTARY
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.discover import discover
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import make_plan
from worker.engine.test_device_faults import TIMEOUT
from worker.kv.backends.test_fused_rotary import Other, backend_of
from worker.kv.crowd import Crowd, model_of, random_prompt
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

FIRST = "model.layers.0.self_attn"
LAYER: Names = (f"{FIRST}.q_norm", f"{FIRST}.k_norm", f"{FIRST}.rope")
GROUPS = (tuple(f"{FIRST}.{name}_proj" for name in "qkv"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


@pytest.fixture
def launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CppLaunch:
    """The kernel as C++, which wins every comparison, as one product does."""
    monkeypatch.setattr(rotary_layers, "_is_faster", lambda *shape: True)
    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: True)
    monkeypatch.setattr(rotary_chunks, "gain", lambda *_, **__: 2.0)
    monkeypatch.setattr(residual_blocks, "choose", lambda *_: None)
    return CppLaunch(folder)


@pytest.fixture
def model() -> Iterator[Any]:
    """Qwen3, as it was loaded."""
    found = model_of("qwen3")
    yield found
    restore(found)


def heads_in(model: Any) -> list[Any]:
    return [one._heads for one in model.modules() if isinstance(one, FusedRope)]


def test_whole_engines_give_the_same_tokens(launch: CppLaunch, model: Any) -> None:
    """Prompts of several chunks, in groups of unequal length; all is read where it was computed."""
    chunks: list[Input] = []

    def noting(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)

        def noted(inputs: Any, *rest: Any) -> Any:
            chunks.extend(one for one in inputs[:2] if one.shape[1] > 1)
            return run(inputs, *rest)

        return noted if body is ROTARY else run

    prompts = {f"row {n}": random_prompt(n, 30 + 137 * n) for n in range(5)}
    common = random_prompt(99, 520)
    prompts |= {f"behind {n}": common + random_prompt(n, 9 + 4 * n) for n in range(4)}
    crowd: Any = Crowd(model, path="folded", backend=backend_of(noting))
    assert in_use(model) == (len(model.layers), True)
    chunks.clear()
    found = crowd.answers(prompts)
    assert chunks and len(chunks) % (2 * len(model.layers)) == 0
    assert all(isinstance(one, View) for one in chunks)
    assert all(one._group._whole is None for one in heads_in(model))
    assert VALUE_PARTS._last is None
    plain: Any = Crowd(model, path="folded", backend=GenericBackend())
    assert in_use(model) == (0, False)
    assert found == plain.answers(prompts)


def test_a_second_start_compares_nothing(
    launch: CppLaunch, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both outcomes are kept, and undoing leaves the fused layers as they were for chunks."""

    def changes() -> list[Any]:
        kept = Measurements.in_home(tmp_path, {})
        linears = fused_linear.choose(model, 4, kept)
        assert linears is not None
        return [linears, fused_rotary.choose(model, 4, launch, kept, linears.groups)]

    install(model, changes())()
    for module, name in ((fused_rotary, "are_faster"), (fused_rotary, "_chunk_logits")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("measured again"))
    linears, rotary = changes()
    undo = install(model, [linears])
    groups = [one._group for one in model.modules() if hasattr(one, "_group")]
    again = install(model, [linears, rotary])
    assert heads_in(model) and all(one.takes_chunks for one in heads_in(model))
    again()
    assert not any(one.takes_chunks for one in groups)
    undo()


class ScalesChunks(Other):
    """It does more between norms and positions, but for one token at a time."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.is_scaled = tokens.shape[1] > 1
        if self.is_scaled:
            return super().__call__(tokens, cache)
        x = self.table(tokens).reshape(*tokens.shape, 2, 32)
        both = [norm(x).transpose(0, 2, 1, 3) for norm in (self.q_norm, self.k_norm)]
        turned = [self.rope(one, offset=cache[0].offset) for one in both]
        cache[0].update_and_fetch(turned[1], turned[1])
        return mx.concatenate(turned, axis=1).transpose(0, 2, 1, 3).reshape(*tokens.shape, -1)


def test_chunks_that_differ_are_computed_as_before(
    launch: CppLaunch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps still have the kernel."""
    monkeypatch.setattr(fused_rotary, "OF_ATTENTION", 0)  # there is no product
    model = ScalesChunks(is_scaled=True)
    tokens = mx.array([[1, 2, 3]])

    def outputs() -> mx.array:
        return model(tokens, fused_rotary.make_prompt_cache(model))

    before = outputs()
    with caplog.at_level(logging.WARNING):
        install(model, [FuseRotary((("q_norm", "k_norm", "rope"),), launch, takes_chunks=True)])
    assert "of chunks does not agree: not used" in caplog.text
    (heads,) = heads_in(model)
    assert heads.num_fused and not heads.takes_chunks
    assert mx.array_equal(outputs(), before)


class PlainChunks(ScalesChunks):
    """Chunks do without the norms' and the positions' modules."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        if tokens.shape[1] == 1:
            return super().__call__(tokens, cache)
        x = self.table(tokens).reshape(*tokens.shape, 2, 32).transpose(0, 2, 1, 3)
        cache[0].update_and_fetch(x, x)
        return x.transpose(0, 2, 1, 3).reshape(*tokens.shape, -1)


def test_a_model_whose_chunks_go_another_way_keeps_it(
    launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That answers are the same says nothing if the kernel was not used."""
    monkeypatch.setattr(fused_rotary, "OF_ATTENTION", 0)  # there is no product
    model = PlainChunks(is_scaled=False)
    install(model, [FuseRotary((("q_norm", "k_norm", "rope"),), launch, takes_chunks=True)])
    assert in_use(model) == (1, False)


FAULTS: dict[str, Exception | None] = {
    "it differs behind the first chunk": None,
    "it does not compile": RuntimeError("a word is missing"),
    "the device fails": TIMEOUT,
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_goes_wrong_with_chunks_alone(what: str, launch: CppLaunch, model: Any) -> None:
    """Steps keep the kernel. A fault of the device ends the start, which is tried again."""
    fault = FAULTS[what]

    def spoilt(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)

        def spoil(inputs: Any, *rest: Any) -> Any:
            if inputs[0].shape[1] == 1:
                return run(inputs, *rest)
            if fault is not None:
                raise fault
            return [one * (1.2 if inputs[-1][0].item() else 1) for one in run(inputs, *rest)]

        return spoil

    changes = [FuseLinears(GROUPS, 4), FuseRotary((LAYER,), spoilt, takes_chunks=True)]
    if fault is TIMEOUT:
        with pytest.raises(RuntimeError, match="GPU Timeout"):
            install(model, changes)
        return
    install(model, changes)
    assert in_use(model) == (1, False)


def test_a_layer_that_cannot_be_timed_has_it_in_steps_alone(
    launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bool:
        raise ValueError("a shape does not fit")

    monkeypatch.setattr(fused_rotary, "are_faster", fails)
    change = fused_rotary.choose(model, 4, launch, Measurements(), GROUPS)
    assert change is not None and not change.takes_chunks


def test_without_a_joint_product_chunks_are_as_before(
    launch: CppLaunch, model: Any, tmp_path: Path
) -> None:
    """Fusing the products may fail at one start, and not at the next: each is compared."""
    kept = Measurements.in_home(tmp_path, {})
    change = FuseRotary((LAYER,), launch, kept, takes_chunks=True)
    undo = install(model, [change])
    assert in_use(model) == (1, False)
    undo()
    install(model, [FuseLinears(GROUPS, 4), change])
    assert in_use(model) == (1, True)
    names = [name for name in kept.results() if name.startswith(ROTARY_CHUNKS_AGREE)]
    assert names == [f"{ROTARY_CHUNKS_AGREE}, 1 of 1"]


@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_values_hold_no_queries_and_keys(scheme: str, launch: CppLaunch, model: Any) -> None:
    """What a chunk leaves is as large as without the kernel: values are no part of more."""
    backend = backend_of(launch)
    fixed = Fixed("fused", 2048, 768)
    held = []
    for taken in (False, True):
        plan = make_plan(
            "x", model, discover("x", model), scheme, mx.float32, backend, slots=4, fixed=fixed
        )
        for one in heads_in(model):
            one.take_chunks(taken)
        group = PrefillRows(plan.backend, plan.kinds, 64, 64)
        before = mx.get_active_memory()
        group.begin(Chunk(0, 64))
        model(mx.ones((4, 64), mx.int32), cache=plan.tree.nested(group.layers))
        group.end()
        mx.eval(group.arrays)
        held.append(mx.get_active_memory() - before)
        del group
        plan.undo()
    assert held[0] > 0 and held[1] < 1.1 * held[0]


@pytest.mark.parametrize("is_quantized", [False, True])
def test_both_ways_compute_the_same(
    is_quantized: bool, launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed: products, norms, positions, and values in one piece, from one input on."""
    if is_quantized:
        made = type(model)(model.args)
        made.update(model.parameters())
        model = made
        nn.quantize(model, 32, 8, class_predicate=lambda path, _: path.endswith("proj"))
    seen: list[list[list[mx.array]]] = []

    def gain(apart: Callable[[], Any], at_once: Callable[[], Any], **_: Any) -> float:
        seen.append([apart(), at_once()])
        return 2.0

    monkeypatch.setattr(rotary_chunks, "gain", gain)
    assert are_faster(model, [LAYER], GROUPS, launch)
    ((apart, at_once),) = seen
    rows, tokens = rotary_chunks.ROWS, rotary_chunks.TOKENS
    for one, other in zip(apart, at_once, strict=True):
        assert one.shape == other.shape and one.shape[::2] == (rows, tokens)
        assert difference(one, other) <= 2e-4  # angles are rounded


@pytest.mark.parametrize("what", ["no gain", "another answer", "no product", "another layer's"])
def test_a_kernel_that_is_no_faster_or_differs_is_not_used(
    what: str, launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)
        return lambda *given: [1.2 * one for one in run(*given)]

    if what == "no gain":
        monkeypatch.setattr(rotary_chunks, "gain", lambda *_, **__: 1.01)
    others = (tuple(name.replace("0", "1") for name in GROUPS[0]),)
    groups = {"no product": (), "another layer's": others}.get(what, GROUPS)
    way = spoilt if what == "another answer" else launch
    assert not are_faster(model, [LAYER], groups, way)


@pytest.mark.parametrize("offset", [7, mx.array([1, 50], mx.int32), mx.array([1, 50], mx.int64)])
def test_chunks_at_any_positions(offset: Any, launch: CppLaunch, model: Any) -> None:
    """One for all rows, or one for each; what else there may be is left to MLX."""
    install(model, [FuseLinears(GROUPS, 4), FuseRotary((LAYER,), launch, takes_chunks=True)])
    attention = model.layers[0].self_attn
    (heads,) = heads_in(model)
    x = mx.random.normal((2, 3, 4, attention.q_norm.weight.size))
    wanted = []
    for norm in (attention.q_norm, attention.k_norm):
        normed = mx.fast.rms_norm(x, norm.weight, norm.eps).transpose(0, 2, 1, 3)
        wanted.append(normed)
    rope = nn.RoPE(heads._turn.size, base=attention.rope.base)
    count = heads.num_chunks
    assert attention.q_norm(x) is x and attention.k_norm(x) is x
    found = [attention.rope(x.transpose(0, 2, 1, 3), offset=offset) for _ in range(2)]
    is_known = isinstance(offset, int) or offset.dtype == mx.int32
    assert heads.num_chunks == count + is_known
    for one, other in zip(found, wanted, strict=True):
        assert difference(one, rope(other, offset=offset)) <= 2e-4


class ScaledInChunks(qwen3.Attention):  # type: ignore[misc]
    """Layers that scale their values before a cache gets them, but for one token at a time."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        sizes = *x.shape[:2], -1, round(self.scale**-2)
        parts = [one(x).reshape(sizes) for one in (self.q_proj, self.k_proj, self.v_proj)]
        both = zip((self.q_norm, self.k_norm), parts, strict=False)
        normed = [norm(one).transpose(0, 2, 1, 3) for norm, one in both]
        queries, keys = (self.rope(one, offset=cache.offset) for one in normed)
        values = parts[-1].transpose(0, 2, 1, 3)
        keys, values = cache.update_and_fetch(keys, values if x.shape[1] == 1 else 2 * values)
        out = qwen3.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def test_values_that_change_in_chunks_alone_are_seen(launch: CppLaunch) -> None:
    """They are not where the product gave them, so chunks are computed as before."""
    plain = model_of("qwen3")
    model = type(plain)(plain.args)
    model.update(plain.parameters())
    for layer in model.layers:
        layer.self_attn.__class__ = ScaledInChunks
    crowd: Any = Crowd(model, path="folded", scheme="affine8", backend=backend_of(launch))
    assert in_use(model) == (len(model.layers), False)
    prompts = {"row": random_prompt(3, 40)}
    found = crowd.answers(prompts)
    other: Any = Crowd(model, path="folded", scheme="affine8", backend=GenericBackend())
    assert found == other.answers(prompts)

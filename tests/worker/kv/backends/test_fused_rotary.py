"""One kernel computes norms and positions of decode steps: the same answers, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import (
    fused_rotary,
    joint_product,
    residual_blocks,
    rotary_heads,
    rotary_layers,
)
from batchkv_worker.kv.backends.gpu.backend import GpuBackend, decode_kernels
from batchkv_worker.kv.backends.gpu.fused_linear import FusedGroup
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.rebind import install, restore
from batchkv_worker.kv.kernels.body import PACK, Body
from batchkv_worker.kv.kernels.launch import Constant, Input, Launch, Run, View
from batchkv_worker.kv.kernels.plain import plain_rotary
from batchkv_worker.kv.kernels.rotary import ROTARY, RotaryKernel
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from worker.kv.crowd import Crowd, model_of, random_prompt
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rotary")


@pytest.fixture
def launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CppLaunch:
    """The kernel as C++, which wins every comparison."""
    monkeypatch.setattr(rotary_layers, "_is_faster", lambda *shape: True)
    monkeypatch.setattr(residual_blocks, "choose", lambda *_: None)
    return CppLaunch(folder)


@pytest.fixture
def model() -> Iterator[Any]:
    """Qwen3, as it was loaded."""
    found = model_of("qwen3")
    yield found
    restore(found)


class Backend(GpuBackend):
    """A GPU's, but for how kernels are made. C++ computes at once, so its steps are not traced.

    Residual sums stay the model's, and chunks are packed by MLX: those have tests of their own.
    """

    made: Launch

    def chunk_kernels(self, scheme: Any, dtype: mx.Dtype) -> None:
        return None

    def launch(self) -> Launch | None:
        return self.made


def backend_of(launch: Launch, *, replays: bool = False) -> Backend:
    found = Backend(replays_steps=replays, columns_multiple=64)
    object.__setattr__(found, "made", launch)
    return found


def kinds_in(model: Any) -> set[type[Any]]:
    return {type(module) for module in model.modules()}


def heads_in(model: Any) -> list[Any]:
    return [one._heads for one in model.modules() if type(one) is rotary_heads.FusedRope]


def chosen(model: Any, launch: Launch, kept: Measurements | None = None) -> Any:
    return fused_rotary.choose(model, ROWS, launch, kept or Measurements())


def test_whole_engines_give_the_same_tokens_both_ways(launch: CppLaunch, model: Any) -> None:
    """Prompts are computed by the model's own layers, each decode step by one kernel a layer."""
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    crowd: Any = Crowd(model, path="folded", backend=backend_of(launch))
    count = launch.counts[ROTARY.name]
    assert {rotary_heads.HeldNorm, rotary_heads.FusedRope} <= kinds_in(model)
    found = crowd.answers(prompts)
    steps = launch.counts[ROTARY.name] - count
    assert steps > 0 and steps % len(model.layers) == 0
    plain: Any = Crowd(model, path="folded", backend=GenericBackend())
    assert kinds_in(model).isdisjoint({rotary_heads.HeldNorm, rotary_heads.FusedRope})
    assert found == plain.answers(prompts)
    assert launch.counts[ROTARY.name] == count + steps


def test_parts_of_one_product_are_read_where_they_are(
    launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one product gave queries and keys, both are views of it, and nothing is held after."""
    given: list[Input] = []

    def noting(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)
        return lambda inputs, *rest: (given.extend(inputs[:2]), run(inputs, *rest))[1]

    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: True)
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(3)}
    crowd: Any = Crowd(model, path="folded", backend=backend_of(noting))
    given.clear()
    found = crowd.answers(prompts)
    assert VALUE_PARTS._last is None  # though no records are packed
    assert given and all(isinstance(one, View) for one in given)
    groups = {id(one._group): one._group for one in model.modules() if hasattr(one, "_group")}
    assert all(group._whole is None for group in groups.values())
    plain: Any = Crowd(model, path="folded", backend=GenericBackend())
    assert found == plain.answers(prompts)


@pytest.mark.parametrize(
    ("ends", "is_part"), [((64, 96), True), ((128, 160), False), ((64, 112), False)]
)
def test_other_outputs_than_queries_and_keys_are_no_views(
    ends: tuple[int, int], is_part: bool, launch: CppLaunch
) -> None:
    """A product whose first layer also gives a gate, or whose second gives more than keys."""
    whole = mx.random.normal((2, 1, 192))
    group = FusedGroup(joint_product.Product(lambda _: whole, ends), 3, ROWS)
    group.keeps_whole = True
    x = mx.zeros((2, 1, 8))
    assert all(group.take(place, x) is not None for place in range(3))
    norms = nn.RMSNorm(16), nn.RMSNorm(16)
    heads = rotary_heads.Heads(norms, nn.RoPE(16), RotaryKernel(launch), group)
    given = whole[..., :64].reshape(2, 1, 4, 16), whole[..., 64:96].reshape(2, 1, 2, 16)
    found = heads._read(*given)
    assert [isinstance(one, View) for one in found] == [is_part, is_part]


class RecordBackend(Backend):
    """With records, packed by a kernel that notes its inputs."""

    def record_kernels(self, scheme: Any, lines: int, dtype: mx.Dtype) -> Any:
        return decode_kernels(scheme, lines, dtype, self.made)


@pytest.mark.parametrize("what", ["plain", "a scale on values", "an adapter on values"])
def test_values_are_read_where_they_are_if_they_come_unchanged(
    what: str, launch: CppLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of MLX's operations each time."""
    packed: list[Input] = []

    def noting(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = launch(body, constants)
        if body is not PACK:
            return run
        return lambda inputs, *rest: (packed.append(inputs[1]), run(inputs, *rest))[1]

    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: True)
    made = model_of("qwen3")
    model = type(made)(made.args)
    model.update(made.parameters())
    for layer in model.layers:
        if what == "a scale on values":
            layer.self_attn.__class__ = ScaledValues
        if what == "an adapter on values":
            found = LoRALinear.from_base(layer.self_attn.v_proj, r=2)
            found.lora_b = mx.random.normal(found.lora_b.shape)
            layer.self_attn.v_proj = found
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(3)}
    backend = RecordBackend(replays_steps=False, columns_multiple=64)
    object.__setattr__(backend, "made", noting)
    crowd: Any = Crowd(model, path="kernel", backend=backend)
    answers = crowd.answers(prompts)
    assert VALUE_PARTS._last is None
    assert packed and all(isinstance(one, View) == (what == "plain") for one in packed)
    plain = RecordBackend(replays_steps=False, columns_multiple=64)
    object.__setattr__(plain, "made", launch)
    monkeypatch.setattr(fused_rotary, "choose", lambda *_: None)
    assert answers == Crowd(model, path="kernel", backend=plain).answers(prompts)


class ScaledValues(qwen3.Attention):  # type: ignore[misc]
    """Layers that scale their values before a cache gets them."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        sizes = *x.shape[:2], -1, round(self.scale**-2)
        parts = [one(x).reshape(sizes) for one in (self.q_proj, self.k_proj)]
        values = 2 * self.v_proj(x).reshape(sizes)
        both = zip((self.q_norm, self.k_norm), parts, strict=True)
        normed = [norm(one).transpose(0, 2, 1, 3) for norm, one in both]
        queries, keys = (self.rope(one, offset=cache.offset) for one in normed)
        keys, values = cache.update_and_fetch(keys, values.transpose(0, 2, 1, 3))
        out = qwen3.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def test_steps_that_are_replayed_have_it_too(launch: CppLaunch, model: Any) -> None:
    """A step's graph is traced with the kernel in it, and used again for the next steps."""

    def answers(crowd: Any) -> list[list[int]]:
        for row in range(2):
            crowd.add(f"row {row}", random_prompt(row, 30 + 11 * row), 24)
        crowd.drain()
        return [crowd.tokens(f"row {row}") for row in range(2)]

    backend = backend_of(plain_rotary, replays=True)
    crowd: Any = Crowd(model, path="folded", backend=backend)
    heads = heads_in(model)[0]
    before = heads.num_fused
    found = answers(crowd)
    num_replayed = crowd.engine._slots.graphs.num_replayed
    assert num_replayed > 0 and heads.num_fused > before
    plain: Any = Crowd(model, path="folded", backend=GenericBackend())
    assert found == answers(plain)


def test_other_calls_are_as_before(launch: CppLaunch, model: Any) -> None:
    """A prompt, a single token at one position for all, and no cache at all."""

    def outputs() -> list[mx.array]:
        cache = make_prompt_cache(model)
        prompt = mx.array([[1, 2, 3], [3, 2, 1]])
        return [model(prompt, cache=cache), model(prompt[:, :1], cache=cache), model(prompt)]

    before = outputs()
    undo = install(model, [chosen(model, launch)])
    count = launch.counts[ROTARY.name]
    for one, other in zip(before, outputs(), strict=True):
        assert mx.array_equal(one, other)
    assert launch.counts[ROTARY.name] == count
    undo()


def test_keys_are_held_only_after_queries(launch: CppLaunch, model: Any) -> None:
    """Queries of another dtype are normalized at once, and so are the keys after them."""
    install(model, [chosen(model, launch)])
    attention = model.layers[0].self_attn
    x = mx.random.normal((2, 1, 3, attention.q_norm.weight.size))
    for norm, given in ((attention.q_norm, x.astype(mx.bfloat16)), (attention.k_norm, x)):
        assert mx.array_equal(norm(given), mx.fast.rms_norm(given, norm.weight, norm.eps))
    assert attention.q_norm(x) is x and attention.k_norm(x) is x


class Other(nn.Module):
    """An attention layer whose norms are scaled before the positions, or do not meet any."""

    def __init__(self, *, is_scaled: bool) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.table = nn.Embedding(16, 64)
        self.q_norm, self.k_norm, self.rope = nn.RMSNorm(32), nn.RMSNorm(32), nn.RoPE(32)

    @property
    def layers(self) -> list[Any]:
        return [None]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.table(tokens).reshape(*tokens.shape, 2, 32)
        queries, keys = (norm(x).transpose(0, 2, 1, 3) for norm in (self.q_norm, self.k_norm))
        if self.is_scaled:
            queries = queries * 3
        else:
            queries, keys = queries + 0.5, keys - 0.5
        turned = [self.rope(one, offset=cache[0].offset) for one in (queries, keys)]
        cache[0].update_and_fetch(turned[1], turned[1])
        return mx.concatenate(turned, axis=1).transpose(0, 2, 1, 3).reshape(*tokens.shape, -1)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_layer_that_does_more_between_is_left_alone(
    is_scaled: bool, launch: CppLaunch, caplog: pytest.LogCaptureFixture
) -> None:
    """It calls the same modules in the same order. The comparison finds that it is another one."""
    model = Other(is_scaled=is_scaled)
    with caplog.at_level(logging.WARNING):
        install(model, [chosen(model, launch)])
    assert "does not agree: not used" in caplog.text
    assert rotary_heads.HeldNorm not in kinds_in(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_models_without_such_norms_are_left_alone(family: str, launch: CppLaunch) -> None:
    assert chosen(model_of(family), launch) is None
    assert launch.counts == {}


def test_a_kernel_that_does_not_compile_is_not_used(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(body: Body, constants: tuple[Constant, ...]) -> Run:
        def run(*_: Any) -> Any:
            raise RuntimeError("a word is missing")

        return run

    assert chosen(model, refuses) is None  # it is not faster
    layer = "model.layers.0.self_attn"
    names = f"{layer}.q_norm", f"{layer}.k_norm", f"{layer}.rope"
    with caplog.at_level(logging.WARNING):
        install(model, [fused_rotary.FuseRotary((names,), refuses)])
    assert "a word is missing" in caplog.text
    assert rotary_heads.HeldNorm not in kinds_in(model)


def test_the_search_holds_no_weights(model: Any) -> None:
    """Fused linear layers replace them next: a copy of all would have no room."""
    found = type(model)(model.args)
    mx.eval(found.parameters())
    list(rotary_layers._found_in(found))
    before, replaced = mx.get_active_memory(), 0
    for name, one in tree_flatten(found.parameters()):
        if name.endswith("proj.weight"):
            replaced += one.nbytes
            found.load_weights([(name, mx.zeros_like(one))], strict=False)
            mx.eval(found.parameters())
    assert mx.get_active_memory() - before < replaced / 2  # others of this process hold some, too


class Fails(Other):
    """It takes its cache's place for a number of Python, or raises what MLX never does."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(is_scaled=True)
        self.kind = kind

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        if isinstance(cache[0].offset, mx.array):
            raise self.kind("it has no number")
        return super().__call__(tokens, cache)


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError, OSError])
def test_a_model_that_cannot_be_compared_is_as_before(
    kind: type[Exception], launch: CppLaunch, caplog: pytest.LogCaptureFixture
) -> None:
    """What such a fault may be is known; any other one goes on, and leaves no change behind."""
    model = Fails(kind)
    change = chosen(model, launch)
    if kind is OSError:
        with pytest.raises(OSError, match="no number"):
            install(model, [change])
    else:
        with caplog.at_level(logging.WARNING):
            install(model, [change])
        assert "no number" in caplog.text
    assert rotary_heads.HeldNorm not in kinds_in(model)


def test_a_stored_choice_is_used_again(
    launch: CppLaunch, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start runs nothing. A choice for another model is made anew."""
    install(model, [chosen(model, launch, Measurements.in_home(tmp_path, {}))])()
    with monkeypatch.context() as patch:
        for module, name in ((rotary_layers, "_found_in"), (fused_rotary, "_logits")):
            patch.setattr(module, name, lambda *_: pytest.fail("measured again"))
        change = chosen(model, launch, Measurements.in_home(tmp_path, {}))
        assert len(change.layers) == len(model.layers)
        undo = install(model, [change])
        assert rotary_heads.FusedRope in kinds_in(model)
        undo()
    assert chosen(model_of("llama"), launch, Measurements.in_home(tmp_path, {})) is None

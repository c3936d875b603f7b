"""Weights by powers of two, where a CPU has no fast exponential: as MLX's own softmax."""

from __future__ import annotations

import math
from types import ModuleType

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.attention.paths import LayerAttention, Path
from batchkv_worker.kv.backends.contract import Softmax
from batchkv_worker.kv.backends.cpu import exp2, swiglu
from batchkv_worker.kv.backends.cpu.softmax import Exp2Softmax
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.rebind import install
from batchkv_worker.kv.backends.softmax import MLX_SOFTMAX, hide
from support import tiny_models
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import HEADS, SIZE, VALUE_SIZE, attention_kind, x86

QUERY_HEADS = 3 * HEADS
EXP2 = Exp2Softmax()
WAYS = pytest.mark.parametrize("softmax", [EXP2, MLX_SOFTMAX], ids=["exp2", "mlx"])


def as_before(parts: list[mx.array], sinks: mx.array | None, softmax: Softmax) -> list[mx.array]:
    """Finished weights of scores in the model's own unit."""
    scores = [part * softmax.unit for part in parts]
    weights, total = softmax.weigh(scores, sinks)
    assert (total is not None) is (softmax is EXP2)
    return weights if total is None else [part / total for part in weights]


def test_powers_are_powers() -> None:
    """To the last bits, whole ones exactly, and at both ends of what float32 holds."""
    wholes = mx.arange(-126, 128).astype(mx.float32)
    assert exp2.exp2(wholes).tolist() == [2.0**n for n in range(-126, 128)]
    steps = mx.linspace(-125.9, 127.4, 100_003)
    found = exp2.exp2(steps).tolist()
    worst = max(abs(y / 2.0**x - 1) for x, y in zip(steps.tolist(), found, strict=True))
    assert worst < 2e-7
    assert exp2.exp2(mx.array([exp2.HIGHEST])).item() == math.inf
    assert exp2.exp2(mx.array([exp2.LOWEST])).item() == 2.0**-126


@WAYS
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_weights_are_those_of_a_softmax(spread: float, with_sinks: bool, softmax: Softmax) -> None:
    """Over one part and over three, near and far from each other."""
    mx.random.seed(1)
    scores = spread * mx.random.normal((2, 3, 5, 70))
    sinks = spread * mx.random.normal((1, 3, 1, 1)) if with_sinks else None
    whole = (
        scores
        if sinks is None
        else mx.concatenate([scores, mx.broadcast_to(sinks, (2, 3, 5, 1))], axis=-1)
    )
    wanted = mx.softmax(whole, axis=-1)[..., :70]
    for cuts in ([], [1, 40]):
        found = as_before(mx.split(scores, cuts, axis=-1), sinks, softmax)
        assert [part.shape[-1] for part in found] == ([1, 39, 30] if cuts else [70])
        together = mx.concatenate(found, axis=-1)
        # A score is rounded once more on its way to base 2: by its own size.
        assert mx.abs(together - wanted).max().item() < 2e-7 * max(4.0, spread)


@WAYS
def test_what_is_masked_has_no_weight(softmax: Softmax) -> None:
    """And a line that is masked whole, a free slot's, has finite weights."""
    scores = mx.array([[1.0, 2.0, 500.0, -500.0], [0.0, 0.0, 0.0, 0.0]])
    mask = mx.array([[True, True, False, True], [False, False, False, False]])
    scores = hide(scores * softmax.unit, mask)
    (weights,), total = softmax.weigh([scores])
    weights = weights if total is None else weights / total
    assert weights[0, 2].item() < 1e-29
    assert weights[0, 3].item() < 1e-29
    assert weights[0].sum().item() == pytest.approx(1.0)
    assert mx.isfinite(weights[1]).all().item()


def test_only_single_precision_on_a_cpu_is_weighed_by_powers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they are measured to be faster, or named."""
    for is_faster in (True, False):
        monkeypatch.setattr(exp2, "is_faster", lambda is_faster=is_faster: is_faster)
        for backend in (x86(uses_exp2=is_faster), x86(uses_exp2=None)):
            assert isinstance(backend.softmax(mx.float32), Exp2Softmax) is is_faster
            for half in (mx.bfloat16, mx.float16):
                assert backend.softmax(half) is MLX_SOFTMAX
    assert GenericBackend().softmax(mx.float32) is MLX_SOFTMAX


@pytest.mark.parametrize("name", ["float", "affine8", "turbo3.5"])
@pytest.mark.parametrize("path", ["fused", "folded", "packed"])
def test_decode_is_the_same_both_ways(name: str, path: Path) -> None:
    mx.random.seed(3)
    kind = attention_kind(name)
    scheme = paths.in_slots(kind.scheme, path)
    keys, values = (
        tensor.take(packing.pack(mx.random.normal((4, HEADS, 40, size))))
        for tensor, packing, size in (
            (scheme.keys, kind.scheme.keys, SIZE),
            (scheme.values, kind.scheme.values, VALUE_SIZE),
        )
    )
    queries = 2.0 * mx.random.normal((4, QUERY_HEADS, 1, SIZE))
    seen = mx.arange(40) >= mx.array([0, 3, 20, 39]).reshape(4, 1, 1, 1)
    for sinks in (None, mx.random.normal((QUERY_HEADS,))):
        what, found = (queries, keys, values, 0.2), []
        for uses_exp2 in (True, False):
            layer = LayerAttention(x86(uses_exp2=uses_exp2), scheme, mx.float32, path)
            found.append(paths.attend(layer, *what, seen, sinks))
        for other in found[1:]:
            assert mx.abs(found[0] - other).max().item() < 1e-5
        unmasked = paths.attend(layer, *what, None, sinks)
        assert mx.abs(found[0] - unmasked)[2:].max().item() > 1e-2


@pytest.mark.parametrize(
    ("count", "past"), [(1, 5), (64, 0), (65, 0), (200, 0), (128, 77), (64, 9), (300, 500)]
)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("uses_exp2", [True, False])
def test_a_triangle_that_is_cut_is_the_whole(
    count: int, past: int, sinks: bool, uses_exp2: bool
) -> None:
    """Causal attention in tiles equals MLX's own in one."""
    mx.random.seed(count)
    queries = mx.random.normal((2, 4, count, 32))
    keys = mx.random.normal((2, 2, past + count, 32))
    values = mx.random.normal((2, 2, past + count, 48))
    sink = mx.random.normal((4,)) if sinks else None
    backends = x86(uses_exp2=uses_exp2), GenericBackend()
    found = [one.attention(queries, keys, values, 0.2, "causal", sink) for one in backends]
    assert found[0].shape == (2, 4, count, 48)
    assert mx.abs(found[0] - found[1]).max().item() < 2e-6
    if count > 1:
        wrong = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, sinks=sink)
        assert mx.abs(found[0] - wrong).max().item() > 1e-3


# -- the gate of feed-forward layers


def test_the_gate_is_mlx_lms() -> None:
    """Also where the sigmoid ends: at gates whose power has no float."""
    mx.random.seed(5)
    numbers = [mx.array([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, 1e30])]
    numbers.append(5.0 * mx.random.normal((4, 100)))
    for values in numbers:
        # Times this the lowest gate has no float either, but its sigmoid comes first.
        other = mx.random.normal(values.shape) * mx.where(values < -100, 1e10, 1.0)
        got, wanted = swiglu.swiglu(values, other), swiglu._original(values, other)
        assert mx.isfinite(got).all().item()
        assert mx.allclose(got, wanted, rtol=2e-6, atol=1e-20).item()
    half = mx.random.normal((3, 8)).astype(mx.bfloat16)
    assert mx.array_equal(swiglu.swiglu(half, half), swiglu._original(half, half)).item()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a model, as mlx-lm has it."""
    monkeypatch.setattr(llama, "swiglu", swiglu._original)
    return llama


def test_the_gate_is_replaced_only_where_powers_are_faster(module: ModuleType) -> None:
    """The last installation decides, and undoing it gives mlx-lm's function back."""
    model, other = (tiny_models.build("llama") for _ in range(2))
    exact, half, mlx = (
        backend.changes(model, dtype, 2)
        for backend, dtype in (
            (x86(uses_rope_cache=False), mx.float32),
            (x86(uses_rope_cache=False), mx.bfloat16),
            (x86(uses_exp2=False, uses_rope_cache=False), mx.float32),
        )
    )
    assert (len(exact), len(half), len(mlx)) == (1, 0, 0)
    assert module.swiglu is swiglu._original  # so far it was only decided
    undo = install(model, exact)
    replaced = module.swiglu
    assert replaced is not swiglu._original
    again = install(model, exact)  # a second engine of the model
    undo()  # which is no longer what is installed
    assert module.swiglu is not swiglu._original
    again()
    assert module.swiglu is swiglu._original
    install(model, exact)
    install(other, mlx)
    assert module.swiglu is swiglu._original


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_whole_engines_give_the_same_tokens_both_ways(family: str, scheme: str) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    found = []
    for uses_exp2 in (True, False):
        crowd = Crowd(family, scheme=scheme, path="folded", backend=x86(uses_exp2=uses_exp2))
        for name, prompt in prompts.items():
            crowd.add(name, prompt)
        assert isinstance(crowd.engine.plan.backend.softmax(mx.float32), Exp2Softmax) is uses_exp2
        crowd.drain()
        found.append({name: crowd.tokens(name) for name in prompts})
    assert found[0] == found[1]

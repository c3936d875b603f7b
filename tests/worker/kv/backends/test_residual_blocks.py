"""Blocks whose residual sums and norms one kernel computes, in steps and in chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import residual_blocks
from batchkv_worker.kv.backends.gpu.residual_blocks import (
    FuseResiduals,
    LastNorm,
    Sums,
    num_blocks,
)
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.rebind import install, restore
from batchkv_worker.kv.kernels.launch import Launch
from batchkv_worker.kv.kernels.residual import RESIDUAL, ResidualKernel
from worker.kv.crowd import Crowd, model_of, random_prompt
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
ROWS = 4


class Backend(GenericBackend):
    """Its one change to a model is that of the residual sums."""

    made: Launch

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Any:
        found = residual_blocks.choose(model, rows, self.made, self.measurements)
        return [] if found is None else [found]


def backend_of(launch: Launch) -> Backend:
    found = Backend()
    object.__setattr__(found, "made", launch)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("residual")


@pytest.fixture
def launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CppLaunch:
    """The kernel as C++, which wins every comparison."""
    monkeypatch.setattr(residual_blocks, "gain", lambda *_, **__: 2.0)
    monkeypatch.setattr(residual_blocks, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(residual_blocks, "CHUNKS", ((2, 1), (3, 1)))
    return CppLaunch(folder)


@pytest.fixture
def model() -> Iterator[Any]:
    """Llama, as it was loaded."""
    found = model_of("llama")
    yield found
    restore(found)


def kinds_in(model: Any) -> list[type[Any]]:
    return [type(module) for module in model.modules()]


def logits(model: Any, *chunks: list[list[int]]) -> list[mx.array]:
    cache = make_prompt_cache(model)
    return [model(mx.array(tokens), cache=cache) for tokens in chunks]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "phi3", "gpt_oss"])
def test_whole_engines_give_the_same_tokens(family: str, launch: CppLaunch) -> None:
    """Each block's two sums, in steps and in chunks."""
    prompts = {f"row {n}": random_prompt(n, 5 + 9 * n) for n in range(4)}
    crowd: Any = Crowd(family, path="folded", backend=backend_of(launch))
    assert num_blocks(crowd.model) == len(crowd.model.layers)
    assert kinds_in(crowd.model).count(LastNorm) == 1
    launch.counts.clear()
    found = crowd.answers(prompts)
    sums = launch.counts[RESIDUAL.name]
    assert sums > 0 and sums % (2 * len(crowd.model.layers)) == 0
    before = list(kinds_in(crowd.model))
    plain: Any = Crowd(family, path="folded", backend=GenericBackend())
    assert num_blocks(plain.model) == 0 and kinds_in(plain.model) != before
    assert found == plain.answers(prompts)


@pytest.mark.parametrize("takes", [(True, False), (False, True)])
def test_steps_or_chunks_alone(takes: tuple[bool, bool], launch: CppLaunch, model: Any) -> None:
    """The other is computed as the model does."""
    chunk, step = [[1, 2, 3]], [[4]]
    wanted = logits(model, chunk, step)
    undo = install(model, [FuseResiduals(launch, *takes)])
    counts = []
    for what in ([chunk], [step]):
        launch.counts.clear()
        logits(model, *what)
        counts.append(launch.counts.get(RESIDUAL.name, 0))
    each = 2 * len(model.layers)
    assert counts == [each * takes[1], each * takes[0]]
    found = logits(model, chunk, step)
    assert all(mx.allclose(*both, atol=1e-4) for both in zip(found, wanted, strict=True))
    undo()
    assert num_blocks(model) == 0 and LastNorm not in kinds_in(model)


def granite(multiplier: float = 0.2, embedding: float = 1.0) -> Any:
    """A model whose blocks have the same parts, but scale what they add."""
    module = import_module("mlx_lm.models.granite")
    llama = model_of("llama").args
    args = {"model_type": "granite", "max_position_embeddings": 512, "tie_word_embeddings": True}
    args |= {"logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": embedding}
    args |= {"residual_multiplier": multiplier, "attention_bias": False, "mlp_bias": False}
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    names += ("rms_norm_eps", "vocab_size", "num_key_value_heads", "rope_theta")
    args |= {name: getattr(llama, name) for name in names}
    mx.random.seed(0)
    found = module.Model(module.ModelArgs.from_dict(args))
    mx.eval(found.parameters())
    return found


@pytest.mark.parametrize("scales", [(0.2, 1.0), (0.22, 50.0), (0.999, 1.0)])
def test_blocks_that_do_more_are_left_alone(
    scales: tuple[float, float], launch: CppLaunch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answers would be others, if only a little. This is usual, so nothing warns."""
    model = granite(*scales)
    change = residual_blocks.choose(model, ROWS, launch, Measurements())
    before, wanted = kinds_in(model), logits(model, [[1, 2, 3]])
    assert change is not None
    with caplog.at_level(logging.WARNING):
        install(model, [change])
    assert not caplog.text and kinds_in(model) == before
    assert mx.array_equal(logits(model, [[1, 2, 3]])[0], wanted[0])


@pytest.mark.parametrize("fault", [MemoryError, NameError, RuntimeError])
def test_a_fault_of_the_comparison_leaves_the_model(
    fault: type[Exception], launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start goes on."""
    before = kinds_in(model)

    def fail(_: Any) -> Any:
        raise fault("something is wrong")

    monkeypatch.setattr(residual_blocks, "_logits", fail)
    install(model, [FuseResiduals(launch, True, True)])
    assert kinds_in(model) == before


@pytest.mark.parametrize(
    ("gains", "takes"),
    [((2, 1, 0.99), (True, False)), ((1, 2, 0.99), (False, True)), ((2, 2, 0.9), (True, False))],
)
def test_steps_and_chunks_are_timed_apart(
    gains: tuple[float, ...],
    takes: tuple[bool, bool],
    launch: CppLaunch,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of many tokens must lose nothing."""
    found = iter(gains)
    monkeypatch.setattr(residual_blocks, "gain", lambda *_, **__: next(found))
    change = residual_blocks.choose(model, ROWS, launch, Measurements())
    assert change is not None
    assert (change.takes_steps, change.takes_chunks) == takes


@pytest.mark.parametrize("family", ["gemma3_text", "gear", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_other_models_are_left_alone_or_agree(family: str, launch: CppLaunch) -> None:
    """Other norms, other parts, more parts: no start fails, and answers stay."""
    model = model_of(family)
    chunk, step = [[1, 2, 3]], [[4]]
    wanted = logits(model, chunk, step)
    change = residual_blocks.choose(model, ROWS, launch, Measurements())
    undo = install(model, [] if change is None else [change])
    found = logits(model, chunk, step)
    assert all(mx.allclose(*both, atol=1e-3) for both in zip(found, wanted, strict=True))
    undo()


def test_a_norm_is_computed_for_what_it_is_given(launch: CppLaunch, model: Any) -> None:
    """What was kept for a block is not used for other numbers, nor later."""
    undo = install(model, [FuseResiduals(launch, True, True)])
    first, second, *_ = model.layers
    x, more = mx.random.normal((2, 1, 3, model.args.hidden_size))
    out = first(x, None, None)
    other = out + more
    found = second(other, None, None), second(out, None, None)
    undo()
    wanted = second(other, None, None), second(out, None, None)
    assert all(mx.allclose(*both, atol=1e-4) for both in zip(found, wanted, strict=True))


def test_what_was_kept_is_given_once_and_to_its_norm_alone(launch: CppLaunch) -> None:
    """Another norm, another array, and a second call get nothing."""
    sums = Sums(ResidualKernel(launch), takes_steps=True, takes_chunks=True)
    norm, other = nn.RMSNorm(64), nn.RMSNorm(64)
    for given, by, is_given in ((0, norm, True), (0, other, False), (1, norm, False)):
        arrays = mx.random.normal((2, 1, 2, 64))
        total, normed = sums.add(arrays[0], arrays[1], norm)
        sums.keep(total, norm, normed)
        found = sums.take((total, total + 0)[given], by)
        assert (found is normed) is is_given and sums.take(total, norm) is None


@pytest.mark.parametrize("what", ["dtype", "shape", "axes", "norm", "weights"])
def test_other_arrays_are_added_by_mlx(what: str, launch: CppLaunch) -> None:
    """The sum is the same, and the norm is left to the model."""
    sums = Sums(ResidualKernel(launch), takes_steps=True, takes_chunks=True)
    x, added = mx.random.normal((2, 1, 2, 64))
    norm: Any = nn.LayerNorm(64) if what == "norm" else nn.RMSNorm(64)
    if what == "dtype":
        added = added.astype(mx.float16)
    if what == "shape":
        added = added[:, :1]
    if what == "weights":
        norm = nn.RMSNorm(32)
    if what == "axes":
        x, added = x[0], added[0]
    total, normed = sums.add(x, added, norm)
    assert normed is None and mx.array_equal(total, x + added)
    assert not launch.counts


def test_one_norm_is_left(launch: CppLaunch, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block's first one, which follows no sum."""
    undo = install(model, [FuseResiduals(launch, True, True)])
    calls: list[mx.array] = []
    real = mx.fast.rms_norm
    monkeypatch.setattr(
        mx.fast, "rms_norm", lambda *given: (calls.append(given[0]), real(*given))[1]
    )
    logits(model, [[1, 2, 3]])
    undo()
    assert len(calls) == 1


def test_nothing_is_kept_after_a_pass(launch: CppLaunch, model: Any) -> None:
    """A kept array of a traced step would hold the model."""
    undo = install(model, [FuseResiduals(launch, True, True)])
    logits(model, [[1, 2, 3]], [[4]])
    assert model.layers[0]._place.sums._kept is None
    undo()


@pytest.mark.parametrize("what", ["slower", "refused", "unfinished", "other numbers"])
def test_a_kernel_that_is_not_better_is_not_used(
    what: str, launch: CppLaunch, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model stays as it was."""
    made: Any = launch
    if what == "slower":
        monkeypatch.setattr(residual_blocks, "gain", lambda *_, **__: 1.01)
    if what == "unfinished":
        monkeypatch.setattr(Measurements, "begin_try", lambda *_: False)
    if what == "refused":

        def refuse(*_: Any) -> Any:
            raise RuntimeError("no such word")

        made = lambda *_: refuse  # noqa: E731
    if what == "other numbers":
        made = CppLaunch(folder, faults=(("all / SIZE", "all / (2 * SIZE)"),))
    before = kinds_in(model)
    change = residual_blocks.choose(model, ROWS, made, Measurements())
    assert change is None
    install(model, [FuseResiduals(made, True, True)] if what == "other numbers" else [])
    assert kinds_in(model) == before


def test_a_second_start_compares_nothing(
    launch: CppLaunch, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured and compared is kept."""
    for is_first in (True, False):
        kept = Measurements.in_home(tmp_path, {})
        change = residual_blocks.choose(model, ROWS, launch, kept)
        assert change is not None
        install(model, [change])
        assert num_blocks(model) == len(model.layers)
        restore(model)
        if is_first:
            for name in ("_gain", "_logits"):
                monkeypatch.setattr(residual_blocks, name, lambda *_: pytest.fail("compared again"))


def test_a_models_parameters_stay(launch: CppLaunch, model: Any) -> None:
    """Nothing that a block holds for this is taken for a part of the model."""
    names = [name for name, _ in tree_flatten(model.parameters())]
    undo = install(model, [FuseResiduals(launch, True, True)])
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    undo()

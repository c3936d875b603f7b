"""Kernels from kept machine code: the same results as those that are given strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from batchkv_worker.kept_files import KERNELS
from batchkv_worker.kv.kernels import compiled_launch
from batchkv_worker.kv.kernels.compiled_launch import CompiledLaunch, launch_for
from batchkv_worker.kv.kernels.decode import Partials
from batchkv_worker.kv.kernels.draw import DrawKernel
from batchkv_worker.kv.kernels.kept_code import KeptCode
from batchkv_worker.kv.kernels.launch import Launch, View, cuda_launch
from batchkv_worker.kv.kernels.nvrtc import Compiler, CompilerError
from batchkv_worker.kv.kernels.rotary import RotaryKernel, Turn
from worker.kv.kernels.cases import SCALE, Case, Sample
from worker.kv.kernels.cpp_compiler import Calls, CppCompiler
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

CASES = (
    Case("affine8", "affine8", mx.bfloat16, 128, 128, 4, 1, False, 5, 3),
    Case("mxfp4", "float", mx.float32, 64, 80, 3, 0, True, 2, 5),
    Case("affine4", "turbo3", mx.float16, 96, 64, 2, 2, True, 2, 4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", found, raising=False)
    return found


def launch_in(folder: Path, kept: Path | None = None) -> CompiledLaunch:
    return CompiledLaunch(CppCompiler(folder), "sm_90", KeptCode(kept))


def all_of(case: Case, launch: Launch) -> list[mx.array]:
    """What each kernel of a layer gives, for queries and values that are parts of more."""
    sample, kernels = Sample.of(case, (300,)), case.kernels(launch)
    found = []
    for longest in (kernels.split, 300):
        given = sample.queries, sample.records, sample.bounds, longest, SCALE
        found.append(kernels.attend(*given, sample.sinks, sample.partials))
    pool = mx.contiguous(sample.records[:1])
    score, value = kernels.attend_alone(sample.queries, pool, sample.bounds, 300, SCALE)
    chain = mx.array([[row] for row in range(max(8, case.rows))], mx.int32)
    partials = Partials(score, value, mx.where(chain < case.rows, chain, -1))
    rest = 300, SCALE, None, partials
    found += [score, value, kernels.attend(sample.queries, sample.records, sample.bounds, *rest)]
    both = mx.random.normal(
        (case.rows, 2, 1, case.key_size + case.value_size), key=mx.random.key(1)
    )
    keys, values = mx.split(both.astype(case.dtype), [case.key_size], axis=-1)
    found.append(kernels.pack(keys, values))
    places = mx.array([(0, 2, 300, -2), *[(0, 0, 0, 0)] * 7], mx.int32)
    parts = [tuple(map(mx.contiguous, one)) for one in case.layout.split(sample.records)]
    return [*found, kernels.place_rows(places, *parts, 1, 320)]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keys}+{case.values}")
def test_results_are_those_of_kernels_with_strides(case: Case, folder: Path, calls: Calls) -> None:
    """Bit for bit, with sizes and views as the numbers that a program is given."""
    wanted = all_of(case, CppLaunch(folder, as_on_gpu=True))
    for one, other in zip(all_of(case, launch_in(folder)), wanted, strict=True):
        assert mx.array_equal(one, other, equal_nan=True)


def test_a_view_is_read_where_it_is(folder: Path, calls: Calls) -> None:
    """Queries and keys of one product: neither is copied, and without views both are."""
    turn, rows, heads, kv_heads = Turn(64, 32, False, (1e-6, 1e-5)), 9, 4, 2
    whole = mx.random.normal((rows, 1, (heads + 2 * kv_heads) * turn.size))
    ends = [heads * turn.size, (heads + kv_heads) * turn.size]
    parts = [one.reshape(rows, 1, -1, turn.size) for one in mx.split(whole, ends, axis=-1)]
    step = whole.shape[-1]
    strides = step, step, turn.size, 1
    views = View(parts[0], whole, 0, strides), View(parts[1], whole, ends[0], strides)
    weights = mx.random.uniform(0.5, 1.5, (turn.size,)), mx.ones((turn.size,))
    rest = weights, mx.random.uniform(0, 1, (turn.turned,)), mx.arange(rows, dtype=mx.int32)
    wanted = RotaryKernel(CppLaunch(folder))(turn, parts[0], parts[1], *rest)
    kernel = RotaryKernel(launch_in(folder))
    for given, copied in ((views, 0), (parts[:2], 2)):
        before = calls.copied
        found = kernel(turn, *given, *rest)
        assert calls.copied - before == copied
        assert all(mx.array_equal(*both) for both in zip(found, wanted, strict=True))


def test_records_of_a_pool_are_not_copied_for_each_row(folder: Path, calls: Calls) -> None:
    case = CASES[0]
    sample = Sample.of(case, (300,))
    pool = mx.contiguous(sample.records[:1])
    case.kernels(launch_in(folder)).attend_alone(sample.queries, pool, sample.bounds, 300, SCALE)
    assert calls.copied == 0


def test_a_later_process_compiles_nothing(folder: Path, tmp_path: Path, calls: Calls) -> None:
    """What is kept serves the same program for the same device and compiler, and no other."""
    logits, given = mx.random.normal((2, 100)), mx.zeros((2, 5))
    first = launch_in(folder, tmp_path)
    for _ in range(2):
        DrawKernel(first)(logits, given)
    assert len(first.compiler.compiled) == 1
    for again, count in (
        (launch_in(folder, tmp_path), 0),
        (replace(launch_in(folder, tmp_path), architecture="sm_100"), 1),
        (replace(first, compiler=CppCompiler(folder, version="another"), runs={}), 1),
        (launch_in(folder), 1),
    ):
        DrawKernel(again)(logits, given)
        assert len(again.compiler.compiled) == count


def test_mlx_compiles_what_the_compiler_refuses(
    folder: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that is too old for the device, say. It is asked once, and said once."""
    asked: list[str] = []

    def refuse(self: CppCompiler, program: str, name: str, architecture: str) -> bytes:
        asked.append(name)
        raise CompilerError(f"{name}: no such architecture")

    monkeypatch.setattr(CppCompiler, "compile", refuse)
    monkeypatch.setattr(compiled_launch, "cuda_launch", CppLaunch(folder))
    logits, given = mx.random.normal((2, 100)), mx.zeros((2, 5))
    wanted = DrawKernel(CppLaunch(folder))(logits, given)
    kernel = DrawKernel(launch_in(folder))
    with caplog.at_level("WARNING", "batchkv.engine"):
        for _ in range(2):
            assert mx.array_equal(kernel(logits, given), wanted)
    assert len(asked) == 1 and not calls.scalars
    assert [one.getMessage().count("no such architecture") for one in caplog.records] == [1]


@pytest.mark.parametrize("architecture", ["", "applegpu_g16", "sm_90; rm -rf"])
def test_mlx_compiles_for_a_device_without_a_known_name(
    architecture: str, folder: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_launch, "find_compiler", lambda: CppCompiler(folder))
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    launch_for.cache_clear()
    assert launch_for(folder) is cuda_launch
    launch_for.cache_clear()


@pytest.mark.parametrize("missing", ["compiler", "call", "nothing"])
def test_kept_code_needs_the_compiler_and_mlxs_call(
    missing: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else MLX compiles in each process, as it does without this."""
    find: Callable[[], Compiler | None] = lambda: CppCompiler(folder)  # type: ignore[assignment,return-value]  # noqa: E731
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", Calls(), raising=False)
    if missing == "compiler":
        find = lambda: None  # noqa: E731
    if missing == "call":
        monkeypatch.delattr(mx.fast, "precompiled_cuda_kernel")
    monkeypatch.setattr(compiled_launch, "find_compiler", find)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    launch_for.cache_clear()
    found = launch_for(tmp_path)
    launch_for.cache_clear()
    assert (found is cuda_launch) == (missing != "nothing")
    if isinstance(found, CompiledLaunch):
        assert found.kept.folder == tmp_path / KERNELS

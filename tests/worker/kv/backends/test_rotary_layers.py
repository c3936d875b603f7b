"""Where one kernel for norms and positions is faster: what is timed, and what must be equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends.gpu import rotary_layers
from batchkv_worker.kv.backends.gpu.rotary_layers import _is_faster, _Shape
from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.compiled_launch import CompiledLaunch
from batchkv_worker.kv.kernels.kept_code import KeptCode
from batchkv_worker.kv.kernels.launch import Constant, Input, Launch, Run, View
from batchkv_worker.kv.kernels.rotary import Turn
from worker.kv.kernels.cpp_compiler import Calls, CppCompiler
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
ROWS = 9


def shape_of(*, is_joint: bool) -> _Shape:
    return _Shape(4, 2, Turn(64, 32, False, (1e-6, 1e-5)), mx.float32, is_joint)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_joint", [False, True])
def test_a_copy_of_values_counts_where_the_kernel_spares_it(
    is_joint: bool, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is with kept code, whose kernels copy parts of a product. Only computing is timed."""
    calls = Calls()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", calls, raising=False)
    launch: Launch = CppLaunch(tmp_path)
    if is_kept:
        launch = CompiledLaunch(CppCompiler(tmp_path), "sm_90", KeptCode())
    found: list[tuple[int, bool]] = []

    def gain(apart: Callable[[], Any], at_once: Callable[[], Any], **how: Any) -> float:
        found.append((len(apart()), how["is_built"]))
        return 1.2

    monkeypatch.setattr(rotary_layers, "gain", gain)
    assert _is_faster(shape_of(is_joint=is_joint), ROWS, launch)
    assert found == [(3 if is_joint and is_kept else 2, True)]
    assert calls.copied == 0


@pytest.mark.parametrize(("won", "is_spoilt"), [(1.05, False), (1.2, True)])
def test_a_kernel_that_is_no_faster_or_differs_is_not_used(
    won: float, is_spoilt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CppLaunch(tmp_path)

    def launch(body: Body, constants: tuple[Constant, ...]) -> Run:
        run = plain(body, constants)

        def spoilt(inputs: list[Input], *rest: Any) -> list[mx.array]:
            assert all(isinstance(one, View) for one in inputs[:2])
            return [one + 1 for one in run(inputs, *rest)]

        return spoilt if is_spoilt else run

    monkeypatch.setattr(rotary_layers, "gain", lambda *_, **__: won)
    assert not _is_faster(shape_of(is_joint=True), ROWS, launch)

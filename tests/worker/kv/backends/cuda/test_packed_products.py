"""Products with packed weights: all rows as one matrix, and kernels that are compiled early."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from batchkv_worker.kv.backends import device, mlx_kernels, packed_products
from batchkv_worker.kv.backends.cuda import early_products
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.cuda.early_products import EarlyProducts
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.packed_products import ROWS, PackedProduct, products_of
from batchkv_worker.kv.backends.warm_up import EarlyLaunches

SMALL = PackedProduct("float32", "affine", 4, 64, 64, 128)


class Packed(nn.Module):  # type: ignore[misc]
    """Layers with 4 bits, one of them larger, and an embedding with 8."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = (nn.QuantizedLinear(64, size) for size in (128, 256))
        self.odd = nn.QuantizedLinear(64, 100)
        self.words = nn.QuantizedEmbedding(512, 128, bits=8)
        self.dense = nn.Linear(64, 64)


@pytest.fixture
def joined() -> Iterator[None]:
    original = mx.quantized_matmul
    packed_products.join_rows()
    yield
    mx.quantized_matmul = original


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(mlx_kernels.VARIABLE, str(tmp_path))
    return tmp_path


def test_all_rows_of_a_step_are_one_matrix(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a layer, an embedding or a chunk of prompts multiplies."""
    seen = []
    real = mx.quantized_matmul.original

    def noting(x: mx.array, *given: Any, **named: Any) -> mx.array:
        seen.append(x.shape)
        return real(x, *given, **named)

    monkeypatch.setattr(mx.quantized_matmul, "original", noting)
    model = Packed()
    for rows, tokens in ((5, 1), (3, 7), (1, 1)):
        x = mx.random.normal((rows, tokens, 64))
        expected = real(
            *(x, model.small.weight, model.small.scales, model.small.biases),
            **{"transpose": True, "group_size": 64, "bits": 4},
        )
        out = model.small(x)
        assert out.shape == (rows, tokens, 128) and mx.allclose(out, expected, atol=1e-5)
        assert model.words.as_linear(mx.zeros((rows, tokens, 128))).shape == (rows, tokens, 512)
    assert seen == [shape for rows in (5, 21, 1) for shape in ((rows, 64), (rows, 128))]


def test_other_products_stay_as_they_are(joined: None) -> None:
    """An input of two dimensions or none of rows, and weights of several matrices."""
    weights = mx.random.normal((3, 128, 64))
    packed = mx.quantize(weights, group_size=64, bits=8)
    one = [part[0] for part in packed]
    kind: dict[str, Any] = {"transpose": True, "group_size": 64, "bits": 8}
    x = mx.random.normal((3, 2, 64))
    assert mx.quantized_matmul(x[0], *one, **kind).shape == (2, 128)
    assert mx.quantized_matmul(x[:0], *one, **kind).shape == (0, 2, 128)
    apart = mx.stack([mx.quantized_matmul(x[i], *(p[i] for p in packed), **kind) for i in range(3)])
    assert mx.allclose(mx.quantized_matmul(x, *packed, **kind), apart, atol=1e-5)


def test_it_is_done_once(joined: None) -> None:
    once = mx.quantized_matmul
    packed_products.join_rows()
    assert mx.quantized_matmul is once


def test_a_model_needs_a_product_for_each_kind_of_layer() -> None:
    """The smallest layer of each: 4 bits, those without whole tiles of columns, and 8 bits."""
    found = sorted(products_of(Packed(), mx.bfloat16), key=lambda each: each.kernel)
    assert found == [
        PackedProduct("bfloat16", "affine", 4, 64, 64, 100),
        PackedProduct("bfloat16", "affine", 4, 64, 64, 128),
        PackedProduct("bfloat16", "affine", 8, 64, 128, 512),
    ]
    assert len({each.kernel for each in found}) == 3
    assert products_of(nn.Linear(4, 4), mx.bfloat16) == []


def waited(early: EarlyProducts) -> list[str]:
    said: list[str] = []
    early.wait(said.append)
    return said


def test_processes_of_their_own_compute_each_product_once(folder: Path) -> None:
    """A second start finds that it is done. A fault of MLX's files makes a third do it again."""
    model = Packed()
    del model.odd, model.words
    early = early_products.begin(model, mx.float32)
    assert early is not None
    assert waited(early) == ["compiling products with packed weights, once on this machine"]
    marks = [f"affine-4-64-float32-11-{rows}-{mx.__version__}{mlx_kernels.MARK}" for rows in ROWS]
    assert sorted(file.name for file in folder.iterdir()) == marks
    assert early_products.begin(model, mx.float32) is None
    assert early_products.begin(nn.Linear(4, 4), mx.float32) is None
    (folder / marks[0]).unlink()
    again = early_products.begin(model, mx.float32)
    assert again is not None
    again.close()


def test_marks_go_with_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mlx_kernels.VARIABLE, "")
    mlx_kernels.keep_in(tmp_path, "sm_90")
    early_products._keep(SMALL, 16)
    assert early_products._is_kept(SMALL, 16)
    mlx_kernels._forget()
    assert not early_products._is_kept(SMALL, 16)


def test_nothing_is_marked_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mlx_kernels.VARIABLE, "")
    early_products._keep(SMALL, 16)
    assert not early_products._is_kept(SMALL, 16)


def test_one_that_fails_is_told_and_tried_again_later(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        waited(EarlyProducts([(PackedProduct("float32", "affine", 4, 48, 96, 128), 16)]))
    assert "compiles affine-4-48-float32-10 for 16 rows ended with 1, and rows" in caplog.text
    assert re.search(r"wait for it: ValueError: \[quantize\] .*48", caplog.text)
    assert not any(folder.iterdir())


def sleeping(*_: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_one_that_cannot_be_started_ends_no_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before it ends as it would; those after it are left to MLX."""
    started = []

    def start(*given: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("no processes left")
        started.append(sleeping())
        return started[0]

    monkeypatch.setattr(device, "num_cpus", lambda: 8)
    monkeypatch.setattr(early_products, "_start", start)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        early = EarlyProducts([(SMALL, rows) for rows in ROWS])
    assert "no process can be started that compiles: no processes left" in caplog.text
    started[0].terminate()
    waited(early)
    assert early._waiting == early._running == []


WORKER = """
import sys
from batchkv_worker.kv.backends.cuda import early_products
early = early_products.EarlyProducts([(early_products.PackedProduct(*{fields!r}), 16)])
print(early._running[0].process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_worker(signalled: signal.Signals, tmp_path: Path) -> None:
    """However that ended. Weights of 2 GB are not packed before."""
    slow = ("float32", "affine", 4, 64, 2**14, 2**15)
    code = WORKER.format(fields=slow)
    environment = {**os.environ, mlx_kernels.VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
    assert worker.stdout is not None and worker.stdin is not None
    child = int(worker.stdout.readline())
    worker.send_signal(signalled)
    worker.wait()
    until = time.monotonic() + 10  # to pack them takes twice as long
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() and not any(tmp_path.iterdir())
    worker.stdin.close()
    worker.stdout.close()


def test_what_is_compiled_is_what_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows, the layer's weights, its dtype; and it is computed."""
    products, computed = [], []
    right, evaluate = mx.quantized_matmul, mx.eval

    def noting(x: mx.array, w: mx.array, *rest: Any, **named: Any) -> mx.array:
        products.append((x.shape, x.dtype, w.shape, named))
        return right(x, w, *rest, **named)

    monkeypatch.setattr(mx, "quantized_matmul", noting)
    monkeypatch.setattr(mx, "eval", lambda *out: (computed.extend(out), evaluate(*out)))
    product = PackedProduct("bfloat16", "affine", 8, 32, 96, 40)
    early_products.compile_one(json.dumps({"rows": 32, **product.as_dict()}))
    named = {"transpose": True, "group_size": 32, "bits": 8, "mode": "affine"}
    assert products == [((32, 96), mx.bfloat16, (40, 24), named)]
    assert [array.shape for array in computed] == [(32, 40)]


def test_names_tell_kernels_apart() -> None:
    """MLX has others where inputs are no multiple of 64 and the group, or outputs none of 128."""

    def name(group: int, inputs: int, outputs: int) -> str:
        return PackedProduct("float16", "affine", 4, group, inputs, outputs).kernel

    assert name(128, 192, 128) == "affine-4-128-float16-10"
    assert name(128, 256, 128) == name(128, 512, 256) == "affine-4-128-float16-11"
    assert name(64, 192, 100) == "affine-4-64-float16-01"


def test_one_that_takes_too_long_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(early_products, "_start", sleeping)
    monkeypatch.setattr(early_products, "MOST_SECONDS", 0.2)
    early = EarlyProducts([(SMALL, 16)])
    ((process, _, _),) = early._running
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        waited(early)
    assert "1 of these kernels are not there after 0 s" in caplog.text
    assert process.returncode is not None and not any(folder.iterdir())


def test_as_many_run_at_once_as_half_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others begin when one has ended. An end of the start ends all."""
    monkeypatch.setattr(device, "num_cpus", lambda: 4)
    monkeypatch.setattr(early_products, "_start", sleeping)
    early = EarlyProducts([(SMALL, rows) for rows in ROWS])
    running = [process for process, _, _ in early._running]
    assert len(running) == 2
    running[0].kill()
    while running[0].poll() is None:
        time.sleep(0.01)
    early._look()
    assert [rows for _, _, (_, rows) in early._running] == [32, 64]
    running += [early._running[1][0]]
    early.close()
    assert all(process.poll() is not None for process in running)
    assert early._running == early._waiting == []
    monkeypatch.setattr(device, "num_cpus", lambda: 100)
    many = EarlyProducts([(SMALL, rows) for rows in (*ROWS, *ROWS)])
    assert len(many._running) == 4
    many.close()
    assert many._running == many._waiting == []


def test_it_ends_with_the_weights_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else choices would be measured beside it. Only CUDA compiles such products."""
    calls = []

    class Noting:
        def wait(self, report: Any) -> None:
            report("compiling")
            calls.append("wait")

        def close(self) -> None:
            calls.append("close")

    class Compiling(GenericBackend):
        def compile_early(self, model: Any, dtype: mx.Dtype) -> Any:
            calls.append("begin")
            return Noting()

    early = EarlyLaunches(Compiling())
    early.begin(Packed(), mx.float32)
    early.end_warm_up(calls.append)
    early.close()
    assert calls == ["begin", "compiling", "wait", "close"]
    monkeypatch.setattr(early_products, "_start", sleeping)
    monkeypatch.setattr(early_products, "_is_kept", lambda *_: False)
    assert GenericBackend().compile_early(Packed(), mx.float32) is None
    found = CudaBackend().compile_early(Packed(), mx.float32)
    assert found is not None
    found.close()


def test_a_fault_at_its_beginning_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(GenericBackend):
        def compile_early(self, model: Any, dtype: mx.Dtype) -> Any:
            raise OSError("no processes left")

    early = EarlyLaunches(Faulty())
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        early.begin(Packed(), mx.float32)
    early.end_warm_up(lambda _: None)
    early.close()
    assert caplog.text.endswith("before rows come: no processes left\n")

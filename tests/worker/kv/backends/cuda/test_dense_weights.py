"""Layers with packed weights become dense on CUDA, with the same numbers, where there is room."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tuner.utils import get_total_parameters

from batchkv_worker.bench.setup import load_model
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.engine.factory import build_engine
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.cuda import dense_weights
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.model.loader import load
from batchkv_worker.settings import WorkerSettings

ROOM = 2**40
PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the demo model with weights of 8 bits, as a folder that users download."""
    folder = tmp_path_factory.mktemp("packed")
    model, _, config = mlx_lm.utils.load(str(MODEL_PATH), return_config=True)
    model.model.layers, config["num_hidden_layers"] = model.layers[:2], 2
    model, config = mlx_lm.utils.quantize_model(model, config, 64, 8)
    mlx_lm.utils.save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    for file in MODEL_PATH.glob("*.json"):
        if "token" in file.name:
            shutil.copy(file, folder)
    return folder


def packed_layers(model: Any) -> int:
    return sum(isinstance(module, PACKED) for module in model.modules())


def test_the_model_of_a_folder_answers_the_same(packed_model: Path) -> None:
    """Its embedding, which also gives the logits, and the layers of every block."""
    packed = load(str(packed_model), "float32")
    dense = load(
        *(str(packed_model), "float32"),
        before_reading=lambda model, dtype: dense_weights.unpack(model, dtype, ROOM),
    )
    assert packed_layers(packed.model) == 15 and packed_layers(dense.model) == 0
    assert dense.weight_bytes > 3 * packed.weight_bytes
    assert dense.weight_bytes == 4 * get_total_parameters(dense.model)
    tokens = mx.array([[5, 9, 200, 31, 7]])
    logits = [loaded.model(tokens) for loaded in (packed, dense)]
    assert mx.allclose(*logits, atol=1e-3) and float(mx.abs(logits[0]).max()) > 1


def test_a_worker_asks_its_device(packed_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it reads weights, and before anything is compiled for packed ones.

    The memory of its keys and values is reckoned with what the weights are then.
    """
    compiled_for = []

    def unpack(_: object, model: Any, dtype: mx.Dtype, *, has_room: bool) -> int:
        assert not has_room
        return dense_weights.unpack(model, dtype, ROOM)

    def begin(_: object, model: Any, dtype: mx.Dtype) -> None:
        compiled_for.append(packed_layers(model))

    monkeypatch.setattr(GenericBackend, "unpack_weights", unpack)
    monkeypatch.setattr(GenericBackend, "compile_early", begin)
    # Nothing is measured for slots and chunks.
    given = {"model": str(packed_model), "slots": 2, "prefill_chunk": 256}
    engine = build_engine(WorkerSettings.from_env({}, **given))
    assert packed_layers(engine.loaded.model) == 0 and compiled_for == [0]
    assert engine.loaded.weight_bytes == 4 * get_total_parameters(engine.loaded.model)
    engine.close()
    engine = build_engine(WorkerSettings.from_env({}, **given, weights="packed"))
    assert packed_layers(engine.loaded.model) == 15 and compiled_for == [0, 15]
    engine.close()
    with pytest.raises(SettingsError, match="--weights unpacked: only NVIDIA GPUs"):
        build_engine(WorkerSettings.from_env({}, **given, weights="unpacked"))


def test_a_worker_unpacks_without_asking_for_room(
    packed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--weights unpacked``, where the device does not refuse it."""
    asked: list[bool] = []

    def unpack(_: object, model: Any, dtype: mx.Dtype, *, has_room: bool) -> int:
        asked.append(has_room)
        return 0

    monkeypatch.setattr(GenericBackend, "unpack_weights", unpack)
    monkeypatch.setattr(WorkerSettings, "check_device", lambda *_: None)
    build_engine(WorkerSettings.from_env({}, model=str(packed_model), weights="unpacked")).close()
    assert asked == [True]


def test_a_bench_measures_such_a_model(packed_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(_: object, model: Any, dtype: mx.Dtype) -> int:
        return dense_weights.unpack(model, dtype, ROOM)

    monkeypatch.setattr(GenericBackend, "unpack_weights", unpack)
    loaded, config = load_model(str(packed_model), "float32", "affine8", 4)
    assert packed_layers(loaded.model) == 0 and config.slots == 4


class Mixed(nn.Module):  # type: ignore[misc]
    """A layer with a bias, one of microscaled numbers, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.biased = nn.QuantizedLinear(64, 128, bias=True)
        self.layers = [nn.QuantizedLinear(64, 32, bias=False, mode="mxfp4", group_size=32)]
        self.experts = QuantizedSwitchLinear(64, 32, 4)
        self.dense = nn.Linear(64, 8)


def test_each_kind_of_layer(caplog: pytest.LogCaptureFixture) -> None:
    """In the model's dtype. Experts stay packed: their products are others."""
    model, x = Mixed(), mx.random.normal((3, 64))
    model.biased.bias = mx.arange(128).astype(mx.float32)
    before = [model.biased(x), model.layers[0](x)]
    with caplog.at_level(logging.INFO, "batchkv.engine"):
        assert dense_weights.unpack(model, mx.float32, ROOM) == 2
    assert "2 layers with packed weights get dense ones, 0.0 GB" in caplog.text
    after = [model.biased(x), model.layers[0](x)]
    assert type(model.biased) is type(model.layers[0]) is nn.Linear
    assert model.layers[0].weight.dtype == mx.float32 and "bias" not in model.layers[0]
    assert isinstance(model.experts, QuantizedSwitchLinear)
    assert all(mx.allclose(*pair, atol=1e-4) for pair in zip(before, after, strict=True))


def num_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def room_of(dtype: mx.Dtype) -> int:
    """What ``Mixed`` takes with dense weights; the bias of a packed layer is not counted twice."""
    model = Mixed()
    dense_weights.unpack(model, dtype, ROOM)
    return num_bytes(model) - int(model.biased.bias.nbytes)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_model_without_room_stays_packed(dtype: mx.Dtype) -> None:
    """All that it then has counts, experts and a bias, too."""
    model, room = Mixed(), room_of(dtype)
    assert dense_weights.unpack(model, dtype, room - 1) == 0
    assert packed_layers(model) == 2
    assert dense_weights.unpack(model, dtype, room) == 2
    assert dense_weights.unpack(nn.Linear(4, 4), dtype, ROOM) == 0


def test_a_layer_in_two_places_stays_one() -> None:
    model = Mixed()
    model.again = model.biased
    assert dense_weights.unpack(model, mx.float32, ROOM) == 2
    assert model.again is model.biased and type(model.again) is nn.Linear


@pytest.mark.parametrize(("less", "count"), [(0, 2), (1, 0)])
def test_half_of_the_memory_is_room_enough(
    less: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other half is left to keys and values. Metal and CPUs read packed weights."""
    monkeypatch.setattr(device, "free_bytes", lambda: 2 * room_of(mx.bfloat16) - less)
    for backend in (GenericBackend(), MetalBackend()):
        assert backend.unpack_weights(Mixed(), mx.bfloat16) == 0
    assert CudaBackend().unpack_weights(Mixed(), mx.bfloat16) == count
    assert CudaBackend().unpack_weights(Mixed(), mx.bfloat16, has_room=True) == 2

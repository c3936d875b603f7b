"""Adapters with random weights, in the files that mlx-lm's trainer writes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from support import tiny_models  # first: it loads the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # isort: skip
from mlx_lm.tuner.utils import load_adapters  # isort: skip

RANK = 4
_LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


def write_adapter(
    folder: Path,
    model: Any,
    *,
    kind: str = "lora",
    seed: int = 0,
    keys: Collection[str] = (),
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """An adapter of the model's linear layers, or of those whose names end like ``keys``."""
    names = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _LINEAR)
        and name.startswith("model.layers.")
        and (not keys or name.endswith(tuple(keys)))
        and not (kind == "dora" and isinstance(layer, SwitchLinear | QuantizedSwitchLinear))
    }
    local = sorted({name.split(".", 3)[3] for name in names})
    numbers = {"rank": RANK, "scale": 2.0, "dropout": 0.1, "keys": local}
    whole = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": numbers, **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    arrays: dict[str, mx.array] = {}
    layers = dict(model.named_modules())
    mx.random.seed(seed)
    for name in sorted(names):
        for part, shape in _shapes(layers[name]).items():
            size = strength / shape[-2 if part == "lora_a" else -1] ** 0.5 if part != "m" else 1.0
            drawn = mx.random.normal(shape) * size
            if part == "m":
                if kind != "dora":
                    continue
                drawn = mx.abs(drawn) + 0.5
            arrays[f"{name}.{part}"] = drawn
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder


def _shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        inputs, outputs, experts = layer.input_dims, layer.output_dims, layer.num_experts
        return {"lora_a": (experts, RANK, inputs), "lora_b": (experts, outputs, RANK)}
    outputs, inputs = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear):
        inputs = inputs * 32 // layer.bits
    return {"lora_a": (inputs, RANK), "lora_b": (RANK, outputs), "m": (outputs,)}


def as_mlx_lm(model: Any, folder: Path) -> Any:
    """The model with the adapter, as mlx-lm loads it."""
    adapted = load_adapters(model, str(folder))
    adapted.eval()
    return adapted


def quantized(family: str) -> Any:
    """A tiny model whose linear layers have 4 bits."""
    model = tiny_models.build(family)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model

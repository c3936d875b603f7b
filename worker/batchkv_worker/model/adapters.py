"""Puts an adapter on a loaded model and takes it off again. The model's own weights stay.

mlx-lm's own layers compute an adapted layer, each around the layer of the model. So the answers are
those of mlx-lm with the same adapter, and a model whose adapter was taken off is the same object
with the same arrays as before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from batchkv_producer.submit import fingerprint
from batchkv_worker.errors import ModelChangedError
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.model import load_progress as loading
from batchkv_worker.model.adapter_files import (
    LORA_PARTS,
    WEIGHTS_NAME,
    AdapterFiles,
    Shape,
    fault_of,
)
from batchkv_worker.model.loader import LoadedModel

log = logging.getLogger("batchkv.engine")

_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory: ``arrays`` by layer and short name. ``digest`` is of its files."""

    files: AdapterFiles
    arrays: Mapping[str, Mapping[str, mx.array]]
    fingerprint: str  # of the model with it
    digest: str

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for layer in self.arrays.values() for array in layer.values())

    def on(self, loaded: LoadedModel, served_name: str) -> LoadedModel:
        """What is known of the model while it has this adapter."""
        places = hashlib.sha256(f"{loaded.weight_files} {self.digest}".encode())
        return replace(
            loaded,
            name=served_name,
            adapter=self.digest,
            fingerprint=self.fingerprint,
            named="",
            weight_files=places.hexdigest()[:32] if loaded.weight_files else "",
        )

    def has_changed(self) -> bool:
        """Whether its files are others than those that were loaded. For any thread."""
        return _digest(self.files) not in ("", self.digest)


def load_all(found: Iterable[AdapterFiles], loaded: LoadedModel) -> tuple[LoadedAdapter, ...]:
    """Read the adapters of a model, after comparing all their shapes with its layers.

    Raises SettingsError for an adapter of another model, ModelChangedError if files change.
    """
    layers = dict(loaded.model.named_modules())
    for files in found:
        _check(files, layers)
    return tuple(_load(files, loaded) for files in found)


def _load(files: AdapterFiles, loaded: LoadedModel) -> LoadedAdapter:
    loading.report(f"loading adapter {files.name}")
    before = _digest(files)
    arrays: dict[str, dict[str, mx.array]] = {}
    try:
        weights: Any = mx.load(str(files.weights))
        mx.eval(list(weights.values()))
    except (RuntimeError, ValueError, OSError) as fault:
        if is_device_fault(fault):
            raise
        raise fault_of(files.adapter, f"{WEIGHTS_NAME} cannot be loaded: {fault}") from fault
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        arrays.setdefault(layer, {})[part] = array
    held = {
        layer: {part: tuple(array.shape) for part, array in found.items()}
        for layer, found in arrays.items()
    }
    if not before or _digest(files) != before or held != files.shapes:
        raise ModelChangedError(f"the files of adapter {files.adapter} changed while it was loaded")
    whole = fingerprint.of_adapter(loaded.fingerprint, files.adapter.path)
    adapter = LoadedAdapter(files, arrays, whole, before)
    log.info(
        "adapter %s: %s of rank %d on %d layers, %.1f MB",
        *(files.adapter, files.kind, files.rank, len(arrays), adapter.num_bytes / 1e6),
    )
    return adapter


def _digest(files: AdapterFiles) -> str:
    """The digest of an adapter's files, whatever the model; "" if they cannot be read."""
    try:
        return fingerprint.of_adapter("any", files.adapter.path)
    except OSError:
        return ""


def put_on(model: Any, adapter: LoadedAdapter) -> Undo:
    """Adapt the layers of a model. Returns the function that takes the adapter off again."""
    files = adapter.files
    layers = dict(model.named_modules())
    before = {name: layers[name] for name in adapter.arrays}
    adapted = {name: _adapted(files, layer) for name, layer in before.items()}
    for name, layer in adapted.items():
        for part, array in adapter.arrays[name].items():
            setattr(layer, part, array)
        layer.eval()
    _place(model, adapted)

    def take_off() -> None:
        _place(model, before)

    return take_off


def _adapted(files: AdapterFiles, layer: Any) -> Any:
    """mlx-lm's layer around one of the model's. Its arrays are set by the caller."""
    # Imported here, because the trainer's package is of no use without adapters.
    from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

    numbers = {"r": files.rank, "scale": files.scale, "dropout": 0.0}
    is_dora = files.kind == "dora"
    if not is_dora and hasattr(layer, "to_lora"):
        return layer.to_lora(**numbers)
    if isinstance(layer, _SWITCHES):
        return LoRASwitchLinear.from_base(layer, **numbers)
    if isinstance(layer, _EMBEDDINGS):
        return (DoRAEmbedding if is_dora else LoRAEmbedding).from_base(layer, **numbers)
    return (DoRALinear if is_dora else LoRALinear).from_base(layer, **numbers)


def _place(model: Any, modules: Mapping[str, Any]) -> None:
    """Let the model have these modules at these paths."""
    for path, module in modules.items():
        *parents, last = path.split(".")
        holder: Any = model
        for part in parents:
            holder = holder[int(part)] if isinstance(holder, list) else getattr(holder, part)
        if isinstance(holder, list):
            holder[int(last)] = module
        else:
            setattr(holder, last, module)


def _check(files: AdapterFiles, layers: Mapping[str, Any]) -> None:
    """Raise SettingsError if the adapter has a layer that the model lacks, or of another size."""
    for name, shapes in files.shapes.items():
        layer = layers.get(name)
        wanted = None if layer is None else _shapes_for(files, layer)
        if wanted is None:
            raise fault_of(files.adapter, f"the model has no layer {name[:200]} to adapt")
        for part, shape in shapes.items():
            if shape != wanted[part]:
                raise fault_of(
                    files.adapter,
                    f"{name[:200]}.{part} has the shape {list(shape)}, and the model needs "
                    f"{list(wanted[part])}: it is an adapter of another model",
                )


def _shapes_for(files: AdapterFiles, layer: Any) -> dict[str, Shape] | None:
    """The shapes of the arrays that adapt a layer; None if it cannot be adapted."""
    rank, is_dora = files.rank, files.kind == "dora"
    if not is_dora and hasattr(layer, "to_lora"):
        made = layer.to_lora(r=rank, scale=files.scale, dropout=0.0)
        parts = {part: made.get(part) for part in LORA_PARTS}
        are_arrays = all(isinstance(array, mx.array) for array in parts.values())
        return {part: tuple(array.shape) for part, array in parts.items()} if are_arrays else None
    if isinstance(layer, nn.Linear | nn.QuantizedLinear):
        outputs, inputs = layer.weight.shape
        if isinstance(layer, nn.QuantizedLinear):
            inputs = inputs * 32 // layer.bits
        return {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (outputs,)}
    if isinstance(layer, nn.Embedding) or (
        isinstance(layer, nn.QuantizedEmbedding) and not is_dora  # mlx-lm has none
    ):
        rows, dims = layer.weight.shape
        if isinstance(layer, nn.QuantizedEmbedding):
            dims = dims * 32 // layer.bits
        return {"lora_a": (rows, rank), "lora_b": (rank, dims), "m": (rows,)}
    if isinstance(layer, _SWITCHES) and not is_dora:
        inputs, outputs, experts = layer.input_dims, layer.output_dims, layer.num_experts
        return {"lora_a": (experts, rank, inputs), "lora_b": (experts, outputs, rank)}
    return None

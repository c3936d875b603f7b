"""The files of an adapter as mlx-lm's trainer writes them, checked before a model is loaded.

``adapter_config.json`` has the kind and the numbers of the adapter. ``adapters.safetensors`` has
two matrices for each adapted layer, and with DoRA a vector. Only its header is read here. No MLX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.submit.fingerprint import ADAPTER_FILES
from batchkv_producer.wire.adapter import Adapter
from batchkv_worker.errors import SettingsError

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**24
MAX_RANK = 4096
CONFIG_NAME, WEIGHTS_NAME = ADAPTER_FILES
LORA_PARTS = frozenset({"lora_a", "lora_b"})
DORA_PARTS = LORA_PARTS | {"m"}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FUSED = (
    "it is a full fine-tune: its files are weights of the whole model. `mlx_lm.fuse` makes a model "
    "of it, which a worker serves with -m FOLDER"
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose files can be read: ``shapes`` has the arrays of each adapted layer by name.

    ``scale`` multiplies the product of the two matrices.
    """

    adapter: Adapter
    kind: Literal["lora", "dora"]
    rank: int
    scale: float
    shapes: Mapping[str, Mapping[str, Shape]]

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def weights(self) -> Path:
        """The file of the matrices."""
        return self.adapter.path / WEIGHTS_NAME


def fault_of(adapter: Adapter, text: str) -> SettingsError:
    """The error for an adapter that cannot be served; it names the flag."""
    return SettingsError(f"{BY_NAME['adapters'].flag} {adapter}: {text}")


def read_all(adapters: Iterable[Adapter]) -> tuple[AdapterFiles, ...]:
    """The files of all adapters of a worker. Raises SettingsError for the first faulty one."""
    return tuple(map(read, adapters))


def read(adapter: Adapter) -> AdapterFiles:
    """The files of one adapter. Raises SettingsError, which names the flag and the fault."""
    try:
        config = _config(adapter.path / CONFIG_NAME)
        kind = config.get("fine_tune_type", "lora")
        if kind == "full":
            raise ValueError(_FUSED)
        if kind not in ("lora", "dora"):
            shown = repr(kind)[:40]
            raise ValueError(f"{CONFIG_NAME} has the fine_tune_type {shown}, not lora or dora")
        rank, scale = _numbers(config)
        shapes = _layers(_header(adapter.path / WEIGHTS_NAME), kind, rank)
    except OSError as fault:
        if not adapter.path.is_dir():
            raise fault_of(adapter, "there is no such folder here") from fault
        name = Path(str(fault.filename or adapter.path)).name
        raise fault_of(adapter, f"{name} cannot be read: {fault.strerror or fault}") from fault
    except (ValueError, RecursionError) as fault:
        raise fault_of(adapter, str(fault) or "its files are nested too deeply") from fault
    return AdapterFiles(adapter, kind, rank, scale, shapes)


def _config(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG_NAME} has over {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as fault:
        raise ValueError(f"{CONFIG_NAME} is not JSON: {fault}") from fault
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG_NAME} is not an object")
    if "peft_type" in config:
        raise ValueError(
            f"{CONFIG_NAME} is of PEFT's format; only adapters of mlx-lm's trainer are served"
        )
    return config


def _numbers(config: Mapping[str, Any]) -> tuple[int, float]:
    """The rank and the scale."""
    numbers = config.get("lora_parameters")
    if not isinstance(numbers, dict):
        raise ValueError(f"{CONFIG_NAME} has no lora_parameters")
    rank, scale = numbers.get("rank"), numbers.get("scale")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"the rank in {CONFIG_NAME} must be a whole number, 1 to {MAX_RANK}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"the scale in {CONFIG_NAME} must be a number")
    return rank, float(scale)


def _header(file: Path) -> dict[str, Shape]:
    """Array name -> shape, of a safetensors file whose data is as long as its header says."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"{WEIGHTS_NAME} is no safetensors file")
        text = stream.read(size)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {str(name): entry for name, entry in header.items()}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        dtypes = {str(entry["dtype"]) for entry in entries.values()}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as fault:
        raise ValueError(f"{WEIGHTS_NAME} is no safetensors file") from fault
    if 8 + size + max(ends, default=0) != file.stat().st_size:
        raise ValueError(f"{WEIGHTS_NAME} is cut off or damaged: its size is not what it says")
    if not shapes or not dtypes <= _FLOATS:
        raise ValueError(f"{WEIGHTS_NAME} has no arrays, or arrays that are no floats")
    return shapes


def _layers(shapes: Mapping[str, Shape], kind: str, rank: int) -> dict[str, dict[str, Shape]]:
    """Layer -> arrays by their short name. ValueError if a layer lacks one or has another."""
    parts = DORA_PARTS if kind == "dora" else LORA_PARTS
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if not layer or part not in parts:
            raise ValueError(f"{WEIGHTS_NAME} has {name[:200]}, which no {kind} adapter has")
        layers.setdefault(layer, {})[part] = shape
    for layer, found in layers.items():
        if missing := parts - found.keys():
            raise ValueError(f"{WEIGHTS_NAME} lacks {layer[:200]}.{min(missing)}")
        if rank not in found["lora_a"][-2:] or rank not in found["lora_b"][-2:]:
            raise ValueError(
                f"{layer[:200]} in {WEIGHTS_NAME} does not have the rank {rank} of {CONFIG_NAME}"
            )
    return layers

"""The files of an adapter without MLX: of no model, for readers of files and the fake engine."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPES = {"model.layers.0.q_proj.lora_a": (8, 2), "model.layers.0.q_proj.lora_b": (2, 8)}


def config_of(**changes: Any) -> dict[str, Any]:
    """What mlx-lm's trainer writes, as far as it matters."""
    numbers = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    return {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": numbers, **changes}


def write_files(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    *,
    number: float = 0.0,
    dtype: str = "F32",
    **changes: Any,
) -> Path:
    """An adapter whose arrays hold one number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config_of(**changes)))
    header, data = {}, b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        added = struct.pack(f"<{count}f", *[number] * count)
        offsets = [len(data), len(data) + len(added)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += added
    text = json.dumps(header).encode()
    (folder / "adapters.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder

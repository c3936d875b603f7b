"""How much memory the weights of models take, from their files alone, and what this machine has.

The answers are for a process that must not import MLX: it runs this module in another one, which
prints them as JSON. Nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from batchkv_producer.submit.fingerprint import WEIGHTS, locate
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.memory_budget import MemoryFacts

READ_SECONDS = 120.0  # for the import of MLX on a busy machine
MAX_HEADER_BYTES = 2**27
_FLOATS = ("F16", "BF16", "F32")
_OTHERS = (".qweight", ".weight_packed")  # of other programs than MLX


class Machine(NamedTuple):
    """Bytes of the weights of each model as its files have them, and unpacked; the machine's facts.

    None: the model is not on this machine yet. ``unpacked`` None: nothing is unpacked here.
    """

    weights: dict[str, int | None]
    unpacked: dict[str, int | None] | None
    facts: MemoryFacts


def read_machine(models: Sequence[str], cache: str | None, dtype: str) -> Machine:
    """Ask the other process, and wait for it. Raises ModelError if it fails."""
    asked = json.dumps({"models": list(models), "cache": cache, "dtype": dtype})
    command = [sys.executable, "-P", "-m", "batchkv_worker.model.footprint"]
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=READ_SECONDS
        )
        found = json.loads(done.stdout)
        facts = MemoryFacts(**found["facts"])
        return Machine(found["weights"], found["unpacked"], facts)
    except subprocess.TimeoutExpired as fault:
        message = f"MLX did not say within {READ_SECONDS:g} s how much memory this machine has"
        raise ModelError(message) from fault
    except (ValueError, KeyError, TypeError) as fault:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ModelError(f"MLX cannot say how much memory this machine has: {last}") from fault


def weight_bytes(model: str, dtype: str, *, is_unpacked: bool = False) -> int | None:
    """Bytes of a model's weights in memory, if its float numbers are of this dtype.

    ``dtype`` is float32, bfloat16 or float16, or "auto" for the type of the files. ``is_unpacked``:
    as they are after layers with packed weights became dense; experts stay packed. None: there are
    no weights on this machine, or they cannot be read.
    """
    folder = locate(model)
    if folder is None:
        return None
    try:
        tensors: dict[str, Any] = {}
        for file in sorted(folder.glob(WEIGHTS)):
            tensors |= _header(file)
        sizes = {name: _tensor_bytes(one, dtype) for name, one in tensors.items()}
        if is_unpacked:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            kinds = config.get("quantization") or config.get("quantization_config") or {}
            _unpack(sizes, tensors, kinds, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return sum(sizes.values()) or None


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header


def _tensor_bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    kind = str(tensor["dtype"])
    begin, end = tensor["data_offsets"]
    if kind not in _FLOATS or dtype == "auto":
        return int(end) - int(begin)
    return math.prod(map(int, tensor["shape"])) * (4 if dtype == "float32" else 2)


def _unpack(
    sizes: dict[str, int], tensors: Mapping[str, Any], kinds: Mapping[str, Any], dtype: str
) -> None:
    """Replace the size of each packed matrix by that of a dense one.

    ``kinds``: what the model's configuration says of its packing, for all layers and for some.
    """
    if any(name.endswith(_OTHERS) for name in tensors):
        raise ValueError("packed by another program, and converted while it is read")
    for name, scales in tensors.items():
        layer, _, part = name.rpartition(".")
        shape = [int(each) for each in scales["shape"]]
        if part != "scales" or len(shape) != 2 or f"{layer}.weight" not in tensors:
            continue
        own = kinds.get(layer)
        group = int((own if isinstance(own, Mapping) else kinds)["group_size"])
        is_wide = dtype == "float32" or (dtype == "auto" and scales["dtype"] == "F32")
        sizes[f"{layer}.weight"] = math.prod(shape) * group * (4 if is_wide else 2)
        sizes[name] = 0
        sizes.pop(f"{layer}.biases", None)


def main() -> None:
    """Read the question from standard input, print the answer."""
    from batchkv_worker.kv.backends import blas

    blas.load()
    from batchkv_worker.kv.start.kv_memory import read_facts

    asked = json.load(sys.stdin)
    facts = read_facts(asked["cache"])
    dtype = "float32" if asked["dtype"] == "auto" and facts.kind == "cpu" else asked["dtype"]
    models = asked["models"]
    weights = {model: weight_bytes(model, dtype) for model in models}
    unpacked = None
    if facts.kind == "cuda":
        unpacked = {model: weight_bytes(model, dtype, is_unpacked=True) for model in models}
    found = {"weights": weights, "unpacked": unpacked, "facts": asdict(facts)}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

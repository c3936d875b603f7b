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
from typing import Any

from batchkv_producer.submit.fingerprint import WEIGHTS, locate
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.memory_budget import MemoryFacts

READ_SECONDS = 120.0  # for the import of MLX on a busy machine
MAX_HEADER_BYTES = 2**27
_FLOATS = ("F16", "BF16", "F32")


def read_machine(
    models: Sequence[str], cache: str | None, dtype: str
) -> tuple[dict[str, int | None], MemoryFacts]:
    """Bytes of the weights of each model in memory, and the machine's facts.

    None: the model is not on this machine yet. Raises ModelError if the other process fails.
    """
    asked = json.dumps({"models": list(models), "cache": cache, "dtype": dtype})
    command = [sys.executable, "-P", "-m", "batchkv_worker.model.footprint"]
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=READ_SECONDS
        )
        found = json.loads(done.stdout)
        return found["weights"], MemoryFacts(**found["facts"])
    except subprocess.TimeoutExpired as fault:
        message = f"MLX did not say within {READ_SECONDS:g} s how much memory this machine has"
        raise ModelError(message) from fault
    except (ValueError, KeyError, TypeError) as fault:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ModelError(f"MLX cannot say how much memory this machine has: {last}") from fault


def weight_bytes(model: str, dtype: str) -> int | None:
    """Bytes of a model's weights in memory, if its float numbers are of this dtype.

    ``dtype`` is float32, bfloat16 or float16, or "auto" for the type of the files. None: there are
    no weights on this machine, or they cannot be read.
    """
    folder = locate(model)
    if folder is None:
        return None
    try:
        sizes = [_file_bytes(file, dtype) for file in sorted(folder.glob(WEIGHTS))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return sum(sizes) or None


def _file_bytes(file: Path, dtype: str) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        header: Mapping[str, Any] = json.loads(opened.read(length))
    return sum(_tensor_bytes(one, dtype) for name, one in header.items() if name != "__metadata__")


def _tensor_bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    kind = str(tensor["dtype"])
    begin, end = tensor["data_offsets"]
    if kind not in _FLOATS or dtype == "auto":
        return int(end) - int(begin)
    return math.prod(map(int, tensor["shape"])) * (4 if dtype == "float32" else 2)


def main() -> None:
    """Read the question from standard input, print the answer."""
    from batchkv_worker.kv.backends import blas

    blas.load()
    from batchkv_worker.kv.start.kv_memory import read_facts

    asked = json.load(sys.stdin)
    facts = read_facts(asked["cache"])
    dtype = "float32" if asked["dtype"] == "auto" and facts.kind == "cpu" else asked["dtype"]
    weights = {model: weight_bytes(model, dtype) for model in asked["models"]}
    sys.stdout.write(json.dumps({"weights": weights, "facts": asdict(facts)}))


if __name__ == "__main__":
    main()

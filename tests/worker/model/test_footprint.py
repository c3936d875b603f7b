"""The memory of weights, from files alone."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchkv_worker.kv.backends.memory_budget import MemoryFacts
from batchkv_worker.kv.start import kv_memory
from batchkv_worker.model import footprint
from batchkv_worker.model.footprint import weight_bytes


def write(folder: Path, tensors: dict[str, tuple[str, list[int], int]]) -> str:
    """A model's folder whose weights have only a header; the model's name."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header, end = dict[str, object]({"__metadata__": {"format": "mlx"}}), 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return str(folder)


def test_floats_count_in_the_type_they_are_computed_in(tmp_path: Path) -> None:
    """Packed weights keep their size; the float numbers beside them are cast."""
    tensors = {"packed": ("U32", [8, 4], 128), "scales": ("BF16", [8, 2], 32)}
    model = write(tmp_path / "m", tensors)
    assert weight_bytes(model, "auto") == 160
    assert weight_bytes(model, "float32") == 192
    assert weight_bytes(model, "float16") == 160


def test_packed_weights_grow_when_they_are_unpacked(tmp_path: Path) -> None:
    """Matrices with scales become dense in the model's dtype. Experts stay as they are."""
    tensors = {
        "a.weight": ("U32", [64, 16], 4096),  # 64 by 128 of 4 bits
        "a.scales": ("BF16", [64, 2], 256),
        "a.biases": ("BF16", [64, 2], 256),
        "b.weight": ("U32", [64, 16], 4096),
        "b.scales": ("U8", [64, 4], 256),  # microscaled: groups of 32, no biases
        "experts.weight": ("U32", [4, 64, 16], 16384),
        "experts.scales": ("BF16", [4, 64, 2], 1024),
        "norm.weight": ("BF16", [128], 256),
    }
    model = write(tmp_path / "m", tensors)
    kinds = {"group_size": 64, "bits": 4, "b": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps({"quantization": kinds}))
    dense, others = 2 * 64 * 128, 16384 + 1024 + 256
    assert weight_bytes(model, "auto") == 4096 + 512 + 4096 + 256 + others
    assert weight_bytes(model, "auto", is_unpacked=True) == 2 * dense + others
    floats = 2 * (1024 + 256) + 16384
    assert weight_bytes(model, "float32", is_unpacked=True) == 2 * 2 * dense + floats
    assert weight_bytes("demo", "auto", is_unpacked=True) == weight_bytes("demo", "auto")


@pytest.mark.parametrize("name", ["a.qweight", "a.weight_packed"])
def test_the_unpacked_size_of_others_weights_is_not_known(name: str, tmp_path: Path) -> None:
    """mlx-lm converts what other programs packed while it reads them."""
    model = write(tmp_path / "m", {name: ("U32", [8, 4], 128)})
    assert weight_bytes(model, "auto") == 128
    assert weight_bytes(model, "auto", is_unpacked=True) is None


def test_a_model_that_is_not_here_has_no_size(tmp_path: Path) -> None:
    """Neither has one whose files cannot be read. Nothing is downloaded."""
    assert weight_bytes("nobody/has-this", "auto") is None
    broken = Path(write(tmp_path / "m", {}))
    assert weight_bytes(str(broken), "auto") is None
    (broken / "model.safetensors").write_bytes(b"\xff" * 20)
    assert weight_bytes(str(broken), "auto") is None


def test_the_demo_model_s_size_is_that_of_its_file() -> None:
    """As a worker's log says it: 13.6 MB in float32."""
    assert 13_000_000 < (weight_bytes("demo", "float32") or 0) < 14_000_000


@pytest.mark.parametrize(("kind", "is_unpacked"), [("cuda", True), ("metal", False)])
def test_unpacked_sizes_are_told_where_workers_unpack(
    kind: Any,
    is_unpacked: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the other process, with the machine's facts."""
    facts = MemoryFacts(kind, 2**37, 2**36)
    monkeypatch.setattr(kv_memory, "read_facts", lambda _: facts)
    asked = {"models": ["demo", "nobody/has-this"], "cache": None, "dtype": "auto"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    footprint.main()
    told = json.loads(capsys.readouterr().out)
    sizes = {"demo": weight_bytes("demo", "auto"), "nobody/has-this": None}
    assert told["weights"] == sizes and MemoryFacts(**told["facts"]) == facts
    assert told["unpacked"] == (sizes if is_unpacked else None)

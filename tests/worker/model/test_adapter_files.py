"""An adapter's files: what is read of them, and the sentence for each fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchkv_producer.wire.adapter import Adapter
from batchkv_worker.errors import SettingsError
from batchkv_worker.model.adapter_files import read, read_all
from support.adapter_files import config_of, write_files

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def test_the_numbers_and_shapes_of_an_adapter_are_read(tmp_path: Path) -> None:
    """The layers, the rank and the scale are those of the files; ``lora`` is the usual kind."""
    folder = write_files(tmp_path / "a")
    found = read(Adapter("a", str(folder)))
    assert (found.name, found.kind, found.rank, found.scale) == ("a", "lora", 2, 20.0)
    assert found.shapes == {"model.layers.0.q_proj": {"lora_a": (8, 2), "lora_b": (2, 8)}}
    config = config_of()
    del config["fine_tune_type"]
    (folder / CONFIG).write_text(json.dumps(config))
    assert read(Adapter("a", str(folder))) == found


def _cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG).write_text(text) and None


def _with(**changes: object) -> Callable[[Path], None]:
    return _with_config(json.dumps(config_of(**changes)))


def _with_header(header: object) -> Callable[[Path], None]:
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text
    return lambda folder: (folder / WEIGHTS).write_bytes(raw) and None


def _with_arrays(**shapes: tuple[int, ...]) -> Callable[[Path], None]:
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return lambda folder: write_files(folder, named) and None


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_without(CONFIG), "adapter_config.json cannot be read: No such file"),
    (_without(WEIGHTS), "adapters.safetensors cannot be read: No such file"),
    (_with(fine_tune_type="full"), "a full fine-tune"),
    (_with(fine_tune_type="ia3"), "the fine_tune_type 'ia3', not lora"),
    (_with(peft_type="LORA"), "PEFT's format"),
    (_with(lora_parameters=None), "no lora_parameters"),
    (_with(lora_parameters={"rank": 0, "scale": 1}), "the rank"),
    (_with(lora_parameters={"rank": True, "scale": 1}), "the rank"),
    (_with(lora_parameters={"rank": 2, "alpha": 1}), "the scale"),
    (_with(lora_parameters={"rank": 3, "scale": 1}), "does not have the rank 3"),
    (_with_config("{"), "is not JSON"),
    (_with_config("[1]"), "is not an object"),
    (_with_config("[" * 100_000), "nested|JSON"),
    (_cut_off, "is cut off or damaged"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 99) and None, "no safetensors file"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"") and None, "no safetensors file"),
    (_with_arrays(), "has no arrays"),
    (_with_header({"x.lora_a": {"dtype": "F32", "shape": [1e999]}}), "no safetensors file"),
    (_with_header({"x.lora_a": 3}), "no safetensors file"),
    (_with_arrays(x__lora_a=(8, 2)), "lacks x.lora_b"),
    (_with_arrays(x__weight=(8, 8)), "has x.weight, which no lora adapter has"),
    (lambda folder: write_files(folder, dtype="I32") and None, "no floats"),
    (lambda folder: write_files(folder, fine_tune_type="dora") and None, "lacks .*q_proj.m"),
]


@pytest.mark.parametrize(("spoil", "words"), FAULTS, ids=[words[:24] for _, words in FAULTS])
def test_a_faulty_folder_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    """Each fault is one sentence that names the flag, the adapter and its folder."""
    spoil(write_files(tmp_path / "a"))
    adapter = Adapter("mine", str(tmp_path / "a"))
    with pytest.raises(SettingsError, match=words) as refused:
        read_all([adapter])
    assert str(refused.value).startswith(f"--adapter mine={tmp_path}/a: ")
    assert "\n" not in str(refused.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """A folder that is not there is named."""
    with pytest.raises(SettingsError, match="--adapter a=/no/such: there is no such folder"):
        read(Adapter("a", "/no/such"))

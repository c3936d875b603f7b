"""Adapters and models: what fits, what an adapted model is called, and what it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from batchkv_producer.wire.adapter import Adapter
from batchkv_worker.errors import ModelChangedError, SettingsError
from batchkv_worker.model import adapters
from batchkv_worker.model.adapter_files import read
from batchkv_worker.model.adapters import load_all, put_on
from batchkv_worker.prefix.shared.identity import weights_digest
from support import tiny_models
from support.adapters import write_adapter

WEIGHTS = "f" * 32


def adapter_in(folder: Path) -> Adapter:
    return Adapter(folder.name, str(folder))


def test_an_adapter_of_another_model_changes_nothing(tmp_path: Path) -> None:
    """Layers that are missing or of another size are refused before any layer is adapted."""
    model = tiny_models.build("llama")
    before = weights_digest(model)
    wide = tiny_models.build("llama", intermediate_size=192)
    deep = tiny_models.build("llama", num_hidden_layers=3)
    good = write_adapter(tmp_path / "good", model)
    for other, words in ((wide, "has the shape .* another model"), (deep, "has no layer")):
        bad = write_adapter(tmp_path / "bad", other)
        with pytest.raises(SettingsError, match=words) as refused:
            load_all([read(adapter_in(good)), read(adapter_in(bad))], tiny_models.loaded(model))
        assert str(refused.value).startswith("--adapter bad=")
    assert weights_digest(model) == before


def test_arrays_that_cannot_be_loaded_are_a_fault_of_the_settings(tmp_path: Path) -> None:
    """A header that promises more numbers than its place in the file holds ends no worker."""
    model = tiny_models.build("llama")
    folder = write_adapter(tmp_path / "a", model, keys=["layers.0.self_attn.o_proj"])
    raw = (folder / "adapters.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for entry in header.values():
        if isinstance(entry, dict) and "data_offsets" in entry:
            entry["data_offsets"][0] = entry["data_offsets"][1]
    text = json.dumps(header).encode()
    new = len(text).to_bytes(8, "little") + text + raw[8 + size :]
    (folder / "adapters.safetensors").write_bytes(new)
    with pytest.raises(SettingsError, match=r"--adapter a=.*adapters.safetensors"):
        load_all([read(adapter_in(folder))], tiny_models.loaded(model))


def test_an_adapter_that_is_taken_off_leaves_the_same_layers(tmp_path: Path) -> None:
    """Afterwards the layers are the same objects with the same arrays, also those of experts."""
    for family in ("qwen3_next", "deepseek_v3"):
        model = tiny_models.build(family)
        layers, arrays = dict(model.named_modules()), dict(tree_flatten(model.parameters()))
        (adapter,) = load_all(
            [read(adapter_in(write_adapter(tmp_path / family, model)))], tiny_models.loaded(model)
        )
        take_off = put_on(model, adapter)
        adapted = dict(model.named_modules())
        assert any(adapted[name] is not layer for name, layer in layers.items())
        take_off()
        after = dict(model.named_modules())
        assert after.keys() == layers.keys()
        assert all(after[name] is layer for name, layer in layers.items())
        held = dict(tree_flatten(model.parameters()))
        assert all(held[name] is array for name, array in arrays.items())


def test_files_not_names_make_an_adapted_model(tmp_path: Path) -> None:
    """The fingerprint depends on the model and on both files; the name is of no importance."""
    model = tiny_models.build("llama")
    loaded = tiny_models.loaded(model, fingerprint=WEIGHTS, weight_files="w")
    first = write_adapter(tmp_path / "1" / "same", model, seed=1)
    other = write_adapter(tmp_path / "2" / "same", model, seed=2)
    copied = write_adapter(tmp_path / "copied", model, seed=1)
    a, b, c = load_all([read(adapter_in(each)) for each in (first, other, copied)], loaded)
    assert a.fingerprint == c.fingerprint != b.fingerprint
    assert WEIGHTS not in (a.fingerprint, b.fingerprint)
    config = json.loads((copied / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 3.0
    (copied / "adapter_config.json").write_text(json.dumps(config))
    (again,) = load_all([read(adapter_in(copied))], loaded)
    assert again.fingerprint not in (a.fingerprint, b.fingerprint)
    assert c.has_changed() and not a.has_changed()
    adapted = a.on(loaded, "tiny@same")
    assert adapted.maker("float").values() == (a.fingerprint, "float", "float32")
    assert adapted.weight_files not in ("", "w", b.on(loaded, "tiny@same").weight_files)
    unknown = load_all([read(adapter_in(first))], tiny_models.loaded(model))
    assert unknown[0].fingerprint == ""  # as the model's own


def test_files_that_change_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker never serves arrays of which it does not know the files."""
    model = tiny_models.build("llama")
    folder = write_adapter(tmp_path / "a", model)
    files = read(adapter_in(folder))
    digest = adapters._digest

    def changed(found: adapters.AdapterFiles) -> str:
        before = digest(found)
        write_adapter(folder, model, seed=7)
        return before

    monkeypatch.setattr(adapters, "_digest", changed)
    with pytest.raises(ModelChangedError, match=r"adapter a=.*changed"):
        load_all([files], tiny_models.loaded(model))

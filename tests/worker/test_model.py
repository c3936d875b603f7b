"""Loading models: what is served, and the one sentence for what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, mamba2

from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.schemes import LayerShape
from batchkv_worker.model import load
from support import tiny_models  # first: it loads the BLAS


def save(folder: Path, model: Any, config: dict[str, Any]) -> Path:
    """A model folder with the demo's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def test_demo_model_loads_as_any_folder_does() -> None:
    """``demo`` and its folder's path give the same model; on a CPU it is float32."""
    by_name, by_path = load("demo"), load(str(MODEL_PATH))
    assert by_name.layers == by_path.layers == (LayerShape(2, 64, 64),) * 4
    assert by_name.context == 8192 and by_name.defaults["temperature"] == 0.0
    if mx.default_device() == mx.Device(mx.cpu):
        assert by_name.dtype == mx.float32


def test_dtype_can_be_chosen() -> None:
    """A named dtype is what the weights are cast to; an unknown one is refused."""
    assert load("demo", "bfloat16").dtype == mx.bfloat16
    with pytest.raises(ModelError, match="unknown dtype"):
        load("demo", "int3")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nothing", "not a folder"),
        (lambda path: path, "no config.json"),
        (lambda path: _only_config(path), "no weights"),
        (lambda path: _file(path), "not a folder"),
    ],
)
def test_incomplete_folders_are_named(tmp_path: Path, make: Any, words: str) -> None:
    """A folder that is missing, empty or without weights is refused with what it lacks."""
    with pytest.raises(ModelError, match=words):
        load(str(make(tmp_path)))


def _only_config(path: Path) -> Path:
    (path / "config.json").write_text("{}")
    return path


def _file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def test_broken_weights_are_named(tmp_path: Path) -> None:
    """Weights that cannot be read, or a config of no known model, are one clear error."""
    folder = tmp_path / "m"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    """A config that asks for a Python file of its own is refused, and the file is not executed."""
    folder = tmp_path / "m"
    shutil.copytree(MODEL_PATH, folder)
    mark = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))
    assert not mark.exists()


def test_other_layer_kinds_are_refused_by_name(tmp_path: Path) -> None:
    """Sliding-window and recurrent models are refused with the layer type, before any job."""
    assert tiny_models.VOCABULARY
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 4096}
    gemma = {
        **{**small, "model_type": "gemma3_text", "intermediate_size": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"sliding_window": 16, "sliding_window_pattern": 2},
    }
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(gemma))
    with pytest.raises(ModelError, match="RotatingKVCache"):
        load(str(save(tmp_path / "gemma", model, gemma)))
    mamba = {
        **{**small, "model_type": "mamba2", "num_heads": 4, "head_dim": 32, "state_size": 16},
        **{"conv_kernel": 4, "n_groups": 1, "time_step_limit": [0.0, 10.0], "use_bias": False},
        **{"use_conv_bias": True, "tie_word_embeddings": True, "time_step_rank": "auto"},
        **{"intermediate_size": 128, "layer_norm_epsilon": 1e-5, "ssm_state_size": 16},
        **{"max_position_embeddings": 512},
    }
    recurrent = mamba2.Model(mamba2.ModelArgs.from_dict(mamba))
    with pytest.raises(ModelError, match="ArraysCache"):
        load(str(save(tmp_path / "mamba", recurrent, mamba)))

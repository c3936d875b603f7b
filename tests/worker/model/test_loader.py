"""Loading models: those that are served, and the sentence that refuses others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache

from batchkv_producer.submit.fingerprint import of_model
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.errors import EXIT_MODEL_CHANGED, ModelChangedError, ModelError
from batchkv_worker.kv.layers.discover import AttentionShape, discover
from batchkv_worker.kv.layers.state import StateShape
from batchkv_worker.kv.schemes.packing import LayerShape
from batchkv_worker.model import loader as model
from batchkv_worker.model.added_tokens import added_tokens
from batchkv_worker.model.loader import _special_tokens, load
from support import tiny_models  # first: it loads the BLAS


def test_demo_model_loads_as_any_folder_does() -> None:
    """``demo`` and its folder's path give the same model; on a CPU it is float32."""
    by_name, by_path = load("demo"), load(str(MODEL_PATH))
    assert by_name.caches == by_path.caches
    assert by_name.caches.leaves == (AttentionShape(LayerShape(2, 64, 64)),) * 4
    assert by_name.context == 8192 and by_name.defaults["temperature"] == 0.0
    if mx.default_device() == mx.Device(mx.cpu):
        assert by_name.dtype == mx.float32


def test_dtype_can_be_chosen() -> None:
    """The weights are cast to a named dtype; an unknown one is refused."""
    assert load("demo", "bfloat16").dtype == mx.bfloat16
    with pytest.raises(ModelError, match="unknown dtype"):
        load("demo", "int3")


def test_somebody_gets_the_model_before_its_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its arguments and its dtype, which a cast has changed already."""
    seen: list[Any] = []
    real = model._read
    monkeypatch.setattr(model, "_read", lambda weights: (seen.append("read"), real(weights)))
    loaded = load("demo", "float16", before_reading=lambda *given: seen.append(given))
    assert seen == [(loaded.model, mx.float16), "read"] and loaded.dtype == mx.float16
    assert seen[0][0].args.num_attention_heads == 4


def test_defaults_and_sizes_that_make_no_sense_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default of 400 digits, infinity, or a text in place of a table ends no worker."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    wrong = f'{{"top_k": 1{"0" * 400}, "min_p": Infinity, "top_p": NaN, "temperature": 0.5}}'
    (folder / "generation_config.json").write_text(wrong)
    assert load(str(folder)).defaults == {"temperature": 0.5}
    assert model._context({"max_position_embeddings": "8k", "text_config": ["no table"]}) == 8192
    assert model._context({"text_config": {"max_position_embeddings": 77}}) == 77


def test_a_model_knows_what_its_answers_are_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is a producer's; both 16-bit dtypes are one class; later changes show."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    loaded = load(str(folder), "bfloat16")
    assert loaded.maker("affine4").values() == (of_model("demo"), "affine4", "half")
    assert load("demo", "float32").maker("float").dtype == "float32"
    assert not loaded.has_changed()
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert loaded.has_changed()
    shutil.rmtree(folder)
    assert not loaded.has_changed()  # a worker started again would find nothing


def test_files_that_change_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If files change while they are loaded, the worker ends, to be started again."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    read = model._read

    def meddled(weights: list[mx.array]) -> None:
        read(weights)
        (folder / "generation_config.json").write_text("{}")

    monkeypatch.setattr(model, "_read", meddled)
    with pytest.raises(ModelChangedError, match="changed while they were loaded") as fault:
        load(str(folder))
    assert fault.value.exit_code == EXIT_MODEL_CHANGED


def test_a_model_that_cannot_be_downloaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence has the reason, without the client's "Got:", and what helps."""

    def offline(name: str) -> Path:
        raise OSError("Got: ConnectError: no name service")

    monkeypatch.setattr(model, "_downloaded", offline)
    words = r"downloaded \(ConnectError: no name service\)\. Correct the name, name a folder, or"
    with pytest.raises(ModelError, match=words):
        load("nobody/nothing")


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
    """A missing folder, or one without config or weights, is refused with the reason."""
    with pytest.raises(ModelError, match=words):
        load(str(make(tmp_path)))


def _only_config(path: Path) -> Path:
    (path / "config.json").write_text("{}")
    return path


def _file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def test_broken_weights_are_named(tmp_path: Path) -> None:
    """Unreadable weights, or a config of an unknown model, give one clear error."""
    folder = tmp_path / "m"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    """A config with a Python file of its own is refused, and the file is not executed."""
    folder = tmp_path / "m"
    shutil.copytree(MODEL_PATH, folder)
    mark = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(folder))
    assert not mark.exists()


def test_every_kind_of_layer_is_learned_from_the_model() -> None:
    """Windows, states and lists of caches are found with their shapes, and counted for the log."""
    tree = discover("tiny", tiny_models.build("gemma3_text"))
    assert {leaf.window for leaf in tree.leaves if isinstance(leaf, AttentionShape)} == {None, 24}
    tree = discover("tiny", tiny_models.build("falcon_h1"))
    assert tree.nesting[0] == (0, 1) and isinstance(tree.leaves[0], StateShape)
    assert str(tree) == "2 state, 2 full attention"
    assert tree.nested("abcd") == [("a", "b"), ("c", "d")]
    latent = discover("tiny", tiny_models.build("deepseek_v3")).shapes[0]
    assert latent.num_heads == 1 and latent.key_size != latent.value_size


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ([KVCache(), ConcatenateKVCache()], "keep ConcatenateKVCache"),
        ([KVCache(), RotatingKVCache(max_size=8, keep=2)], "first tokens beside a sliding window"),
    ],
)
def test_caches_that_nobody_knows_are_refused_by_name(caches: list[Any], words: str) -> None:
    """A cache class that batchkv does not know, or a window that keeps its head, is refused."""
    model = tiny_models.build("llama")
    model.make_cache = lambda: caches
    with pytest.raises(ModelError, match=words):
        discover("tiny", model)


def test_chunked_attention_is_refused_with_its_reason() -> None:
    """llama4 is refused, because its model code needs one position for all rows."""
    with pytest.raises(ModelError, match="one position for all rows"):
        discover("tiny", tiny_models.build("llama4"))


def test_a_tokenizer_may_not_list_its_added_tokens() -> None:
    """Some kinds raise where others have a list: no token is known to be special then."""

    class Tokenizer:
        all_special_ids = (1, 2)

        @property
        def added_tokens_decoder(self) -> dict[int, Any]:
            raise NotImplementedError

    assert _special_tokens(Tokenizer()) == {1, 2}
    assert added_tokens(Tokenizer()) == {} == added_tokens(object())

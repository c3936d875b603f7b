"""Whose blocks these are: whatever changes a number is in the manifest, and changes every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_cache_store.keys import namespace
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import make_plan
from batchkv_worker.prefix.shared import identity
from batchkv_worker.prefix.shared.identity import config_digest, manifest, weights_digest
from support import tiny_models
from worker.prefix.engines_on_store import access, cached, on_disk, random_prompt, run, running

PROMPT = random_prompt(1, 600)


def manifest_of(model: Any, scheme: str = "affine8", **changes: Any) -> dict[str, Any]:
    loaded = tiny_models.loaded(model, **changes)
    plan = make_plan(
        *("tiny", model, loaded.caches, scheme, loaded.dtype, choose_backend()),
        slots=2,
        fixed=Fixed("fused", 1),
    )
    return manifest(loaded, plan)


def differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    assert first.keys() == second.keys()
    return {field for field in first if first[field] != second[field]}


def test_the_same_model_has_the_same_manifest_in_any_worker() -> None:
    """Two loads of one model have the same fields with the same values, and all of them."""
    first, second = (manifest_of(tiny_models.build("qwen3_next")) for _ in "ab")
    assert first == second and len(namespace(first)) == 32
    assert set(first) == {
        *("format", "contract", "model", "weights", "config"),
        *("adapter", "layers", "dtype", "block_tokens"),
    }


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("config", {"config": {"rope_theta": 5e5}}),
        ("adapter", {"adapter": "lora:12ab"}),
        ("dtype", {"dtype": mx.float16}),
    ],
)
def test_a_loaded_model_tells_what_it_is(field: str, changes: dict[str, Any]) -> None:
    """Configuration, adapter and dtype are each a field; the dtype is also every layer's."""
    model = tiny_models.build("llama")
    found = differing(manifest_of(model), manifest_of(model, **changes))
    assert found - {"layers"} == {field}


def test_weights_and_layers_tell() -> None:
    """Another weight, another class, another scheme, another window: another field each."""
    plain = manifest_of(tiny_models.build("gemma3_text"))
    other = tiny_models.build("gemma3_text")
    other.model.norm.weight = other.model.norm.weight + 1e-3
    assert differing(plain, manifest_of(other)) == {"weights"}
    scheme = manifest_of(tiny_models.build("gemma3_text"), "affine4,last=float")
    assert differing(plain, scheme) == {"layers"}
    window = manifest_of(tiny_models.build("gemma3_text", sliding_window=100))
    assert differing(plain, window) == {"config", "layers"}
    assert "model" in differing(plain, manifest_of(tiny_models.build("llama")))


def test_digests_see_every_byte_and_no_order() -> None:
    """A name, a shape, a dtype and a number of the weights; the fields of a config in any order."""

    class Weights:
        def __init__(self, **arrays: mx.array) -> None:
            self.arrays = arrays

        def parameters(self) -> dict[str, mx.array]:
            return self.arrays

    plain = mx.arange(6, dtype=mx.float32)
    models = [
        Weights(a=plain),
        Weights(b=plain),
        Weights(a=plain.reshape(2, 3)),
        Weights(a=plain.view(mx.int32)),
        Weights(a=plain.at[5].add(1e-6)),
        Weights(a=plain, b=mx.zeros((0, 3))),
        Weights(a=mx.arange(6, dtype=mx.bfloat16)),
    ]
    assert len({weights_digest(model) for model in models}) == len(models)
    turned = mx.arange(6, dtype=mx.float32).reshape(3, 2).T
    straight = mx.contiguous(turned)
    assert weights_digest(Weights(a=turned)) == weights_digest(Weights(a=straight))
    assert config_digest({"a": 1, "b": [2]}) == config_digest({"b": [2], "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})


@pytest.mark.parametrize(
    "field",
    ["format", "contract", "model", "weights", "config", "adapter", "layers", "dtype",
     "block_tokens"],
)  # fmt: skip
def test_changing_any_field_gives_no_hit(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any one field of the manifest changed, nothing that was stored is found."""
    model = tiny_models.build("llama")
    with running(model, access(on_disk(tmp_path))) as engine:
        run(engine, [PROMPT], 1)
    with running(model, access(on_disk(tmp_path))) as engine:
        assert cached(run(engine, [PROMPT], 1)) == [512]

    def other(*args: Any) -> dict[str, Any]:
        plain = identity.manifest(*args)
        value = plain[field]
        changed = value + 1 if isinstance(value, int) else [*value, "x"]
        return {**plain, field: value + "x" if isinstance(value, str) else changed}

    monkeypatch.setattr("batchkv_worker.prefix.shared.client.manifest", other)
    with running(model, access(on_disk(tmp_path))) as engine:
        assert cached(run(engine, [PROMPT], 1)) == [0]
        assert engine.client.counters["found_blocks"] == 0


def test_another_salt_or_token_gives_no_hit(tmp_path: Path) -> None:
    """Tenants with other salts never meet; a changed token ends the chain at its block."""
    model = tiny_models.build("llama")
    with running(model, access(on_disk(tmp_path), salt=b"one")) as engine:
        run(engine, [PROMPT], 1)
    for salt, expected in ((b"one", 512), (b"two", 0), (b"", 0)):
        with running(model, access(on_disk(tmp_path), salt=salt)) as engine:
            assert cached(run(engine, [PROMPT], 1)) == [expected]
    for place, expected in ((0, 0), (255, 0), (256, 256), (511, 256), (512, 512)):
        changed = [*PROMPT]
        changed[place] = (changed[place] + 1) % tiny_models.VOCABULARY
        with running(model, access(on_disk(tmp_path), salt=b"one")) as engine:
            assert cached(run(engine, [changed], 1)) == [expected], place

"""The host waits for the device while a prompt is computed, where it is told to."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv import pace, triangles
from batchkv_worker.kv.attention_prefill import AttentionPrefill
from batchkv_worker.kv.rows import PrefillRows
from kv.crowd import Crowd, random_prompt
from kv.reference import attention_kind, state_kind


def is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA."""
    init = pace.Pace.__init__

    def kept(self: Any) -> None:
        init(self)
        self._is_kept = True

    monkeypatch.setattr(pace.Pace, "__init__", kept)


def test_all_layers_of_a_group_go_at_one_pace() -> None:
    """Layers that keep keys and values share it; another group has its own."""
    kinds = [attention_kind("affine8"), state_kind(), attention_kind("float")]
    first, second = (
        {id(layer.pace) for layer in rows.layers if isinstance(layer, AttentionPrefill)}
        for rows in (PrefillRows(kinds, 10, 10), PrefillRows(kinds, 10, 10))
    )
    assert len(first) == len(second) == 1


def test_so_many_layers_are_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is started, and the host waits for the one ``LAYERS_AHEAD`` before."""
    is_kept(monkeypatch)
    own = pace.Pace()
    for index in range(3 * pace.LAYERS_AHEAD):
        own.follow(mx.array([index]) + 1)
        assert len(own._started) == min(index + 1, pace.LAYERS_AHEAD)
    assert own._started[0].item() == 2 * pace.LAYERS_AHEAD + 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gear", "deepseek_v3"])
def test_pace_changes_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows give the same with and without waiting, in ragged groups and behind prefixes."""

    def tokens() -> list[list[int]]:
        crowd = Crowd(family, scheme="affine8", chunk_tokens=128, prefix_bytes=2**25)
        for index, length in enumerate((300, 40, 301, 7)):
            crowd.add(str(index), random_prompt(index, length))
        crowd.drain().run("warm", random_prompt(0, 300))
        return [crowd.tokens(job) for job in crowd.prompts]

    free = tokens()
    is_kept(monkeypatch)
    assert tokens() == free


def test_attention_of_prompts_reads_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing dense outlives its layer: what update_and_fetch hands out is never used."""
    asked: list[bool] = []
    answer = AttentionPrefill._attend

    def noting(self: AttentionPrefill, *question: Any) -> mx.array:
        if not self._shared:  # behind a stem, floats too are answered for
            asked.append(self._scheme.is_packed)
        return answer(self, *question)

    monkeypatch.setattr(AttentionPrefill, "_attend", noting)
    monkeypatch.setattr(triangles, "are_cut", lambda: False)  # a CPU's reason to answer
    for scheme in ("affine8", "nvfp4", "float"):
        asked.clear()
        Crowd("llama", scheme=scheme).run("a", random_prompt(1, 40))
        assert all(asked) and bool(asked) is (scheme != "float")

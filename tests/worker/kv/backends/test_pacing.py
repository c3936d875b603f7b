"""The host waits for the device while a prompt is computed, and starts each layer of a step."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend, Pacing
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.launching import AT_ONCE, Launches
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.backends.pacing import (
    BYTES_AHEAD,
    BYTES_AT_ONCE,
    STARTS_AHEAD,
    UNPACED,
    LayersAhead,
)
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start.backend import choose_backend
from parity.few import few
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import (
    HEADS,
    SIZE,
    attention_kind,
    keys_of,
    prefilled,
    state_kind,
    values_of,
    x86,
)


class Paced(GenericBackend):
    """A GPU's backend that holds the host back, as CUDA's does."""

    def pacing(self, launches: Launches) -> Pacing:
        return LayersAhead(launches)


class Noting(LayersAhead):
    """Counts chunks."""

    num_chunks = 0

    def begin(self) -> None:
        self.num_chunks += 1


def test_all_layers_of_a_group_go_at_one_pace() -> None:
    """Layers that keep keys and values share it; another group has its own."""
    kinds = [attention_kind("affine8"), state_kind(), attention_kind("float")]
    first, second = (
        {id(layer.pacing) for layer in rows.layers if isinstance(layer, AttentionPrefill)}
        for rows in [PrefillRows(Paced(), kinds, 10, 10) for _ in range(2)]
    )
    assert len(first) == len(second) == 1 and first != second
    begun = PrefillRows(Paced(), kinds, 10, 10)
    begun._pacing = Noting(AT_ONCE)
    begun.begin(Chunk(0, 10))
    assert begun._pacing.num_chunks == 1
    assert isinstance(CudaBackend().pacing(AT_ONCE), LayersAhead)
    assert GenericBackend().pacing(AT_ONCE) is UNPACED


def test_so_many_layers_are_under_way_and_no_more() -> None:
    """Every large layer is started, and the host waits for the one ``STARTS_AHEAD`` before."""
    own = LayersAhead(AT_ONCE)
    for index in range(3 * STARTS_AHEAD):
        own.follow(mx.array([index]) + 1, BYTES_AHEAD)
        assert len(own._started) == min(index + 1, STARTS_AHEAD)
    assert own._started[0][0].item() == 2 * STARTS_AHEAD + 1


def test_small_layers_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first starts at once. Those that are held count when they start."""
    real, started = mx.async_eval, []

    def noting(array: mx.array) -> None:
        started.append(array)
        real(array)

    monkeypatch.setattr(mx, "async_eval", noting)
    own, part = LayersAhead(AT_ONCE), BYTES_AT_ONCE // 4
    outputs = [mx.zeros((part // 8,), mx.float32) for _ in range(10)]
    for output in outputs:
        own.follow(output, part // 8)
    assert [id(one) for one in started] == [id(outputs[place]) for place in (0, 4, 8)]
    assert [num_bytes for _, num_bytes in own._started] == [part, 4 * part, 4 * part]
    own.begin()  # a chunk, whose first layer must not wait for others
    for output in outputs[:4]:
        own.follow(output, part // 8)
    assert [id(one) for one in started[3:]] == [id(outputs[0])]


def test_the_host_runs_on_while_little_is_under_way() -> None:
    """Layers of small chunks are waited for only when all together are large."""
    own = LayersAhead(AT_ONCE)
    for _ in range(400):
        own.follow(mx.zeros((BYTES_AT_ONCE // 80,), mx.float32), BYTES_AT_ONCE // 80)
        assert sum(num_bytes for _, num_bytes in own._started) <= BYTES_AHEAD
    assert len(own._started) == 3 > STARTS_AHEAD


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gear", "deepseek_v3"])
def test_pace_changes_no_token(family: str) -> None:
    """Rows give the same with and without waiting, in ragged groups and behind prefixes."""

    def tokens(backend: Backend) -> list[list[int]]:
        changes: dict[str, Any] = {"chunk_tokens": 128, "prefix_bytes": 2**25}
        crowd = Crowd(family, scheme="affine8", backend=backend, **changes)
        for index, length in enumerate((300, 40, 301, 7)):
            crowd.add(str(index), random_prompt(index, length))
        crowd.drain().run("warm", random_prompt(0, 300))
        return [crowd.tokens(job) for job in crowd.prompts]

    assert tokens(Paced()) == tokens(GenericBackend())


@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_all_dense_copies_are_waited_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prefixes, too, of which each row gets a copy: a long one took most of a GPU's memory."""
    read: list[int] = []
    told: list[int] = []
    attention, follow = GenericBackend.attention, LayersAhead.follow

    def noted(
        self: GenericBackend, queries: mx.array, keys: mx.array, values: mx.array, *rest: Any
    ) -> mx.array:
        read.append(keys.size + values.size)
        return attention(self, queries, keys, values, *rest)

    def followed(self: LayersAhead, output: mx.array, num_dense: int) -> None:
        told.append(num_dense)
        assert num_dense >= sum(read)
        read.clear()
        follow(self, output, num_dense)

    crowd = Crowd("llama", scheme=scheme, backend=Paced(), prefix_bytes=2**25, group_cost=0)
    common = random_prompt(9, 600)
    crowd.run("first", common + random_prompt(1, 20))
    monkeypatch.setattr(GenericBackend, "attention", noted)
    monkeypatch.setattr(LayersAhead, "follow", followed)
    for row in range(3):
        crowd.add(str(row), common + random_prompt(10 + row, 30))
    crowd.drain()
    assert max(told) > 10 * 3 * 600  # rows and columns


def test_attention_of_prompts_reads_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing dense outlives its layer: what update_and_fetch hands out is never used."""
    asked: list[bool] = []
    answer = AttentionPrefill._attend

    def noting(self: AttentionPrefill, *question: Any) -> mx.array:
        if not self._shared:  # behind a shared prefix, floats too are answered for
            asked.append(self._scheme.is_packed)
        return answer(self, *question)

    monkeypatch.setattr(AttentionPrefill, "_attend", noting)
    for scheme in ("affine8", "nvfp4", "float"):
        asked.clear()
        # A CPU's would answer for floats too, and cut their triangle into tiles.
        Crowd("llama", scheme=scheme, backend=GenericBackend()).run("a", random_prompt(1, 40))
        assert all(asked) and bool(asked) is (scheme != "float")


# -- decode


def test_the_backend_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each device that MLX may compute on; only a CPU is given layer after layer."""
    names = {"cpu": CpuBackend, "cuda": CudaBackend, "metal": MetalBackend}
    for name, kind in names.items():
        monkeypatch.setattr(device, "kind", lambda name=name: name)
        chosen = choose_backend()
        assert type(chosen) is kind and chosen.name == name
        assert chosen.starts_each_layer is (name == "cpu")


@pytest.mark.parametrize(
    ("family", "scheme"),
    few(
        [
            ("llama", "turbo3.5"),
            ("gemma3_text", "affine8"),
            ("gemma3n", "float"),  # layers that attend over another's keys
            ("gpt_oss", "float"),
            ("qwen3_next", "affine8"),  # states
            ("deepseek_v3", "float"),  # answers for itself: started as a whole
        ],
        3,
    ),
)
def test_starting_layers_changes_no_token(family: str, scheme: str) -> None:
    """Rows that come, go, grow and share, the same either way."""
    found = []
    for starts in (True, False):
        changes: dict[str, Any] = {"slots": 5, "chunk_tokens": 256, "prefix_bytes": 2**25}
        crowd = Crowd(family, scheme=scheme, backend=x86(starts_each_layer=starts), **changes)
        prefix = random_prompt(1, 300)
        for index in range(14):
            prompt = prefix[: 300 * (index % 2)] + random_prompt(2 + index, 3 + 40 * (index % 5))
            crowd.add(str(index), prompt, count=3 + 7 * (index % 4), logprobs=1)
        while not crowd.engine.is_idle:
            crowd.step()
            crowd.engine.check_integrity()
        found.append({job: crowd.tokens(job) for job in crowd.prompts})
    assert found[0] == found[1]


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("starts", [True, False])
def test_buffers_are_written_in_place(starts: bool, joins: bool) -> None:
    """However far the device is behind: who does not wait for it has the buffers copied.

    One layer of few operations, for MLX's CPU backend makes the host wait by itself for many.
    """
    backend = x86(starts_each_layer=starts)
    kind = attention_kind("float", path="fused", backend=backend)
    slots = DecodeSlots(backend, [kind], CacheTree((), (0,)), 4, Shapes())
    rows = [tuple(range(1 + row, 601 + row)) for row in range(4)]
    for row in rows:
        slots.admit(Demand(600, 200), prefilled([kind], [row], ()).row(0, 600))
    (layer,) = slots.layers
    assert isinstance(layer, AttentionSlots) and layer.attend is not None
    large = mx.random.normal((900, 900))
    pieces = prefilled([kind], [rows[3]], ()).row(0, 600)
    fed = [[row] for row in range(1, 5)]
    asked, keys, values = mx.ones((4, 3 * HEADS, 1, SIZE)), keys_of(fed), values_of(fed)
    mx.eval(large, pieces, asked, keys, values, slots.arrays)
    for step in range(4):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        busy = (large @ large)[0, 0] * 1e-30  # what stands before all else in the device's queue
        mx.async_eval(busy)
        for joining in (step, (step + 1) % 4) if joins else ():  # one after the other
            slots.release(joining)
            slots.place(Demand(600, 200))
            slots.fill(joining, [tuple(part + busy for part in pieces[0])])
            slots.settle()
        for _ in range(2):
            slots.begin_step()
            layer.update_and_fetch(keys + busy, values + busy)
            out = layer.attend(asked, 0.1, None, None)
            slots.end_step()
            if not starts:
                mx.eval(out, slots.arrays)
        mx.eval(slots.arrays)
        taken = mx.get_peak_memory() - before - large.nbytes
        assert taken < min(array.nbytes for array in slots.arrays), (step, taken)

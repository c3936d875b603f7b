"""The memory for keys and values on machines of all sizes, and the facts that it comes from.

What Macs recommend is as llama.cpp prints it there (``recommendedMaxWorkingSetSize``): two thirds
of the memory up to 32 GB, three quarters above.
"""

from __future__ import annotations

import logging
import plistlib
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_producer.server.memory_limit import limit_in
from batchkv_producer.service.spec import SERVER_LABELS
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends import device, host_memory, packed_products, sysctl
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.memory_budget import (
    GIB,
    LEAST_BYTES,
    USEFUL_BYTES,
    MemoryFacts,
    MemoryPlan,
    ModelFacts,
    cuda_pool_limit,
    plan_memory,
    pool_limit,
)
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.layers.discover import AttentionShape, CacheTree
from batchkv_worker.kv.schemes.packing import LayerShape
from batchkv_worker.kv.start.kv_memory import choose_memory, dense_share
from support import tiny_models  # noqa: F401 - first: it loads the BLAS

RECOMMENDED_MIB = {8: 5461, 16: 10922, 24: 16384, 32: 21845, 64: 49152, 128: 98304, 512: 393216}
QWEN_4B = ModelFacts(int(2.26e9), 0.0523)  # 4 bits, affine8: one of 36 layers, at twice the bytes
QWEN_8B = ModelFacts(int(4.6e9), 0.0523)
ROOT = Path(__file__).parents[4]
HUB = 12 * GIB  # the queue's 4 GB and the cache's 8, as deploy/hub has them

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               24113.
Pages active:                            356208.
Pages inactive:                          350183.
Pages speculative:                         5060.
Pages throttled:                              0.
Pages wired down:                        152013.
Pages purgeable:                           3219.
"Translation faults":                 987654321.
Pages occupied by compressor:             98765.
"""


def mac(gib: int, **changes: int) -> MemoryFacts:
    """A Mac with so much memory."""
    return replace(MemoryFacts("metal", gib * GIB, RECOMMENDED_MIB[gib] * 2**20), **changes)


def taken(plan: MemoryPlan, model: ModelFacts) -> int:
    return plan.kv_bytes + plan.copies + plan.pool + model.weights


@pytest.mark.parametrize("gib", RECOMMENDED_MIB)
def test_a_mac_keeps_its_share(gib: int) -> None:
    """What a worker takes is what macOS recommends at most, and leaves a fifth or 3 GB."""
    plan = plan_memory(mac(gib), QWEN_4B)
    assert not plan.problem and plan.kv_bytes > USEFUL_BYTES
    assert taken(plan, QWEN_4B) <= 0.9 * RECOMMENDED_MIB[gib] * 2**20 + 1
    assert taken(plan, QWEN_4B) + max(3 * GIB, gib * GIB // 5) <= gib * GIB
    assert taken(plan, QWEN_4B) >= 0.97 * plan.total  # and what is there is used


def test_the_page_has_the_numbers_of_the_code() -> None:
    """Each row of the table in docs/internals/memory.md, to a tenth of a GB."""
    page = (ROOT / "docs/internals/memory.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) GB " + 4 * r"\| ([\d.]+) GB " + r"\|$", page, re.MULTILINE)
    assert len(rows) == 6
    for gib, *numbers in rows:
        facts = mac(int(gib))
        plan = plan_memory(facts, QWEN_4B)
        found = (facts.recommended, plan.pool, plan.copies, plan.kv_bytes)
        assert [f"{size / GIB:.1f}" for size in found] == numbers


def test_what_others_hold_is_left_to_them() -> None:
    """Servers of a hub, a cache in memory, and what another program has wired."""
    alone = plan_memory(mac(32), QWEN_4B)
    beside_hub = plan_memory(mac(32, hub=HUB), QWEN_4B)
    assert beside_hub.total == 32 * GIB - 32 * GIB // 5 - HUB
    assert beside_hub.kv_bytes < alone.kv_bytes
    beside_cache = plan_memory(mac(32, hub=HUB, tier=2 * GIB), QWEN_4B)
    assert beside_hub.total - beside_cache.total == 2 * GIB
    usual = plan_memory(mac(32, wired=3 * GIB), QWEN_4B)
    assert usual == alone  # what macOS wires for itself is in its share
    beside_other = plan_memory(mac(32, wired=15 * GIB), QWEN_4B)
    assert beside_other.kv_bytes < alone.kv_bytes - 3 * GIB


def test_little_memory_is_explained() -> None:
    """A small Mac that is also the hub: rows still fit, and a sentence has the numbers."""
    plan = plan_memory(mac(16, hub=HUB, swap=3 * GIB), QWEN_4B)
    assert plan.kv_bytes == USEFUL_BYTES and not plan.is_hopeless
    for words in ("16.0 GB", "10.7 GB", "2.1 GB", "12.0 GB (maxmemory)", "--memory", "swapped out"):
        assert words in plan.problem
    small = plan_memory(mac(8), QWEN_8B)
    assert 0.3 * GIB < small.kv_bytes < 0.6 * GIB and small.problem and not small.is_hopeless


def test_a_model_that_is_too_large_is_hopeless() -> None:
    """Its weights take what macOS recommends: each step would swap."""
    plan = plan_memory(mac(16), ModelFacts(16 * 10**9))
    assert plan.is_hopeless and plan.kv_bytes == LEAST_BYTES and "14.9 GB" in plan.problem


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_other_devices_have_what_they_had(kind: Any) -> None:
    """Nine tenths of what is recommended, less the weights: their memory is no Mac's."""
    facts = MemoryFacts(kind, 256 * GIB, 140 * GIB, wired=50 * GIB, hub=HUB, tier=GIB)
    plan = plan_memory(facts, QWEN_4B)
    assert plan.kv_bytes == int(140 * GIB * 0.9) - QWEN_4B.weights
    assert plan.pool == plan.copies == 0 and not plan.problem
    assert plan_memory(facts, ModelFacts(200 * GIB)).kv_bytes == LEAST_BYTES


def test_the_pool_has_a_limit() -> None:
    """A sixteenth of the memory, between 0.5 and 4 GB."""
    assert [pool_limit(gib * GIB) / GIB for gib in (4, 8, 16, 24, 64, 512)] == [
        *(0.5, 0.5, 1.0, 1.5, 4.0, 4.0)
    ]


# -- the facts


def test_wired_memory_is_read_from_vm_stat() -> None:
    """As macOS 15 prints it on Apple silicon; anything else counts as nothing."""
    assert host_memory.wired_in(VM_STAT) == 152013 * 16384
    assert host_memory.wired_in("vm_stat: no such thing") == 0


def test_a_command_that_is_missing_or_hangs_counts_as_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start never fails or waits because of it."""
    asked = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(options["timeout"])
        raise faults[len(asked) - 1]

    faults = [FileNotFoundError("vm_stat"), subprocess.TimeoutExpired("vm_stat", 5)]
    monkeypatch.setattr(host_memory.subprocess, "run", run)
    assert [host_memory.wired_bytes("darwin") for _ in faults] == [0, 0]
    assert len(asked) == 2 and host_memory.wired_bytes("linux") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("maxmemory 4gb", 4 * GIB),
        ("# maxmemory 9gb\nmaxmemory 8GB\nmaxmemory-policy allkeys-lru", 8 * GIB),
        ("maxmemory 500mb\n maxmemory 100m", 100 * 10**6),
        ("maxmemory 1048576", 2**20),
        ('maxmemory "2gb"', 2 * GIB),
        ("maxmemory '500mb'\r\n", 500 * 2**20),
        ("maxmemory \"2gb'", 0),
        ("maxmemory-policy noeviction", 0),
    ],
)
def test_a_servers_limit_is_read_from_its_configuration(text: str, expected: int) -> None:
    """The last line counts, in the server's own units."""
    assert limit_in(text) == expected


def test_the_hubs_own_configurations_have_limits() -> None:
    """What deploy/hub installs is 4 GB for the queue and 8 GB for the cache."""
    hub = ROOT / "deploy/hub"
    limits = [limit_in((hub / f"{name}.conf").read_text()) for name in ("queue", "cache")]
    assert sum(limits) == HUB


def test_the_hubs_servers_are_found_in_launchds_files(tmp_path: Path) -> None:
    """Agents and daemons, each label once. A file that is broken counts as nothing."""
    agents, daemons, hub = (tmp_path / name for name in ("agents", "daemons", "hub"))
    for folder in (agents, daemons, hub):
        folder.mkdir()
    assert host_memory.hub_bytes((agents, daemons)) == 0
    assert tuple(SERVER_LABELS.values()) == host_memory.HUB_LABELS
    (hub / "queue.conf").write_text("port 6379\nmaxmemory 4gb\n")
    (hub / "cache.conf").write_text("maxmemory 8gb\n")
    server = ["/bin/sh", "/opt/supervise.sh", "server.log", "1", "60", "yes", "/opt/valkey-server"]
    queue = {"ProgramArguments": [*server, str(hub / "queue.conf")], "WorkingDirectory": str(hub)}
    for folder in (agents, daemons):
        (folder / "dev.batchkv.queue.plist").write_bytes(plistlib.dumps(queue))
    assert host_memory.hub_bytes((agents, daemons)) == 4 * GIB
    cache = {"ProgramArguments": [*server, "cache.conf"], "WorkingDirectory": str(hub)}
    (daemons / "dev.batchkv.cache.plist").write_bytes(plistlib.dumps(cache))
    assert host_memory.hub_bytes((agents, daemons)) == 12 * GIB
    for broken in (b"", b"<plist>", plistlib.dumps(["no", "job"]), b"\xff\xfe"):
        (daemons / "dev.batchkv.cache.plist").write_bytes(broken)
        assert host_memory.hub_bytes((agents, daemons)) == 4 * GIB


class Kernel:
    """``sysctlbyname`` of a C library with these values."""

    def __init__(self, **values: bytes) -> None:
        self._values = values

    def sysctlbyname(self, name: bytes, value: Any, size: Any, *_: object) -> int:
        found = self._values.get(name.decode().replace(".", "_"))
        if found is None:
            return -1
        value[: len(found)] = found
        size._obj.value = len(found)
        return 0


def test_numbers_of_the_kernel_are_read_by_name() -> None:
    """``struct xsw_usage`` of <sys/sysctl.h>: total, available, used, page size, encrypted."""
    usage = struct.pack("<QQQIi", 2 * GIB, GIB // 2, 3 * GIB // 2, 16384, 1)
    kernel = Kernel(kern_memorystatus_vm_pressure_level=struct.pack("<i", 4), vm_swapusage=usage)

    def read(name: str) -> bytes:
        return sysctl.read_sysctl(name, kernel)

    assert sysctl.pressure_level(read) == 4
    assert sysctl.swap_used(read) == host_memory.swap_bytes(read) == 3 * GIB // 2
    with pytest.raises(OSError, match=r"sysctl hw\.nothing"):
        read("hw.nothing")
    with pytest.raises(ValueError, match="has 2 bytes of 24"):
        sysctl.swap_used(lambda _: b"ab")
    assert host_memory.swap_bytes(lambda _: b"ab") == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has it")
def test_other_systems_have_no_such_call() -> None:
    """There the error says so, and nothing is called."""
    with pytest.raises(OSError, match="macOS"):
        sysctl.read_sysctl(sysctl.SWAP_USAGE)
    assert host_memory.swap_bytes() == 0


# -- the device and the model


def test_mlx_is_limited_on_metal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it keeps of freed memory, and what it may use; wired memory only when asked.

    MLX's allocator on a Mac is Metal's, also where a CPU computes by default, as here.
    """
    limits: dict[str, int] = {}
    info = {"max_recommended_working_set_size": 10922 * 2**20, "memory_size": 16 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda of=None: info if of == mx.gpu else {})
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for name in ("set_cache_limit", "set_memory_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda size, name=name: limits.update({name: size}))
    with caplog.at_level(logging.INFO, "batchkv.device"):
        device.prepare_device(wired_limit=False)
    assert limits == {"set_cache_limit": GIB, "set_memory_limit": 10922 * 2**20}
    assert "MLX may use 10.7 GB, and keeps up to 1.0 GB of freed memory" in caplog.text
    device.prepare_device(wired_limit=True)
    assert limits["set_wired_limit"] == 10922 * 2**20


def test_mlx_keeps_its_own_limits_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no pool."""
    for name in ("set_cache_limit", "set_memory_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda _, name=name: pytest.fail(name))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    device.prepare_device(wired_limit=True)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """What a GPU tells of its memory, which a test changes."""
    told = {"total_memory": 80 * GIB, "free_memory": 79 * GIB}
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(device, "share_stream", lambda: None)
    monkeypatch.setattr(device, "_keep_kernels", lambda: None)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)  # restored afterwards
    monkeypatch.setattr(mx, "device_info", lambda *_: told)
    device._free_at_first.cache_clear()
    yield told
    device._free_at_first.cache_clear()


@pytest.mark.parametrize(
    ("free", "expected"), [(79, None), (76, None), (75, 75), (20, 20), (0, None), (None, None)]
)
def test_a_gpu_that_others_use_is_shared(
    free: int | None,
    expected: int | None,
    cuda: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The budget and MLX's limit follow from what is free, if others have more than a twentieth.

    A device that does not say what is free counts as this worker's alone. What the worker's own
    models take later changes nothing.
    """
    limits: list[int] = []
    kept: list[int] = []
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    monkeypatch.setattr(mx, "set_cache_limit", kept.append)
    if free is None:
        del cuda["free_memory"]
    else:
        cuda["free_memory"] = free * GIB
    with caplog.at_level(logging.INFO, "batchkv.device"):
        device.prepare_device(wired_limit=False)
    cuda["free_memory"] = GIB
    assert device.memory_facts().recommended == (expected or 80) * GIB
    assert limits == ([] if expected is None else [int(expected * GIB * 0.95)])
    used = f"{80 - (expected or 80)}.0 GB of the device's memory are in use already"
    assert (used in caplog.text) == (expected is not None)
    pool = (expected or 80) / 16
    assert kept == [pool * GIB] and f"MLX keeps up to {pool:.1f} GB of freed memory" in caplog.text
    assert isinstance(mx.quantized_matmul, packed_products._Joined)


def test_little_of_freed_memory_is_kept() -> None:
    """A sixteenth of a GPU's memory, and 1 to 8 GB."""
    kept = [cuda_pool_limit(gib * GIB) / GIB for gib in (8, 16, 24, 80, 128, 141)]
    assert kept == [1, 1, 1.5, 5, 8, 8]


@pytest.mark.parametrize(("kind", "num_shared"), [("cuda", 1), ("metal", 0), ("cpu", 0)])
def test_cuda_lets_another_thread_launch_steps(
    kind: str, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is made for that before anything is computed."""
    shared: list[int] = []
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(device, "share_stream", lambda: shared.append(1))
    monkeypatch.setattr(device, "_keep_kernels", lambda: None)
    monkeypatch.setattr(device, "_leave_memory", lambda: None)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)  # restored afterwards
    device.prepare_device(wired_limit=False)
    assert len(shared) == num_shared
    assert CudaBackend().launches_beside and not MetalBackend().launches_beside


def test_the_facts_of_a_cpu_are_half_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: nothing else is read there."""
    monkeypatch.setattr(device, "kind", lambda: "cpu")
    monkeypatch.setattr(device, "_ram_bytes", lambda: 64 * GIB)
    assert device.memory_facts(GIB) == MemoryFacts("cpu", 64 * GIB, 32 * GIB)


def tree_of(*windows: int | None) -> CacheTree:
    shape = LayerShape(8, 128, 128)
    leaves = tuple(AttentionShape(shape, window) for window in windows)
    return CacheTree(leaves, tuple(range(len(leaves))))


def test_a_dense_copy_is_of_one_layer_with_all_tokens() -> None:
    """Float keeps nothing packed. Layers with a window keep few tokens, and do not count."""
    dense = 8 * 2 * 128 * 2
    affine8 = 8 * 2 * (128 + 128 // 64 * 4)
    assert dense_share(tree_of(None, None), "float", mx.bfloat16) == 0
    share = dense_share(tree_of(None, None), "affine8", mx.bfloat16)
    assert share == pytest.approx(dense / (2 * affine8), rel=0.05)
    assert dense_share(tree_of(None, None, 512), "affine8", mx.bfloat16) == share
    assert dense_share(tree_of(512, 512), "affine8", mx.bfloat16) == share
    assert dense_share(CacheTree((), ()), "affine8", mx.bfloat16) == 0


def test_a_worker_says_that_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    """A warning where rows can run; an error for a model that cannot. --memory decides for all."""
    tree, small = tree_of(*[None] * 36), mac(16, hub=HUB)
    with caplog.at_level(logging.WARNING, "batchkv.device"):
        found = choose_memory("m", small, QWEN_4B.weights, tree, "affine8", mx.bfloat16)
    assert found == USEFUL_BYTES and "12.0 GB (maxmemory)" in caplog.text
    with pytest.raises(ModelError, match=r"'m' is too large for this machine: .*--memory"):
        choose_memory("m", small, 16 * 10**9, tree, "affine8", mx.bfloat16)
    assert choose_memory("m", small, 16 * 10**9, tree, "affine8", mx.bfloat16, GIB) == GIB

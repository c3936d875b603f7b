"""The shared store: what a hit saves, what the store costs when nothing is shared, the codec.

    python tests/benchmarks/bench_cache.py [--quick] [--only PART] [--json FILE]

``ttft``    time to the first token of a prompt with a 4,096-token prefix: computed, and with the
            prefix in the worker's own memory, the memory tier, on disk, in Redis, in S3's protocol
``gate``    the same with a tier that is too slow to pay, against no store, in turns
``unique``  prompts that share nothing, with the store on and off, in turns: 95 % interval
``breaker`` the same prompts with a store whose tier is in trouble and left alone, against no store
``codec``   10 MB encoded and decoded, without and with a secret; 64 keys looked up

Both sides of every ratio alternate in one process. S3 is a server of moto's on this machine, Redis
the embedded one on a socket; disk reads come from the page cache when memory allows.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

BLAS = blas.load()

import mlx.core as mx  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from bench_engine import NoText  # noqa: E402
from workloads import VOCABULARY, build_model  # noqa: E402

from batchkv_cache_store.blocks.block import Block, Expected, Kind, Tensor, decode, encode, join  # noqa: E402
from batchkv_cache_store.blocks.seal import Buffer, Sealer  # noqa: E402
from batchkv_cache_store.errors import TierError  # noqa: E402
from batchkv_cache_store.keys import next_key, root_key  # noqa: E402
from batchkv_cache_store.lease import LocalLeases  # noqa: E402
from batchkv_cache_store.lookup import Wanted  # noqa: E402
from batchkv_cache_store.store import Store  # noqa: E402
from batchkv_cache_store.tiers.base import Put, Tier  # noqa: E402
from batchkv_cache_store.tiers.disk import DiskTier  # noqa: E402
from batchkv_cache_store.tiers.memory import MemoryTier  # noqa: E402
from batchkv_cache_store.tiers.redis import RedisTier  # noqa: E402
from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from batchkv_worker.prefix.shared.access import Access  # noqa: E402
from batchkv_worker.prefix.shared.client import StoreClient  # noqa: E402
from batchkv_worker.sequence import Generation  # noqa: E402
from batchkv_worker.sequence import Sequence as Row  # noqa: E402
from support.redis_server import running_server  # noqa: E402

GIB = 2**30
PREFIX_TOKENS = 4096


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


class SlowTier(MemoryTier):
    """Memory behind a network of so many bytes a second and a round trip of 2 ms."""

    name = "slow"
    is_instant = False

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(64 * GIB)
        self.name = "slow"
        self._seconds_per_byte = 1 / bytes_per_second

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        time.sleep(0.002)
        return super().contains_many(names)

    def get_many(self, names: Sequence[str], sizes: Any = None) -> dict[str, Buffer]:
        found = super().get_many(names, sizes)
        time.sleep(0.002 + sum(map(len, found.values())) * self._seconds_per_byte)
        return found


class House:
    """Engines of one model, each with its way to a store or none."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = build_model(args.model, getattr(mx, args.dtype))
        self.args = args
        tree = discover("bench", self.model)
        dtype = self.model.lm_head.weight.dtype
        self.loaded = LoadedModel("bench", self.model, NoText(), dtype, tree, 8192, 0, {})

    def engine(self, tiers: Sequence[Tier] | None, **changes: Any) -> Engine:
        way = None if tiers is None else Access(Store(tiers), LocalLeases())
        values = {"slots": 8, "chunk_tokens": 512, "memory_bytes": 8 * GIB, **changes}
        if mx.default_device() == mx.Device(mx.gpu):
            values["chunk_tokens"] = 2048
        return Engine(self.loaded, EngineConfig(self.args.scheme, **values), way)


def first_token_seconds(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """(time to the first token of a row that is alone, its cached tokens)."""
    start = time.perf_counter()
    engine.submit_row(Row("row", prompt, Generation(1, temperature=0.0)))
    while True:
        for event in engine.step():
            spent = time.perf_counter() - start
            settle(engine)
            return spent, event.usage.cached


def settle(engine: Engine) -> None:
    """Until all that was computed is written: the next measurement starts from rest."""
    while not engine.is_idle:
        engine.step()
    if isinstance(engine.client, StoreClient):
        engine.client.flush(600)


@contextmanager
def s3_tier() -> Iterator[Tier | None]:
    """A tier on a server of S3's protocol; None where the packages for it are missing."""
    try:
        import boto3
        from moto.server import ThreadedMotoServer

        from batchkv_cache_store.tiers.objects import ObjectsTier
    except ImportError:
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bench")
    try:
        yield ObjectsTier("bench", 64 * GIB, endpoint_url=url, **keys)
    finally:
        server.stop()


def bench_ttft(house: House) -> dict[str, Any]:
    """Cold and each place in turns; the worker's own memory is emptied before every other row."""
    rng = random.Random(1)
    prefix = tokens_of(rng, PREFIX_TOKENS)
    folder = Path(tempfile.mkdtemp(prefix="batchkv-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        server = stack.enter_context(running_server())
        places: dict[str, Tier | None] = {
            "memory tier": MemoryTier(8 * GIB),
            "disk": DiskTier(folder, 8 * GIB),
            "redis": RedisTier(server.url, 8 * GIB),
            "s3": stack.enter_context(s3_tier()),
        }
        engines = {name: house.engine([tier]) for name, tier in places.items() if tier is not None}
        engines["own memory"] = house.engine([])
        cold = house.engine(None)
        for engine in engines.values():
            first_token_seconds(engine, prefix + tokens_of(rng, 40))
        times: dict[str, list[float]] = {name: [] for name in ("cold", *engines)}
        for _ in range(house.args.repeats + 1):  # the first round warms up
            cold.prefixes.clear()
            times["cold"].append(first_token_seconds(cold, prefix + tokens_of(rng, 40))[0])
            for name, engine in engines.items():
                if name != "own memory":
                    engine.prefixes.clear()
                spent, cached = first_token_seconds(engine, prefix + tokens_of(rng, 40))
                assert cached == PREFIX_TOKENS, (name, cached, engine.client.counters)
                times[name].append(spent)
        block_bytes = cold.bytes_per_token * PREFIX_TOKENS
        for engine in (cold, *engines.values()):
            engine.close()
    medians = {name: statistics.median(samples[1:]) for name, samples in times.items()}
    print(
        f"\ntime to first token, {PREFIX_TOKENS} + 40 tokens, {block_bytes / 1e6:.0f} MB of prefix"
    )
    for name, seconds in medians.items():
        print(f"  {name:12} {seconds * 1e3:9.1f} ms  {seconds / medians['cold']:6.3f}x of cold")
    return {"seconds": medians, "prefix_bytes": block_bytes}


def bench_gate(house: House) -> dict[str, Any]:
    """A tier of a quarter of the speed that would pay, against no store at all."""
    rng = random.Random(2)
    prefix = tokens_of(rng, PREFIX_TOKENS)
    plain = house.engine(None)
    rate = PREFIX_TOKENS / min(first_token_seconds(plain, tokens_of(rng, 4136))[0] for _ in "ab")
    speed = plain.bytes_per_token * rate / 4
    gated = house.engine([SlowTier(speed)])
    pairs: list[tuple[float, float]] = []
    for number in range(house.args.pairs + 3):
        sides = [("plain", plain), ("gated", gated)]
        spent: dict[str, float] = {}
        for name, engine in sides if number % 2 else reversed(sides):
            engine.prefixes.clear()
            spent[name] = first_token_seconds(engine, prefix + tokens_of(rng, 40))[0]
        pairs.append((spent["gated"], spent["plain"]))
    counters = gated.link.counters
    plain.close()
    gated.close()
    # The first rows learn what the tier is like: one block is tried.
    found = interval(pairs[3:])
    total = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    print(f"\na tier of {speed / 1e6:.1f} MB/s, a quarter of what would pay: time against no store")
    print(f"  {show(found)}; all rows with the first: {total:.3f}; gated {counters.get('gated')}")
    return {"ratio": found, "with_first": total, "counters": counters}


def bench_unique(house: House) -> dict[str, Any]:
    """Prompts of 300 to 900 tokens that share nothing: throughput with the store over without."""
    folder = Path(tempfile.mkdtemp(prefix="batchkv-bench-"))
    try:
        found, counters = unique_pairs(house, [DiskTier(folder, 2 * GIB)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\nunique prompts, {house.args.jobs} jobs a run, throughput with the store over without")
    print(f"  {show(found)}; {counters}")
    return {"ratio": found, "counters": counters}


class BrokenTier(MemoryTier):
    """A tier whose every call fails, as a server's that is gone."""

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        raise TierError("it is gone")

    def get_many(self, names: Sequence[str]) -> dict[str, Buffer]:
        raise TierError("it is gone")

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        raise TierError("it is gone")


def bench_breaker(house: House) -> dict[str, Any]:
    """The prompts of ``unique``, with the breaker of the store's only tier open."""
    logging.getLogger("batchkv_cache_store").setLevel(logging.ERROR)  # each failure is a warning
    found, counters = unique_pairs(house, [BrokenTier(GIB)])
    assert counters["skipped.memory"] > counters["error.memory"], counters
    print(
        f"\nthe same with the breaker open, {house.args.jobs} jobs a run, throughput over without"
    )
    print(f"  {show(found)}; {counters}")
    return {"ratio": found, "counters": counters}


def unique_pairs(house: House, tiers: Sequence[Tier]) -> tuple[dict[str, float], dict[str, int]]:
    """(throughput with a store over without, in turns; the store's counters)."""
    args = house.args
    seeds = iter(range(10**6))

    def one(engine: Engine) -> float:
        rng = random.Random(next(seeds))
        rows = [tokens_of(rng, rng.randrange(300, 900)) for _ in range(args.jobs)]
        lengths = sum(map(len, rows))
        start = time.perf_counter()
        for index, prompt in enumerate(rows):
            engine.submit_row(Row(str(index), prompt, Generation(32, temperature=0.0)))
        while not engine.is_idle:
            engine.step()
        spent = time.perf_counter() - start
        settle(engine)
        return spent / lengths

    off = house.engine(None)
    on = house.engine(tiers)
    one(off), one(on)
    pairs: list[tuple[float, float]] = []
    try:
        for number in range(args.pairs):
            first, second = (off, on) if number % 2 else (on, off)
            times = {id(first): one(first), id(second): one(second)}
            pairs.append((times[id(off)], times[id(on)]))
    finally:
        counters = on.link.counters
        off.close()
        on.close()
    return interval(pairs), counters


def bench_codec(house: House) -> dict[str, Any]:
    """10 MB as six tensors, as a worker's stacked layers have them; milliseconds, medians."""
    del house
    space, data = bytes(32), random.Random(3).randbytes(10_000_000 // 6 // 64 * 64)
    root, ids = root_key(space), list(range(256))
    names = ("codes", "scales", "biases")
    tensors = tuple(
        Tensor(-1, f"{part}.{name}", "uint8", (len(data),), bytes(data))
        for part in ("keys", "values")
        for name in names
    )
    packed = b"".join(number.to_bytes(4, "little") for number in ids)
    block = Block(space, next_key(root, ids), root, 0, Kind.KV, packed, tensors, "bench", 1)
    expected = Expected(space, block.key, Kind.KV, packed)
    times: dict[str, float] = {}
    for name, sealer in (("", Sealer()), (", secret", Sealer(b"s" * 32))):
        whole = join(encode(block, sealer))
        calls: dict[str, Callable[[], object]] = {
            f"encode{name}": lambda sealer=sealer: encode(block, sealer),
            f"decode{name}": lambda sealer=sealer, whole=whole: decode(whole, sealer, expected),
        }
        for label, call in calls.items():
            times[label] = statistics.median(milliseconds(call) for _ in range(31))
    with running_server() as server:
        tier = RedisTier(server.url, GIB)
        store = Store([tier])
        keys = [bytes([n]) * 32 for n in range(64)]
        wanted = Wanted(space, keys, [packed] * 64)
        times["lookup of 64 absent keys, redis"] = statistics.median(
            milliseconds(lambda: store.lookup(wanted)) for _ in range(31)
        )
        store.close(1.0)
    print("\n10 MB block")
    for label, spent in times.items():
        print(f"  {label:32} {spent:7.3f} ms")
    return times


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Geometric mean of the pairs' ratios with its 95 % interval (Student's t, on logarithms)."""
    logs = [math.log(a / b) for a, b in pairs]
    mean, count = statistics.fmean(logs), len(logs)
    # Quantiles of t for 97.5 %: exact for the sizes used, 1.96 for many.
    t = {5: 2.776, 10: 2.262, 15: 2.145, 20: 2.093, 30: 2.045}.get(count, 2.1)
    half = t * statistics.stdev(logs) / math.sqrt(count)
    return {
        "mean": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "pairs": count,
    }


def show(found: dict[str, float]) -> str:
    return (
        f"{found['mean']:.3f}x, 95 % interval {found['low']:.3f} to {found['high']:.3f}, "
        f"{found['pairs']} pairs"
    )


PARTS = {
    "ttft": bench_ttft,
    "gate": bench_gate,
    "unique": bench_unique,
    "breaker": bench_breaker,
    "codec": bench_codec,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bench-25m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scheme", default="affine8")
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="a small model, few repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.model, args.repeats, args.pairs, args.jobs = "bench-3m", 1, 5, 8
    device = mx.default_device()
    print(
        f"{platform.machine()}, {device}, MLX {mx.__version__}, BLAS: {BLAS}; {args.model}, "
        f"{args.dtype}, {args.scheme}"
    )
    house = House(args)
    found = {name: part(house) for name, part in PARTS.items() if args.only in (None, name)}
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, **found}, indent=1), "utf-8")


if __name__ == "__main__":
    main()

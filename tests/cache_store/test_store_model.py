"""The tiered store against a dict, through evictions, restarts, crashes and damage."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.disk_files import write_file
from batchkv_cache_store.tiers.memory import MemoryTier
from cache_store.blocks import chain_of, encoded
from cache_store.publishing import FLUSH_SECONDS, publish_many, wanted

MAX_BLOCKS = 5
# Prompts over two tokens: many share prefixes, and no more than 62 blocks exist at all.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_BLOCKS).map(
    lambda heads: chain_of([head for head in heads for _ in range(4)])
)
WRITERS = st.integers(0, 1)


def physical(root: Path) -> int:
    """Bytes of disk under the folder, without the ledger."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "usage"]
    return sum(path.stat().st_blocks * 512 for path in files)


class StoreMachine(RuleBasedStateMachine):
    """Two workers, each with memory of its own, share a folder.

    With room for everything, a lookup finds exactly the longest chain of the dict; without, it
    finds no more than that. What it finds is always what was published.
    """

    @initialize(has_room=st.booleans())
    def start(self, has_room: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="bkv-model-"))
        self.has_room = has_room
        self.max_bytes = 1 << 24 if has_room else 7 * 4096
        self.published: dict[bytes, Block] = {}
        self.rejected: Counter[str] = Counter()
        self.stores = [self.open(), self.open()]

    def open(self) -> Store:
        memory = MemoryTier(1 << 20 if self.has_room else 1500)
        return Store([memory, DiskTier(self.root, self.max_bytes, temporary_age_seconds=3600)])

    @rule(writer=WRITERS, blocks=PROMPTS)
    def publish(self, writer: int, blocks: list[Block]) -> None:
        for block in blocks:
            assert self.stores[writer].publish(block)
            self.published[block.key] = block
        assert self.stores[writer].flush(FLUSH_SECONDS)

    @rule(first=PROMPTS, second=PROMPTS)
    def publish_both_at_once(self, first: list[Block], second: list[Block]) -> None:
        for store, blocks in zip(self.stores, (first, second), strict=True):
            for block in blocks:
                assert store.publish(block)
                self.published[block.key] = block
        for store in self.stores:
            assert store.flush(FLUSH_SECONDS)

    @rule(reader=WRITERS, blocks=PROMPTS)
    def look_up(self, reader: int, blocks: list[Block]) -> None:
        found = self.stores[reader].lookup(wanted(blocks))
        depth = self.known_depth(blocks)
        assert found.depth == depth if self.has_room else found.depth <= depth
        assert list(found.kv) == blocks[: found.depth]
        self.stores[reader].flush(FLUSH_SECONDS)

    def known_depth(self, blocks: list[Block]) -> int:
        """The depth by the dict: blocks of the prompt before the first missing one."""
        gaps = [number for number, b in enumerate(blocks) if b.key not in self.published]
        return gaps[0] if gaps else len(blocks)

    @rule(writer=WRITERS)
    def restart(self, writer: int) -> None:
        assert self.stores[writer].close(FLUSH_SECONDS)
        self.stores[writer] = self.open()

    @rule(blocks=PROMPTS, share=st.floats(0, 1))
    def crash_before_the_rename(self, blocks: list[Block], share: float) -> None:
        """A worker dies and leaves a temporary file, half or wholly written; no lookup reads it."""
        disk = DiskTier(self.root, self.max_bytes)
        data = encoded(blocks[-1])
        temporary = disk._reserve(block_name(blocks[-1].key, Kind.KV), 4096)
        if temporary is not None:
            write_file(temporary, [data[: int(share * len(data))]], is_synced=False)

    @rule()
    def sweep(self) -> None:
        """Another worker starts an hour later: files of dead workers are gone."""
        DiskTier(self.root, self.max_bytes, temporary_age_seconds=-1.0)
        assert not list((self.root / "temporary").iterdir())
        assert int((self.root / "usage").read_text().split()[0]) == physical(self.root)

    @rule(blocks=PROMPTS, number=st.integers(0, MAX_BLOCKS - 1), place=st.integers(0, 2**16))
    def damage(self, blocks: list[Block], number: int, place: int) -> None:
        """A block is damaged on the disk: the next lookup stops there and removes the block."""
        for writer in (0, 1):
            self.restart(writer)
        depth = self.stores[0].lookup(wanted(blocks)).depth
        self.stores[0].flush(FLUSH_SECONDS)
        self.restart(0)
        if number >= depth:
            return
        block = blocks[number]
        file = next(self.root.glob(f"blocks-1/*/*/{block_name(block.key, Kind.KV)}"))
        data = bytearray(file.read_bytes())
        data[place % len(data)] ^= 0x55
        file.write_bytes(data)
        assert self.stores[0].lookup(wanted(blocks)).depth == number
        counters = self.stores[0].counters()
        assert sum(n for name, n in counters.items() if name.startswith("rejected.")) == 1
        del self.published[block.key]
        self.restart(0)

    @invariant()
    def the_cap_holds(self) -> None:
        assert physical(self.root) <= self.max_bytes
        assert all(not store.open_breakers() for store in self.stores)

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close(FLUSH_SECONDS)
        shutil.rmtree(self.root, ignore_errors=True)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_processes_share_a_folder_under_pressure(tmp_path: Path) -> None:
    """Processes that write, read and evict the same blocks see whole blocks and keep the cap."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=publish_many, args=(str(tmp_path), seed)) for seed in (1, 2, 3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert physical(tmp_path) <= 30 * 4096
    assert int((tmp_path / "usage").read_text().split()[0]) == physical(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())

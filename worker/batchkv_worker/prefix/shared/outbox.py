"""Blocks on their way from the engine to the store, and the leases that end when they are written.

A part of a block is added while it is still being computed, as an array of its own. Two steps or
chunks later, when it is computed, it is handed to the store. The store's own thread reads its
memory and writes it, so the engine copies nothing to the host. If writing is slower than computing,
the parts that are worth least are dropped. The lease is released when all parts of the block are
written, so that another worker that waits for the lease finds the block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import mlx.core as mx

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.keys import BLOCK_TOKENS, own_root
from batchkv_cache_store.lease import Lease
from batchkv_cache_store.store import Store
from batchkv_worker.faults import is_late
from batchkv_worker.prefix.block_layout import BlockLayout, joined, packed_tokens
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.prefix.shared.worth import Worth
from batchkv_worker.sequence import Fetch, Sequence

log = logging.getLogger("batchkv.cache")

MAX_KEPT = 2**16  # parts that are remembered because they were of no use elsewhere
MAX_BYTES = 512 * 2**20  # of parts that wait here or in the store: nothing else counts their memory
QUEUED_BYTES = 64 * 2**20  # in the store's queue, above which parts wait here
_AGE_STEPS = 2  # or chunks, after which what was started is nearly always computed


@dataclass(slots=True)
class _Held:
    """A lease, the lookup that got it, and the parts of its block that are not written yet."""

    lease: Lease
    owner: Fetch
    num_pending: int = 0


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One part of a block of a prompt, computed in that step of the engine.

    ``data``: its bytes, in an array that nothing else reads. ``is_far``: rows elsewhere want it.
    ``is_try``: it goes to far tiers although that is not expected to pay.
    """

    step: int
    row: Sequence
    number: int
    kind: Kind
    data: mx.array
    is_far: bool
    is_try: bool = False

    @property
    def key(self) -> bytes:
        return self.row.block_keys[self.number]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def rank(self) -> tuple[bool, int]:
        """Those with the smallest are sent first: a chain's tail is of no use without its head."""
        return not self.is_far, self.number


class Outbox:
    """The outbox of one engine. Only the end of a write comes from another thread."""

    def __init__(
        self,
        store: Store,
        release: Callable[[Items[Lease]], None],
        block_layout: BlockLayout,
        worth: Worth,
        namespace: bytes,
        root: bytes,
        writer: str,
    ) -> None:
        self._store = store
        self._release = release  # returns at once
        self._block_layout = block_layout
        self._namespace = namespace
        self._root = root
        self._writer = writer
        self._worth = worth
        self._parcels: list[_Parcel] = []
        self._num_bytes = 0
        self._held: dict[bytes, _Held] = {}
        self._kept: dict[tuple[bytes, Kind], None] = {}  # that far tiers did not get
        self._lock = threading.Lock()
        self._step = 0
        self._has_warned = False
        self._is_trying = False  # a block is written to a far tier whose speed is not known

    def __len__(self) -> int:
        return len(self._parcels)

    def hold(self, leases: Items[Lease], owner: Fetch) -> None:
        """Keep leases until their blocks are written, or until their owner is forgotten."""
        with self._lock:
            for lease in leases:
                self._held[lease.key] = _Held(lease, owner)

    def is_held(self, key: bytes) -> bool:
        """Whether this worker has the lease on a block: it is being computed here."""
        held = self._held.get(key)
        return held is not None and not held.lease.is_lost

    def forget(self, owner: Fetch) -> None:
        """A row is computed or cancelled: release its leases on blocks that were not computed."""
        with self._lock:
            gone = [
                key
                for key, held in self._held.items()
                if held.owner is owner and not held.num_pending
            ]
            leases = [self._held.pop(key).lease for key in gone]
        self._release(leases)

    def add(self, row: Sequence, number: int, kind: Kind, bundle: Bundle) -> None:
        """Add a part that was computed just now, if other rows can use it (``prefix.OnNew``)."""
        if number >= self._worth.num_shared(row):
            return
        is_far = self._worth.is_for_far(row, number)
        if not is_far and self._store.has_far:
            self._kept[row.block_keys[number], kind] = None
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        if not is_far and not self._store.has_near:
            self._store.count("not_needed")
            return  # its lease, if any, goes with its owner
        if not self._block_layout.is_like(kind, bundle):
            if not self._has_warned:
                self._has_warned = True
                log.warning("prefixes are not shared: this model's %s arrays vary", kind)
            self._store.count("unlike")
            return
        if not self._make_room(bundle.nbytes, (not is_far, number)):
            self._store.count("dropped")
            return
        data = joined(bundle)
        mx.async_eval(data)
        is_try = is_far and self._worth.pays(row) is False
        parcel = _Parcel(self._step, row, number, kind, data, is_far, is_try)
        with self._lock:
            if (held := self._held.get(parcel.key)) is not None:
                held.num_pending += 1
        self._parcels.append(parcel)
        self._num_bytes += parcel.num_bytes

    def add_late(self, row: Sequence, number: int, kind: Kind, bundle: Bundle) -> None:
        """Add a part from memory, if it stayed here and rows elsewhere want it now.

        Workers may join a queue after a prefix of many rows is computed.
        """
        place = row.block_keys[number], kind
        if place not in self._kept or self._worth.pays(row) is False:
            return
        if number < self._worth.num_elsewhere(row):
            del self._kept[place]
            self.add(row, number, kind, bundle)

    def _make_room(self, num_bytes: int, rank: tuple[bool, int]) -> bool:
        """Whether a part of that rank has room, after dropping parts that are worth less."""
        while self._num_bytes + self._store.num_queued_bytes + num_bytes > MAX_BYTES:
            last = max(self._parcels, key=lambda parcel: parcel.rank, default=None)
            if last is None or last.rank <= rank:
                return False
            self._drop(last, "dropped")
        return True

    def send(self, *, is_idle: bool, before_waiting: Callable[[], None] = lambda: None) -> None:
        """Hand parts that are computed by now to the store, after a step; all when it is idle.

        The store gets a few at once. The others wait here, where better ones go before them.
        ``before_waiting`` is called before a part is waited for, which most steps do not.
        """
        self._step += 1
        latest = self._step if is_idle else self._step - _AGE_STEPS
        ready = [parcel for parcel in self._parcels if parcel.step <= latest]
        for parcel in sorted(ready, key=lambda parcel: parcel.rank):
            if not is_idle and self._store.num_queued_bytes > QUEUED_BYTES:
                return
            pays = self._worth.pays(parcel.row) if parcel.is_far else True
            if pays is None and self._is_trying and not is_idle:
                continue
            is_far = parcel.is_far and (pays is not False or parcel.is_try)
            if not is_far and not self._store.has_near:  # the speed is known since it was added
                self._drop(parcel, "not_needed")
                continue
            before_waiting()
            self._take(parcel)
            self._is_trying |= pays is None
            self._send(parcel, is_far=is_far)

    def _take(self, parcel: _Parcel) -> None:
        self._parcels.remove(parcel)
        self._num_bytes -= parcel.num_bytes

    def _drop(self, parcel: _Parcel, why: str) -> None:
        self._take(parcel)
        self._store.count(why)
        self._written(parcel.key)

    def drop_all(self) -> None:
        """Drop all parts: memory ran out, so their content cannot be trusted."""
        for parcel in [*self._parcels]:
            self._drop(parcel, "dropped")

    def send_all(self) -> None:
        """Hand over all parts: the engine ends. If the device fails, the others are dropped."""
        try:
            while self._parcels:
                self.send(is_idle=True)
        except RuntimeError as fault:
            log.warning("%d blocks are not stored: %s", 1 + len(self._parcels), fault)
            self.drop_all()

    def _send(self, parcel: _Parcel, *, is_far: bool) -> None:
        """Give a part to the store. Raises what the device reports of work that has failed.

        Waiting for a part may be the first call that hears of it. MLX reports it once, and more
        than this part may be wrong.
        """
        key, name = parcel.key, block_name(parcel.key, parcel.kind)

        def end() -> None:
            self._is_trying = False
            self._written(key)

        is_queued = False
        try:
            self._settle(parcel)
            if self._store.has_room(parcel.num_bytes):
                is_queued = self._store.publish_later(
                    name, parcel.num_bytes, self._maker(parcel), end, is_near=not is_far
                )
            else:
                self._store.count("dropped")
        except Exception as fault:  # whatever else broke, rows go on
            self._store.count("dropped")
            if is_late(fault):
                raise
            log.exception("a block could not be handed to the store")
        finally:
            if not is_queued:
                end()

    def _settle(self, parcel: _Parcel) -> None:
        """Wait until a part is computed, which it is mostly; raises the device's faults."""
        mx.eval(parcel.data)

    def _maker(self, parcel: _Parcel) -> Callable[[], Block]:
        """What makes the block, on the store's thread: a device may copy it to the host then."""
        low, keys, row = parcel.number * BLOCK_TOKENS, parcel.row.block_keys, parcel.row
        block = Block(
            namespace=self._namespace,
            key=parcel.key,
            parent=keys[parcel.number - 1]
            if parcel.number
            else own_root(self._root, row.cache_salt),
            index=parcel.number,
            kind=parcel.kind,
            tokens=packed_tokens(row.prompt[low : low + BLOCK_TOKENS], BLOCK_TOKENS)[0],
            tensors=(),
            writer=self._writer,
            time_ms=time.time_ns() // 1_000_000,
        )
        kind, data, layout = parcel.kind, parcel.data, self._block_layout
        return lambda: replace(block, tensors=layout.tensors(kind, memoryview(data)))

    def _written(self, key: bytes) -> None:
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return
            held.num_pending -= 1
            if held.num_pending > 0:
                return
            del self._held[key]
        self._release([held.lease])

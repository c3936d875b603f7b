"""Blocks on their way from the engine to the store, and the leases that end when they are written.

A part of a block is added while it is still being computed. It is copied out two steps later, when
reading it waits for nothing, a few megabytes between two steps. The store's own thread writes it.
The lease is released when all parts of the block are written, so that another worker that waits for
the lease finds the block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.keys import BLOCK_TOKENS, own_root
from batchkv_cache_store.lease import Lease
from batchkv_cache_store.store import Store
from batchkv_cache_store.uses import Uses
from batchkv_worker.faults import is_late
from batchkv_worker.prefix.block_layout import BlockLayout, packed_tokens
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.sequence import Fetch, Sequence

log = logging.getLogger("batchkv.cache")

SEND_BYTES = 64 * 2**20  # copied out between two steps; a quarter of what waits, if that is more
MAX_BYTES = 512 * 2**20  # of parcels that wait: they keep arrays alive that nothing else counts
_AGE_STEPS = 2  # after which what was started is surely computed


@dataclass(slots=True)
class _Held:
    """A lease, the lookup that got it, and the parts of its block that are not written yet."""

    lease: Lease
    owner: Fetch
    num_pending: int = 0


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One part of a block of a prompt, computed in that step of the engine."""

    step: int
    row: Sequence
    number: int
    kind: Kind
    bundle: Bundle

    @property
    def key(self) -> bytes:
        return self.row.block_keys[self.number]


class Outbox:
    """The outbox of one engine. Only the end of a write comes from another thread."""

    def __init__(
        self,
        store: Store,
        release: Callable[[Items[Lease]], None],
        block_layout: BlockLayout,
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
        self._parcels: deque[_Parcel] = deque()
        self._num_bytes = 0
        self._held: dict[bytes, _Held] = {}
        self._lock = threading.Lock()
        self._step = 0
        self._has_warned = False
        self.uses: Uses[bytes] = Uses()  # of the rows that wait here

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

    def num_worth(self, row: Sequence, num_own: int = 0) -> int:
        """How many of a row's first blocks others can use; ``num_own``: 1 while it waits itself."""
        return self.uses.num_worth_writing(row.block_keys, row.num_common_blocks, num_own)

    def add(self, row: Sequence, number: int, kind: Kind, bundle: Bundle) -> None:
        """Add a part that was computed just now, if other rows can use it (``prefix.OnNew``)."""
        if number >= self.num_worth(row):
            return
        if not self._block_layout.is_like(kind, bundle):
            if not self._has_warned:
                self._has_warned = True
                log.warning("prefixes are not shared: this model's %s arrays vary", kind)
            self._store.count("unlike")
            return
        if self._num_bytes + bundle.nbytes > MAX_BYTES:
            self._store.count("dropped")
            return  # its lease goes with its owner
        parcel = _Parcel(self._step, row, number, kind, bundle)
        with self._lock:
            if (held := self._held.get(parcel.key)) is not None:
                held.num_pending += 1
        self._parcels.append(parcel)
        self._num_bytes += bundle.nbytes

    def send(self, *, is_idle: bool) -> None:
        """Copy out parts that are computed by now, after a step; all when the engine is idle."""
        self._step += 1
        left = max(SEND_BYTES, self._num_bytes // 4)
        while self._parcels and left > 0:
            if not is_idle and self._parcels[0].step > self._step - _AGE_STEPS:
                return
            parcel = self._parcels.popleft()
            self._num_bytes -= parcel.bundle.nbytes
            left -= parcel.bundle.nbytes
            self._send(parcel)

    def drop_all(self) -> None:
        """Drop all parts: memory ran out, so their content cannot be trusted."""
        while self._parcels:
            parcel = self._parcels.popleft()
            self._num_bytes -= parcel.bundle.nbytes
            self._store.count("dropped")
            self._written(parcel.key)

    def send_all(self) -> None:
        """Copy out all parts: the engine ends. If the device fails, the others are dropped."""
        try:
            while self._parcels:
                self.send(is_idle=True)
        except RuntimeError as fault:
            log.warning("%d blocks are not stored: %s", 1 + len(self._parcels), fault)
            self.drop_all()

    def _send(self, parcel: _Parcel) -> None:
        """Give a part to the store. Raises what the device reports of work that has failed.

        Reading a part may be the first call that hears of it. MLX reports it once, and more than
        this part may be wrong.
        """
        key = parcel.key  # the write must not keep the parcel, and so its arrays, alive

        def end() -> None:
            self._written(key)

        is_queued = False
        try:
            if self._store.has_room(parcel.bundle.nbytes):
                is_queued = self._store.publish(self._block(parcel), end)
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

    def _block(self, parcel: _Parcel) -> Block:
        low = parcel.number * BLOCK_TOKENS
        keys = parcel.row.block_keys
        root = own_root(self._root, parcel.row.cache_salt)
        return Block(
            namespace=self._namespace,
            key=parcel.key,
            parent=keys[parcel.number - 1] if parcel.number else root,
            index=parcel.number,
            kind=parcel.kind,
            tokens=packed_tokens(parcel.row.prompt[low : low + BLOCK_TOKENS], BLOCK_TOKENS)[0],
            tensors=self._block_layout.tensors(parcel.kind, parcel.bundle),
            writer=self._writer,
            time_ms=time.time_ns() // 1_000_000,
        )

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

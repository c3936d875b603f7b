"""The search for a prompt's longest cached prefix, through all tiers at once.

A prompt can be taken up at a *depth*, a number of its blocks, when everything that its model's
layers need is there: blocks of kind ``kv`` for all blocks up to the depth, of kind ``window`` for
the last few of them, of kind ``state`` for the very last. The search

1. asks each tier, fast to slow, in one round trip for 64 keys at a time, what it has of what is
   not found yet; it stops after the first 64 that leave a gap in ``kv``, for what lies behind a
   gap is of no use;
2. lists the depths at which all is there, and lets the gate choose one;
3. fetches what that depth needs, one round trip to a tier for each batch, and decodes it. What is
   gone or damaged meanwhile is looked for in the slower tiers, and if it is nowhere, 2 again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchkv_cache_store.block import Block, Expected, Kind, Limits, decode
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.gate import Gate, Option
from batchkv_cache_store.guarded import Counters, GuardedTier
from batchkv_cache_store.names import block_name
from batchkv_cache_store.seal import Buffer, Sealer

KEYS_AT_ONCE = 64
MAX_FETCH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt's blocks, first to last, and what the model's layers need of them.

    ``keys``: 32 bytes each. ``tokens``: of each block, ids as little-endian u32.
    ``num_window_blocks``: how many last blocks the widest sliding window overlaps, 0 for none.
    ValueError when they do not fit each other.
    """

    namespace: bytes
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    has_kv: bool = True
    num_window_blocks: int = 0
    has_state: bool = False

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tokens):
            raise ValueError(f"{len(self.keys)} keys, but tokens of {len(self.tokens)} blocks")
        if not (self.has_kv or self.num_window_blocks > 0 or self.has_state):
            raise ValueError("no kind of block is wanted")

    def kinds(self) -> list[Kind]:
        """The kinds that are needed at all."""
        wanted = {Kind.KV: self.has_kv, Kind.WINDOW: self.num_window_blocks > 0}
        return [
            kind for kind, is_wanted in {**wanted, Kind.STATE: self.has_state}.items() if is_wanted
        ]

    def needed_at(self, depth: int) -> list[tuple[int, Kind]]:
        """(block number, kind) of everything that a depth needs, head first."""
        needed = [(number, Kind.KV) for number in range(depth)] if self.has_kv else []
        return needed + self.needed_at_end(depth)

    def needed_at_end(self, depth: int) -> list[tuple[int, Kind]]:
        """Of that, what only this depth needs: the window and the state."""
        first = max(0, depth - self.num_window_blocks)
        needed = [(number, Kind.WINDOW) for number in range(first, depth)]
        return needed + [(depth - 1, Kind.STATE)] * self.has_state


@dataclass(frozen=True, slots=True)
class Found:
    """What there is for a prompt, up to ``depth`` blocks; 0 when there is nothing.

    ``kv`` has ``depth`` blocks or, when not wanted, none; ``window`` the last ones; head first.
    """

    depth: int = 0
    kv: tuple[Block, ...] = ()
    window: tuple[Block, ...] = ()
    state: Block | None = None


_Piece = tuple[int, Kind]


@dataclass(frozen=True, slots=True)
class _Place:
    tier: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A block that was loaded: its bytes as they lay in the tier of that number."""

    name: str
    tier: int
    data: Buffer


class Search:
    """One search; made for it and thrown away after. ``run`` once, then read ``hits``."""

    def __init__(
        self,
        wanted: Wanted,
        tiers: Sequence[GuardedTier],
        gate: Gate,
        sealer: Sealer,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self.hits: list[Hit] = []
        self._wanted = wanted
        self._tiers = tiers
        self._gate = gate
        self._sealer = sealer
        self._limits = limits
        self._counters = counters
        self._places: dict[_Piece, _Place] = {}
        self._blocks: dict[_Piece, Block] = {}

    def run(self) -> Found:
        """What the tiers have. Raises nothing that a tier or a block could cause."""
        self._locate_chain()
        while depth := self._choose():
            needed = self._wanted.needed_at(depth)
            self._fetch([piece for piece in needed if piece not in self._blocks])
            if all(piece in self._blocks for piece in needed):
                return self._found(depth, needed)
        return Found()

    def _found(self, depth: int, needed: Iterable[_Piece]) -> Found:
        by_kind: dict[Kind, list[Block]] = {kind: [] for kind in Kind}
        for piece in needed:
            by_kind[piece[1]].append(self._blocks[piece])
        state = by_kind[Kind.STATE][0] if self._wanted.has_state else None
        return Found(depth, tuple(by_kind[Kind.KV]), tuple(by_kind[Kind.WINDOW]), state)

    def _locate_chain(self) -> None:
        kinds, num_keys = self._wanted.kinds(), len(self._wanted.keys)
        for start in range(0, num_keys, KEYS_AT_ONCE):
            numbers = range(start, min(start + KEYS_AT_ONCE, num_keys))
            self._locate([(number, kind) for number in numbers for kind in kinds], 0)
            if self._wanted.has_kv and any((n, Kind.KV) not in self._places for n in numbers):
                return

    def _locate(self, pieces: Sequence[_Piece], first_tier: int) -> None:
        """Look for pieces in the tiers from ``first_tier`` on."""
        missing = {self._name(piece): piece for piece in pieces}
        for index, tier in enumerate(self._tiers[first_tier:], first_tier):
            for name, num_bytes in tier.contains_many(list(missing)).items():
                if num_bytes > self._limits.max_block_bytes:
                    self._reject(name, tier, Reason.LIMITS)
                elif name in missing:
                    self._places[missing.pop(name)] = _Place(index, num_bytes)

    def _choose(self) -> int:
        """The depth to take, 0 for none."""
        options: list[Option] = []
        depths: list[int] = []
        kv_sizes: Counter[str] = Counter()
        num_tokens = 0
        for depth in range(1, len(self._wanted.keys) + 1):
            num_tokens += len(self._wanted.tokens[depth - 1]) // 4
            if self._wanted.has_kv:
                if (depth - 1, Kind.KV) not in self._places:
                    break
                self._add_size(kv_sizes, (depth - 1, Kind.KV))
            rest = self._wanted.needed_at_end(depth)
            if all(piece in self._places for piece in rest):
                sizes = kv_sizes.copy()
                for piece in rest:
                    self._add_size(sizes, piece)
                options.append(Option(num_tokens, sizes))
                depths.append(depth)
        if not options:
            return 0
        choice = self._gate.choose(options)
        if choice != len(options) - 1:
            self._counters.add("gated")
        return 0 if choice is None else depths[choice]

    def _add_size(self, sizes: Counter[str], piece: _Piece) -> None:
        if piece not in self._blocks:  # what was fetched already costs nothing
            place = self._places[piece]
            sizes[self._tiers[place.tier].name] += place.num_bytes

    def _fetch(self, pieces: Sequence[_Piece]) -> None:
        """Load and decode pieces; what fails is looked for elsewhere, or has no place any more."""
        lost: list[tuple[_Piece, int]] = []
        for index, tier in enumerate(self._tiers):
            here = [piece for piece in pieces if self._places[piece].tier == index]
            for batch in self._batches(here):
                start = time.perf_counter()
                answers = tier.get_many([self._name(piece) for piece in batch])
                for piece in batch:
                    data = answers.get(self._name(piece))
                    if data is None or not self._accept(piece, data, index):
                        lost.append((piece, index))
                # Checking the bytes is part of what a load costs.
                num_bytes = sum(len(data) for data in answers.values())
                self._gate.observe_load(tier.name, num_bytes, time.perf_counter() - start)
        for piece, _ in lost:
            del self._places[piece]
        for index in sorted({index for _, index in lost}):
            self._locate([piece for piece, at in lost if at == index], index + 1)

    def _batches(self, pieces: Sequence[_Piece]) -> Iterable[list[_Piece]]:
        batch: list[_Piece] = []
        num_bytes = 0
        for piece in pieces:
            size = self._places[piece].num_bytes
            if batch and (num_bytes + size > MAX_FETCH_BYTES or len(batch) == KEYS_AT_ONCE):
                yield batch
                batch, num_bytes = [], 0
            batch.append(piece)
            num_bytes += size
        if batch:
            yield batch

    def _accept(self, piece: _Piece, data: Buffer, tier: int) -> bool:
        number, kind = piece
        wanted = self._wanted
        expected = Expected(wanted.namespace, wanted.keys[number], kind, wanted.tokens[number])
        try:
            self._blocks[piece] = decode(data, self._sealer, expected, self._limits)
        except BlockRejected as fault:
            self._reject(self._name(piece), self._tiers[tier], fault.reason)
            return False
        self.hits.append(Hit(self._name(piece), tier, data))
        return True

    def _reject(self, name: str, tier: GuardedTier, reason: Reason) -> None:
        self._counters.add(f"rejected.{reason}")
        if reason.is_damage:
            tier.set_aside(name)

    def _name(self, piece: _Piece) -> str:
        return block_name(self._wanted.keys[piece[0]], piece[1])

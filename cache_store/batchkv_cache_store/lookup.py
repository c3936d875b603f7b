"""The search for a prompt's longest cached prefix in all tiers.

A prompt can continue at a *depth*, a number of its blocks, if all pieces that its model's layers
need are stored: pieces of kind ``kv`` for all blocks up to the depth, of kind ``window`` for the
last few of them, of kind ``state`` for the last one. The search has three steps.

1. It asks each tier, fast to slow, for the pieces that are not found yet: 64 keys in one round
   trip. It stops after the first 64 keys with a gap in ``kv``, because blocks after a gap are of
   no use.
2. It lists the depths that have all their pieces. The gate chooses one.
3. It loads a batch of this depth's pieces from each tier and decodes each as it arrives. Missing or
   damaged pieces are searched in the slower tiers. While pieces remain, step 2 follows again, so
   that a tier that proves slow is used only as far as it pays. The first batch from a tier that was
   never timed is one block, the next one 64 MB. Each further batch has twice as many bytes.

Pieces of kind ``kv`` are handed over as they arrive, if the caller wants that. When the caller says
that it wants no more, the search ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field

from batchkv_cache_store.blocks.block import Block, Expected, Kind, Limits, decode
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.blocks.seal import Buffer, Sealer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.guarded import Counters, GuardedTier
from batchkv_cache_store.load_or_compute import Gate, Option

KEYS_AT_ONCE = 64
FIRST_BYTES = 64 * 1024 * 1024  # of a search's first batch: a tier may be slow by now
MAX_FETCH_BYTES = 256 * 1024 * 1024

Piece = tuple[int, Kind]  # a block's number in the prompt, from 0, and one of its kinds
# Called with a piece and the name of its tier. It returns False if no more are wanted.
HandOver = Callable[[Piece, Block, str], object]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt's blocks, first to last, and the kinds that the model's layers need.

    ``keys``: 32 bytes each. ``tokens``: the ids of each block as little-endian u32.
    ``num_window_blocks``: how many last blocks the widest sliding window overlaps; 0 for none.
    ``had``: pieces that the caller already has; they cost nothing and are not loaded. Raises
    ValueError if the fields contradict each other.
    """

    namespace: bytes
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    has_kv: bool = True
    num_window_blocks: int = 0
    has_state: bool = False
    had: Set[Piece] = frozenset()

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tokens):
            raise ValueError(f"{len(self.keys)} keys, but tokens of {len(self.tokens)} blocks")
        if not (self.has_kv or self.num_window_blocks > 0 or self.has_state):
            raise ValueError("no kind of block is wanted")

    def kinds(self) -> list[Kind]:
        """The kinds of pieces that the model needs."""
        wanted = {Kind.KV: self.has_kv, Kind.WINDOW: self.num_window_blocks > 0}
        return [
            kind for kind, is_wanted in {**wanted, Kind.STATE: self.has_state}.items() if is_wanted
        ]

    def needed_at(self, depth: int) -> list[Piece]:
        """(block number, kind) of all pieces that a depth needs, head first."""
        needed = [(number, Kind.KV) for number in range(depth)] if self.has_kv else []
        return needed + self.needed_at_end(depth)

    def needed_at_end(self, depth: int) -> list[Piece]:
        """The pieces that only this depth needs: the window and the state."""
        first = max(0, depth - self.num_window_blocks)
        needed = [(number, Kind.WINDOW) for number in range(first, depth)]
        return needed + [(depth - 1, Kind.STATE)] * self.has_state


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup: ``depth`` blocks of the prompt; 0 if nothing was found.

    ``pieces``: those that the depth needs and the caller does not have. ``stop`` is the reason for
    not going deeper: "" if all blocks were found, "missing <kind> <number>" for the first piece
    that no tier has, "gated", "unwanted", "rejected <reason>", or "trouble <tier>". ``tiers`` has
    the name of the tier that each piece came from. ``handed``: pieces that were handed over before;
    ``pieces`` lacks them.
    """

    depth: int = 0
    pieces: Mapping[Piece, Block] = field(default_factory=dict)
    stop: str = ""
    tiers: Mapping[Piece, str] = field(default_factory=dict)
    handed: Set[Piece] = frozenset()

    @property
    def kv(self) -> tuple[Block, ...]:
        """The blocks of kind ``kv``, head first."""
        return self._of(Kind.KV)

    @property
    def window(self) -> tuple[Block, ...]:
        """The blocks of kind ``window``, head first."""
        return self._of(Kind.WINDOW)

    @property
    def state(self) -> Block | None:
        """The state at the end."""
        return next(iter(self._of(Kind.STATE)), None)

    def _of(self, kind: Kind) -> tuple[Block, ...]:
        return tuple(self.pieces[piece] for piece in sorted(self.pieces) if piece[1] is kind)


@dataclass(frozen=True, slots=True)
class _Location:
    tier: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A block that was loaded, with its bytes as stored in the tier of that number."""

    name: str
    tier: int
    data: Buffer


class Search:
    """One search. Call ``run`` once, then read ``hits``.

    ``hits`` has the blocks of tiers that have a faster one, which gets them. ``num_hits`` counts
    all by the number of their tier.
    """

    def __init__(
        self,
        wanted: Wanted,
        tiers: Sequence[GuardedTier],
        gate: Gate,
        sealer: Sealer,
        limits: Limits,
        counters: Counters,
        hand_over: HandOver | None = None,
    ) -> None:
        self.hits: list[Hit] = []
        self.num_hits: Counter[int] = Counter()
        self._hand_over = hand_over
        self._handed: set[Piece] = set()
        self._wanted = wanted
        self._tiers = tiers
        self._gate = gate
        self._sealer = sealer
        self._limits = limits
        self._counters = counters
        self._locations: dict[Piece, _Location] = {}
        self._blocks: dict[Piece, Block] = {}
        self._came_from: dict[Piece, str] = {}
        self._num_choices = 0
        self._most_bytes = FIRST_BYTES  # of the next batch
        self._is_unwanted = False
        self._trouble = ""  # the reason for not going deeper, unless it is a gap

    def run(self) -> Found:
        """Search the tiers. Faults of tiers and blocks raise nothing."""
        self._locate_chain()
        while not self._is_unwanted and (depth := self._choose()):
            needed = [p for p in self._wanted.needed_at(depth) if p not in self._wanted.had]
            if missing := [piece for piece in needed if piece not in self._came_from]:
                self._fetch(missing)
            else:
                blocks = {piece: self._blocks[piece] for piece in needed if piece in self._blocks}
                tiers = {piece: self._came_from[piece] for piece in needed}
                return Found(depth, blocks, self._stop(depth), tiers, self._handed)
        return Found(stop=self._stop(0), handed=self._handed)

    def _stop(self, depth: int) -> str:
        """The reason for not going deeper (``Found.stop``)."""
        if depth == len(self._wanted.keys):
            return ""
        if self._trouble:
            return self._trouble
        troubled = [tier.name for tier in self._tiers if not tier.breaker.is_closed]
        if troubled:
            return f"trouble {troubled[0]}"
        wanted = self._wanted.needed_at(depth + 1)
        number, kind = next((p for p in wanted if not self._is_here(p)), wanted[-1])
        return f"missing {kind} {number}"

    def _is_here(self, piece: Piece) -> bool:
        return piece in self._locations or piece in self._wanted.had

    def _locate_chain(self) -> None:
        kinds, num_keys = self._wanted.kinds(), len(self._wanted.keys)
        for start in range(0, num_keys, KEYS_AT_ONCE):
            numbers = range(start, min(start + KEYS_AT_ONCE, num_keys))
            pieces = [(number, kind) for number in numbers for kind in kinds]
            self._locate([piece for piece in pieces if piece not in self._wanted.had], 0)
            if self._wanted.has_kv and not all(self._is_here((n, Kind.KV)) for n in numbers):
                return

    def _locate(self, pieces: Sequence[Piece], first_tier: int) -> None:
        """Find the tiers, from ``first_tier`` on, that hold these pieces."""
        missing = {self._name(piece): piece for piece in pieces}
        for index, tier in enumerate(self._tiers[first_tier:], first_tier):
            for name, num_bytes in tier.contains_many(list(missing)).items():
                if num_bytes > self._limits.max_block_bytes:
                    self._reject(name, tier, Reason.LIMITS)
                elif name in missing:
                    self._locations[missing.pop(name)] = _Location(index, num_bytes)

    def _choose(self) -> int:
        """The depth to load; 0 for none."""
        options: list[Option] = []
        depths: list[int] = []
        kv_sizes: Counter[str] = Counter()
        num_tokens = 0
        for depth in range(1, len(self._wanted.keys) + 1):
            num_tokens += len(self._wanted.tokens[depth - 1]) // 4
            if self._wanted.has_kv:
                if not self._is_here((depth - 1, Kind.KV)):
                    break
                self._add_size(kv_sizes, (depth - 1, Kind.KV))
            rest = self._wanted.needed_at_end(depth)
            if all(self._is_here(piece) for piece in rest):
                sizes = kv_sizes.copy()
                for piece in rest:
                    self._add_size(sizes, piece)
                options.append(Option(num_tokens, sizes))
                depths.append(depth)
        if not options:
            return 0
        choice = self._gate.choose(options, is_first=self._num_choices == 0)
        self._num_choices += 1
        if choice != len(options) - 1:
            self._trouble = "gated"
        return 0 if choice is None else depths[choice]

    def _add_size(self, sizes: Counter[str], piece: Piece) -> None:
        if piece in self._locations and piece not in self._came_from:  # else it costs nothing
            place = self._locations[piece]
            sizes[self._tiers[place.tier].name] += place.num_bytes

    def _fetch(self, pieces: Sequence[Piece]) -> None:
        """Load and decode a batch from each tier; search failed pieces in the slower tiers."""
        lost: list[tuple[Piece, int]] = []
        for index in range(len(self._tiers)):
            batch = self._batch([piece for piece in pieces if self._locations[piece].tier == index])
            if not batch:
                continue
            self._load(batch, index)
            if self._is_unwanted:
                return
            lost += [(piece, index) for piece in batch if piece not in self._came_from]
        for piece, _ in lost:
            del self._locations[piece]
        for index in sorted({index for _, index in lost}):
            self._locate([piece for piece, at in lost if at == index], index + 1)

    def _load(self, batch: Sequence[Piece], index: int) -> None:
        """Load and decode pieces from a tier, and hand them over, one by one."""
        tier = self._tiers[index]
        by_name = {self._name(piece): piece for piece in batch}
        sizes = {name: self._locations[piece].num_bytes for name, piece in by_name.items()}
        seconds, num_bytes, start = 0.0, 0, time.perf_counter()
        with closing(tier.stream(sizes)) as arriving:
            for name, data in arriving:
                piece = by_name[name]
                is_good = self._accept(piece, data, index)
                num_bytes += len(data)
                # The time of a load includes the checks of its bytes, but not who takes them.
                seconds += time.perf_counter() - start
                if is_good and self._hand_over is not None and piece[1] is Kind.KV:
                    self._handed.add(piece)
                    if self._hand_over(piece, self._blocks.pop(piece), tier.name) is False:
                        self._is_unwanted, self._trouble = True, "unwanted"
                        break
                start = time.perf_counter()
        self._gate.observe_load(tier.name, num_bytes, seconds)

    def _batch(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The first of a tier's pieces, as many as one request loads."""
        if not pieces:
            return []
        tier = self._tiers[self._locations[pieces[0]].tier]
        if not self._gate.is_measured(tier.name):
            return list(pieces[:1])
        most = self._most_bytes
        self._most_bytes = min(2 * most, MAX_FETCH_BYTES)
        batch: list[Piece] = []
        num_bytes = 0
        for piece in pieces[:KEYS_AT_ONCE]:
            num_bytes += self._locations[piece].num_bytes
            if batch and num_bytes > most:
                break
            batch.append(piece)
        return batch

    def _accept(self, piece: Piece, data: Buffer, tier: int) -> bool:
        number, kind = piece
        wanted = self._wanted
        expected = Expected(wanted.namespace, wanted.keys[number], kind, wanted.tokens[number])
        try:
            self._blocks[piece] = decode(data, self._sealer, expected, self._limits)
        except BlockRejected as fault:
            self._reject(self._name(piece), self._tiers[tier], fault.reason)
            return False
        self.num_hits[tier] += 1
        if tier:
            self.hits.append(Hit(self._name(piece), tier, data))
        self._came_from[piece] = self._tiers[tier].name
        return True

    def _reject(self, name: str, tier: GuardedTier, reason: Reason) -> None:
        self._counters.add(f"rejected.{reason}")
        self._trouble = f"rejected {reason}"
        if reason.is_damage:
            tier.set_aside(name)

    def _name(self, piece: Piece) -> str:
        return block_name(self._wanted.keys[piece[0]], piece[1])

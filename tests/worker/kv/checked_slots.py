"""Decode slots with what each row should hold, which is compared after every move."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.state import StateSlots
from batchkv_worker.kv.slots.changes import Demand, Move
from batchkv_worker.kv.slots.step_view import Shapes, StepView
from batchkv_worker.kv.types import Pieces
from worker.kv.reference import (
    BACKEND,
    VOCABULARY,
    Reference,
    bits,
    check_content,
    check_dense,
    keys_of,
    plain,
    prefilled,
    run_layers,
    values_of,
)

Bits = list[bytes]


class CheckedSlots:
    """Rows come, go and decode here; ``check`` compares everything with plain Python."""

    def __init__(
        self, kinds: Sequence[LayerKind], slots: int = 4, shapes: Shapes | None = None
    ) -> None:
        self.kinds = kinds
        tree = CacheTree((), tuple(range(len(kinds))))
        self.slots = DecodeSlots(BACKEND, kinds, tree, slots, shapes or Shapes(group_cost=1))
        self.rows: dict[int, Reference] = {}  # by slot
        self.known: dict[int, list[dict[int, Bits]]] = {}  # by slot, layer and token: its bits
        self.rng = random.Random(1)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, VOCABULARY) for _ in range(count))

    # -- what happens to rows

    def join(self, *lengths: int, widths: Sequence[int] = (), remaining: int = 30) -> list[int]:
        """New rows, prefilled together; the slots that they are in at the end."""
        prompts = [self.tokens(length) for length in lengths]
        group = prefilled(self.kinds, prompts, widths) if any(lengths) else None
        joined = []
        for index, prompt in enumerate(prompts):
            pieces = group.row(index, len(prompt)) if group and prompt else None
            joined.append(self.admit(Reference(prompt), pieces, remaining))
        return joined

    def admit(self, row: Reference, pieces: Sequence[Pieces] | None, remaining: int = 30) -> int:
        slot, move = self.slots.admit(Demand(len(row.tokens), remaining), pieces)
        self._follow(move)
        assert slot not in self.rows
        self.rows[slot] = row
        self.known[slot] = [{} for _ in self.kinds]
        if pieces is not None:
            first = self.slots.snapshot(slot)
            for kind, given, found in zip(self.kinds, pieces, first, strict=True):
                if not isinstance(kind, AttentionKind) or kind.dtype == mx.float32:
                    assert bits(given) == bits(found)
        return slot

    def leave(self, slot: int) -> None:
        self.slots.release(slot)
        del self.rows[slot], self.known[slot]

    def close_gaps(self, most: int = 0) -> list[Move]:
        moves = self.slots.close_gaps(most)
        for move in moves:
            self._follow(move)
        return moves

    def _follow(self, move: Move | None) -> None:
        if move is not None:
            self.rows[move.target] = self.rows.pop(move.source)
            self.known[move.target] = self.known.pop(move.source)

    def step(self) -> None:
        """One token a row; free slots take some token too."""
        view = self.slots.begin_step()
        fed = [self.tokens(1)[0] for _ in range(view.num_rows)]
        run_layers(self.slots.layers, [[token] for token in fed])
        self.rows = {slot: Reference((*row.tokens, fed[slot])) for slot, row in self.rows.items()}
        assert [view.offsets[slot].item() for slot in self.rows] == [
            len(row.tokens) - 1 for row in self.rows.values()
        ]
        for layer, kind in zip(self.slots.layers, self.kinds, strict=True):
            if isinstance(layer, AttentionSlots):
                assert isinstance(kind, AttentionKind)
                self._check_seen(layer, kind, view)
        self.slots.end_step()
        mx.eval(self.slots.arrays)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    # -- what must hold

    def _check_seen(self, layer: AttentionSlots, kind: AttentionKind, view: StepView) -> None:
        """Of the columns handed out, the mask leaves each row its own last tokens in order."""
        mask = layer.make_mask(1)
        keys, values = layer.keys_and_values()
        span = view.spans[kind.window]
        columns = keys.shape[-2]
        wanted = np.ones((view.num_rows, columns), bool)
        if mask is not None:
            wanted = np.array(mask).reshape(view.num_rows, columns)
        for group in span.groups:
            part = wanted[group.first : group.last, group.low - span.low :]
            assert not wanted[group.first : group.last, : group.low - span.low].any()
            own = None if group.mask is None else np.array(group.mask).reshape(part.shape)
            assert part.all() if own is None else np.array_equal(own, part)
        for slot, row in self.rows.items():
            tokens = row.tokens if kind.window is None else row.tokens[-kind.window :]
            seen = mx.array(np.flatnonzero(wanted[slot]))
            check_dense(kind, keys[slot : slot + 1][..., seen, :], keys_of([tokens]))
            check_dense(kind, values[slot : slot + 1][..., seen, :], values_of([tokens]))

    def check(self) -> None:
        """Books, sizes, bytes, contents; and no token's bits have changed since it came."""
        self.slots.check()
        assert self.slots.layouts.main.slots == set(self.rows)
        assert self.slots.nbytes == sum(array.nbytes for array in self.slots.arrays)
        self._check_bytes()
        for slot, row in self.rows.items():
            assert self.slots.size(slot) == len(row.tokens)
            pieces = self.slots.snapshot(slot)
            for index, kind in enumerate(self.kinds):
                check_content(kind, pieces[index], row)
                if isinstance(kind, AttentionKind):
                    self._check_bits(slot, index, pieces[index], len(row.tokens))

    def _check_bits(self, slot: int, layer: int, pieces: Pieces, length: int) -> None:
        known = self.known[slot][layer]
        count = pieces[0].shape[-2]
        hosts = [np.array(plain(piece)) for piece in pieces]
        now = {
            length - count + column: [host[..., column, :].tobytes() for host in hosts]
            for column in range(count)
        }
        changed = [token for token in now if known.get(token, now[token]) != now[token]]
        assert not changed, changed
        self.known[slot][layer] = now

    def _check_bytes(self) -> None:
        """What admission reckons a token or a row takes is what the buffers take."""
        for layer, kind in zip(self.slots.layers, self.kinds, strict=True):
            layout = self.slots.layouts.all[kind.window]
            if isinstance(layer, StateSlots):
                assert layer.nbytes == layer.arrays[0].shape[0] * kind.bytes_per_row
            else:
                assert layer.nbytes == layout.rows * layout.capacity * kind.bytes_per_token

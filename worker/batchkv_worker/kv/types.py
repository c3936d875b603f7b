"""Types for the arrays of one row or layer, for all rooms of the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler, which reads these names, knows no tensors
    import mlx.core as mx

# One packed tensor: all arrays have their time axis at -2.
Parts = tuple["mx.array", ...]
# Packed keys and packed values of some tokens.
PackedKV = tuple[Parts, Parts]
# One row's share of a layer, each ``[1, ...]``, or that of several rows of one length, ``[rows,
# ...]``: packed parts of keys, then of values, with the time axis at -2; or the arrays of a state.
Pieces = tuple["mx.array", ...]
# How many of the last tokens a layer keeps; None: all of them.
Window = int | None

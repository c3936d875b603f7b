"""Words for a row's arrays, which all rooms of the KV cache share."""

from __future__ import annotations

import mlx.core as mx

# What a scheme makes of one tensor, keys or values: arrays with the time axis at -2.
Parts = tuple[mx.array, ...]
Both = tuple[Parts, Parts]  # parts of keys, parts of values
# One row's share of a layer, each ``[1, ...]``, or that of several rows of one length, ``[rows,
# ...]``: packed parts of keys, then of values, with the time axis at -2; or the arrays of a state.
Pieces = tuple[mx.array, ...]

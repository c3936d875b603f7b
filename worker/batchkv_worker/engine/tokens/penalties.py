"""Repetition, presence and frequency penalties for all rows at once, as vLLM counts them.

The repetition penalty counts the prompt and the answer; the other two count the answer alone. When
a step is built, the newest token of a row may be on the device only. So the host keeps the distinct
tokens of each row and their counts, up to the newest token that was read. It adds one token a step.
The token in flight is counted on the device.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from batchkv_worker.sequence import Sequence

WIDTH_STEP = 256  # widths are rounded up to this: a GPU prepares for each shape


class TokenCounts:
    """A row's distinct tokens that a penalty concerns, and how often each was generated.

    ``entries`` is int32 ``[2, capacity]``: tokens, and below them their counts. The first ``size``
    columns are in use. A token of the prompt that was not generated has the count 0.
    """

    __slots__ = ("_num_counted", "_places", "entries", "size")

    def __init__(self, prompt: list[int]) -> None:
        found = np.unique(np.array(prompt, np.int32))
        self.size = len(found)
        self.entries = np.zeros((2, self.size + WIDTH_STEP), np.int32)
        self.entries[0, : self.size] = found
        self._places = {token: place for place, token in enumerate(found.tolist())}
        self._num_counted = 0

    @classmethod
    def of(cls, row: Sequence) -> TokenCounts:
        """The counts of a row, after all tokens that were read. They are stored in the row."""
        known = row.token_counts
        if known is None:
            is_repetition = row.generation.repetition_penalty != 1
            known = row.token_counts = cls(row.prompt if is_repetition else [])
        assert isinstance(known, cls)
        known._count(row.generated)
        return known

    def _count(self, generated: list[int]) -> None:
        """Count the tokens that were read since the last call."""
        for token in generated[self._num_counted :]:
            place = self._places.setdefault(token, self.size)
            if place == self.size:
                if place == self.entries.shape[1]:
                    self.entries = np.pad(self.entries, ((0, 0), (0, place)))
                self.entries[0, place] = token
                self.size += 1
            self.entries[1, place] += 1
        self._num_counted = len(generated)


def penalize(logits: mx.array, inputs: mx.array, rows: list[Sequence | None]) -> mx.array:
    """Penalized ``logits`` ``[rows, vocabulary]``, float32; rows without penalties do not change.

    ``inputs`` ``[rows]`` are the tokens just fed. First the repetition penalty multiplies or
    divides, then the others subtract.
    """
    known = [
        TokenCounts.of(row) if row is not None and row.generation.is_penalized else None
        for row in rows
    ]
    is_counted = any(row is not None and row.generation.is_counted for row in rows)
    entries = mx.array(_padded(known, 2 if is_counted else 1))
    inputs = inputs.reshape(-1, 1).astype(mx.int32)
    # A token that is here twice gets the same value both times.
    tokens = mx.concatenate([entries[0], inputs], axis=1)
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, tokens, axis=-1)
    repetition = _column([1.0 if r is None else r.generation.repetition_penalty for r in rows])
    chosen = mx.where(chosen < 0, chosen * repetition, chosen / repetition)
    if is_counted:
        counts = _with_input(entries[0], entries[1], inputs, rows)
        frequency = _column([0.0 if r is None else r.generation.frequency_penalty for r in rows])
        presence = _column([0.0 if r is None else r.generation.presence_penalty for r in rows])
        chosen = chosen - frequency * counts - presence * (counts > 0)
    return mx.put_along_axis(logits, tokens, chosen, axis=-1)


def _with_input(
    tokens: mx.array, counts: mx.array, inputs: mx.array, rows: list[Sequence | None]
) -> mx.array:
    """Counts ``[rows, width + 1]`` with the token just fed, which is last; rows may not know it."""
    is_unread = mx.array(
        [[0 if row is None else row.num_dispatched - len(row.generated)] for row in rows]
    )
    is_input = tokens == inputs
    counts = counts + is_input * is_unread
    of_input = mx.where(is_input, counts, is_unread).max(axis=-1, keepdims=True)
    return mx.concatenate([counts, of_input], axis=1)


def _padded(known: list[TokenCounts | None], num_fields: int) -> np.ndarray:
    """Tokens and, as a second field, their counts: ``[fields, rows, width]``.

    A short row repeats its first entry.
    """
    width = max((one.size for one in known if one is not None), default=0)
    width = -(-max(width, 1) // WIDTH_STEP) * WIDTH_STEP
    block = np.zeros((num_fields, len(known), width), np.int32)
    for index, one in enumerate(known):
        if one is not None and one.size:
            block[:, index, : one.size] = one.entries[:num_fields, : one.size]
            block[:, index, one.size :] = one.entries[:num_fields, :1]
    return block


def _column(values: list[float]) -> mx.array:
    return mx.array(values, mx.float32).reshape(-1, 1)

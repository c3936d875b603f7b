"""What is added to the logits of rows: ``logit_bias``, ``bad_words``, and ``min_tokens``.

A token that must not come gets a large negative number, not minus infinity. So it comes only when
nothing else may: a grammar allows no other token, or every token is barred.

A bad word of several tokens bars its last token after the others were generated. The newest token
may be on the device only, so the host compares all but the newest, and the device that one.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from batchkv_worker.sequence import Sequence

BARRED = -1e20  # far below any logit, and far from the end of float32 over any temperature
WIDTH_STEP = 16  # widths are rounded up to this: a GPU prepares for each shape
_ALWAYS = -1  # in place of a token that must have come just before
_TOKEN, _BEFORE, _AMOUNT = range(3)  # fields of an entry


class RowBiases:
    """What is added to a row's logits.

    Entries are int32 ``[3, entries]``: token, token before, and the bits of the amount. First come
    those before ``min_tokens``, then those of every step, then those of bad words of two tokens,
    which depend on the token before. Longer bad words are found by the third of their tokens from
    the end. ``looks_back``: whether any entry depends on the token before.
    """

    __slots__ = ("_entries", "_longer", "_num_early", "_num_plain", "looks_back")

    def __init__(self, row: Sequence) -> None:
        asked = row.generation
        early = [(token, _ALWAYS, BARRED) for token in sorted(asked.late_tokens)]
        plain = [(token, _ALWAYS, amount) for token, amount in asked.logit_bias]
        plain += [(word[0], _ALWAYS, BARRED) for word in asked.bad_words if len(word) == 1]
        pairs = [(word[1], word[0], BARRED) for word in asked.bad_words if len(word) == 2]
        self._entries = _packed([*early, *plain, *pairs])
        self._num_early, self._num_plain = len(early), len(early) + len(plain)
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in asked.bad_words:
            if len(word) > 2:
                self._longer.setdefault(word[-3], []).append(word)
        self.looks_back = bool(pairs or self._longer)

    @classmethod
    def of(cls, row: Sequence) -> RowBiases:
        """The biases of a row, which are stored in it."""
        known = row.biases
        if known is None:
            known = row.biases = cls(row)
        assert isinstance(known, cls)
        return known

    def entries(self, row: Sequence) -> np.ndarray:
        """Those for the row's next token."""
        first = 0 if row.num_dispatched < row.generation.min_tokens else self._num_early
        if not row.num_dispatched:  # a bad word is looked for in the answer, not in the prompt
            return self._entries[:, first : self._num_plain]
        found = self._entries[:, first:]
        words = self._begun(row) if self._longer else []
        if not words:
            return found
        more = _packed([(word[-1], word[-2], BARRED) for word in words])
        return np.concatenate([found, more], axis=1)

    def _begun(self, row: Sequence) -> list[tuple[int, ...]]:
        """Longer bad words whose beginning was generated just before the token being fed."""
        num_known = row.num_dispatched - 1
        if num_known < 1:
            return []
        generated = row.generated
        return [
            word
            for word in self._longer.get(generated[num_known - 1], ())
            if tuple(generated[max(0, num_known - len(word) + 2) : num_known]) == word[:-2]
        ]


def is_biased(row: Sequence) -> bool:
    """Whether anything is added to the logits of the row's next token."""
    asked = row.generation
    if asked.logit_bias or asked.bad_words:
        return True
    return row.num_dispatched < asked.min_tokens and bool(asked.late_tokens)


def add_biases(logits: mx.array, inputs: mx.array, rows: list[Sequence | None]) -> mx.array:
    """``logits`` ``[rows, vocabulary]`` with what rows add, float32; other rows do not change.

    ``inputs`` ``[rows]`` are the tokens just fed.
    """
    found: list[tuple[int, np.ndarray]] = []
    looks_back, width = False, 1
    for index, row in enumerate(rows):
        if row is not None and is_biased(row):
            known = RowBiases.of(row)
            found.append((index, known.entries(row)))
            looks_back = looks_back or known.looks_back
            width = max(width, found[-1][1].shape[1])
    block = np.zeros((3, len(rows), -(-width // WIDTH_STEP) * WIDTH_STEP), np.int32)
    block[_BEFORE] = _ALWAYS
    for index, entries in found:
        block[:, index, : entries.shape[1]] = entries
    tokens, added = mx.array(block[_TOKEN]), mx.array(block[_AMOUNT].view(np.float32))
    if looks_back:
        before = mx.array(block[_BEFORE])
        comes = (before == _ALWAYS) | (before == inputs.reshape(-1, 1).astype(mx.int32))
        added = mx.where(comes, added, 0.0)
    places = mx.arange(len(rows)).reshape(-1, 1)
    return logits.astype(mx.float32).at[places, tokens].add(added)


def _packed(entries: list[tuple[int, int, float]]) -> np.ndarray:
    block = np.zeros((3, len(entries)), np.int32)
    if entries:
        tokens, before, amounts = zip(*entries, strict=True)
        block[_TOKEN], block[_BEFORE] = tokens, before
        block[_AMOUNT] = np.array(amounts, np.float32).view(np.int32)
    return block

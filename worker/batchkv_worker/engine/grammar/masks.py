"""The bit masks of a step's rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchkv_worker.engine.grammar.guide import GrammarGuide
from batchkv_worker.engine.grammar.limits import MAX_THREADS
from batchkv_worker.engine.tokens.guide import GuideFault, new_masks
from batchkv_worker.sequence import Sequence

Faults = list[tuple[Sequence, GuideFault]]


class Masks:
    """Fills masks: those of grammars at the same time, on several threads."""

    def __init__(self) -> None:
        self._executor: Any = None

    def fill(
        self, rows: Items[Sequence | None], num_tokens: int
    ) -> tuple[NDArray[np.uint32], Faults]:
        """Masks ``[rows, words]``, and the rows whose guides cannot go on, with the reasons.

        None, ended rows and rows without a guide may have every token.
        """
        masks = new_masks(len(rows), num_tokens)
        faults: Faults = []
        together: list[tuple[int, Sequence, GrammarGuide]] = []
        for index, row in _guided(rows):
            guide = row.guide
            if isinstance(guide, GrammarGuide) and guide.matcher is not None:
                together.append((index, row, guide))
                continue
            assert guide is not None
            try:
                guide.fill(masks[index])
            except GuideFault as fault:
                faults.append((row, fault))
        if together:
            self._fill_together(masks, together)
        for index, row, guide in together:
            if not guide.matcher.is_error():
                continue
            masks[index] = np.uint32(0xFFFFFFFF)
            try:
                guide.fill(masks[index])
            except GuideFault as fault:
                faults.append((row, fault))
        return masks, faults

    def _fill_together(
        self, masks: NDArray[np.uint32], together: list[tuple[int, Sequence, GrammarGuide]]
    ) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            count = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
            self._executor = LLExecutor(num_threads=count)
        found = [(guide.matcher, index) for index, _, guide in together]
        num_rows, num_words = masks.shape
        address = masks.ctypes.data
        self._executor.unsafe_compute_mask_ptr(found, address, 4 * num_words, num_rows)


def _guided(rows: Items[Sequence | None]) -> Iterator[tuple[int, Sequence]]:
    for index, row in enumerate(rows):
        if row is not None and row.guide is not None and not row.is_ended:
            yield index, row

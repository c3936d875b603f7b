"""The bit masks of a step's rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchkv_worker.engine.grammar.guide import GrammarGuide
from batchkv_worker.engine.grammar.limits import MAX_THREADS
from batchkv_worker.engine.tokens.guide import GuideFault, new_masks
from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.engine")

SLOW_SECONDS = 0.002  # of the masks of one step

Faults = list[tuple[Sequence, GuideFault]]


class Masks:
    """Fills masks, one after the other.

    After a step whose masks took long, those of grammars are filled on several threads. That costs
    more than most masks do, and a grammar that is new to its rows takes a hundred times as long.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        cores = os.cpu_count() or 1
        self._num_threads = min(MAX_THREADS, cores // 2) if num_threads is None else num_threads
        self._executor: Any = None
        self._is_slow = False  # the last step's masks took long

    def fill(
        self, rows: Items[Sequence | None], num_tokens: int
    ) -> tuple[NDArray[np.uint32], Faults]:
        """Masks ``[rows, words]``, and the rows whose guides cannot go on, with the reasons.

        None, ended rows and rows without a guide may have every token.
        """
        began = time.perf_counter()
        masks = new_masks(len(rows), num_tokens)
        guided = {index: row for index, row in enumerate(rows) if _is_guided(row)}
        filled = self._fill_together(masks, guided) if self._is_slow else set[int]()
        address, num_bytes = masks.ctypes.data, masks.strides[0]
        faults: Faults = []
        for index in guided.keys() - filled:
            row = guided[index]
            assert row is not None and row.guide is not None
            guide = row.guide
            try:
                if isinstance(guide, GrammarGuide) and guide.matcher is not None:
                    guide.write(address + index * num_bytes, num_bytes)
                else:
                    guide.fill(masks[index])
            except GuideFault as fault:
                faults.append((row, fault))
            except Exception as fault:
                log.exception("row %s: its guide failed", row.job_id)
                faults.append((row, GuideFault(f"its guide failed: {type(fault).__name__}")))
        self._is_slow = time.perf_counter() - began > SLOW_SECONDS
        return masks, faults

    def _fill_together(
        self, masks: NDArray[np.uint32], guided: Mapping[int, Sequence | None]
    ) -> set[int]:
        """Fill masks of grammars on several threads. Returns those that are filled."""
        found = {
            index: row.guide.matcher
            for index, row in guided.items()
            if row is not None and isinstance(row.guide, GrammarGuide) and row.guide.matcher
        }
        if len(found) < 2 or self._num_threads < 2:
            return set()
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        num_rows, num_words = masks.shape
        pairs = [(matcher, index) for index, matcher in found.items()]
        address = masks.ctypes.data
        self._executor.unsafe_compute_mask_ptr(pairs, address, 4 * num_words, num_rows)
        failed = {index for index, matcher in found.items() if matcher.is_error()}
        for index in failed:  # to be filled again, by their guides
            masks[index] = np.uint32(0xFFFFFFFF)
        return found.keys() - failed


def _is_guided(row: Sequence | None) -> bool:
    return row is not None and row.guide is not None and not row.is_ended

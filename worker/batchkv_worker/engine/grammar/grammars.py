"""The grammars of one engine's rows: a row waits in admission until its own is compiled.

Rows with the same constraint share one compiled grammar. The last ``MAX_KEPT`` of them are kept,
and those that were refused, too.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence as Items
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_worker.engine.grammar.available import why_not
from batchkv_worker.engine.grammar.compiling import Compiled, Compiler, Outcome
from batchkv_worker.engine.grammar.guide import GrammarGuide
from batchkv_worker.engine.grammar.limits import MAX_KEPT
from batchkv_worker.engine.grammar.masks import Faults, Masks
from batchkv_worker.engine.grammar.text import GrammarFault, TrialFault
from batchkv_worker.engine.grammar.tokens import TokenTable, token_table
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence


class Grammars:
    """Called on the engine's thread alone. Nothing is started before a row needs it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._masks = Masks()
        self._table: TokenTable | None = None
        self._compiler: Compiler | None = None
        self._done: SimpleQueue[tuple[str, Outcome]] = SimpleQueue()
        self._arrived: list[tuple[str, Outcome]] = []
        self._kept: OrderedDict[str, Outcome] = OrderedDict()
        self._waiting: dict[str, list[Sequence]] = {}  # by the key of their grammar
        self._unready: set[str] = set()  # ids of those rows

    def begin(self, row: Sequence, constraint: Constraint | None) -> None:
        """A row came in. Raises RowRefused if it is known that its grammar is refused."""
        if constraint is None:
            return
        key = _key(constraint)
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            _give(row, known)
            return
        compiler = self._compiler or self._start()
        if key not in self._waiting:
            self._waiting[key] = []
            compiler.ask(key, constraint)
        self._waiting[key].append(row)
        self._unready.add(row.job_id)

    def is_ready(self, row: Sequence) -> bool:
        """Whether the row does not wait for its grammar."""
        return row.job_id not in self._unready

    def advance(self) -> list[tuple[Sequence, RowRefused]]:
        """Give compiled grammars to their rows. Returns the rows whose grammar is refused."""
        if not self._waiting:
            return []
        self._read()
        if not self._arrived and self._compiler is not None and self._compiler.has_ended:
            fault = TrialFault("the thread that compiles has ended")  # the next row starts another
            self._arrived += [(key, fault) for key in self._waiting]
            self.close()
        refused: list[tuple[Sequence, RowRefused]] = []
        arrived, self._arrived = self._arrived, []
        for key, outcome in arrived:
            if not isinstance(outcome, TrialFault):
                self._kept[key] = outcome
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            for row in self._waiting.pop(key):
                self._unready.discard(row.job_id)
                if row.is_ended:
                    continue
                try:
                    _give(row, outcome)
                except RowRefused as refusal:
                    refused.append((row, refusal))
        return refused

    def wait(self, seconds: float) -> None:
        """Wait for a grammar, if a row does: the engine has nothing else to do."""
        if self._waiting and not self._arrived:
            try:
                self._arrived.append(self._done.get(timeout=seconds))
            except Empty:
                return

    def masks(
        self, rows: Items[Sequence | None], vocabulary: int
    ) -> tuple[NDArray[np.uint32], Faults]:
        """What the guides of a step's rows allow (``Masks.fill``)."""
        num_tokens = max(vocabulary, self._table.num_tokens if self._table else 0)
        return self._masks.fill(rows, num_tokens)

    def close(self) -> None:
        """End the thread and its process."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    def _start(self) -> Compiler:
        if missing := why_not():
            raise _refusal(f"this worker cannot follow a grammar: {missing}")
        try:
            self._table = token_table(self._loaded)
        except GrammarFault as fault:
            raise _refusal(str(fault)) from fault
        self._compiler = Compiler(self._table, lambda key, found: self._done.put((key, found)))
        return self._compiler

    def _read(self) -> None:
        try:
            while True:
                self._arrived.append(self._done.get_nowait())
        except Empty:
            return


_NO_FORM = "the form of the answer (schema, regex or grammar) cannot be enforced: "


def _give(row: Sequence, outcome: Outcome) -> None:
    """Raises RowRefused for a refused grammar."""
    if not isinstance(outcome, Compiled):
        is_of_row = not isinstance(outcome, TrialFault)
        code = ErrorCode.INVALID_REQUEST if is_of_row else ErrorCode.ENGINE_ERROR
        raise RowRefused(code, f"{_NO_FORM}{outcome}")
    grammar = GrammarGuide(outcome)
    row.guide = grammar if row.guide is None else row.guide.and_then(grammar)


def _refusal(message: str) -> RowRefused:
    return RowRefused(ErrorCode.INVALID_REQUEST, message)


def _key(constraint: Constraint) -> str:
    """A digest of the constraint. The order of a schema's keys is part of it."""
    text = json.dumps([constraint.kind, constraint.value])
    return hashlib.sha256(text.encode("ascii")).hexdigest()

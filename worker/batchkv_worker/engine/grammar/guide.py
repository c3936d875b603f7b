"""The guide of one row: which tokens its grammar allows next. It can be composed with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchkv_worker.engine.grammar.compiling import Compiled
from batchkv_worker.engine.grammar.text import GrammarFault, reason
from batchkv_worker.engine.tokens.guide import AllOf, Guide, GuideFault, Mask, allow_only

ORDINARY = (GuideFault, KeyboardInterrupt, SystemExit, GeneratorExit)
RENEW_AFTER = 100  # rows of a grammar, after which one that cannot go on has it compiled again


class GrammarGuide:
    """Follows one grammar. An end token is allowed exactly where the grammar may end."""

    def __init__(self, grammar: Compiled) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._taken: list[int] = []
        self._has_ended = False  # an end token was taken

    @property
    def is_over(self) -> bool:
        return self._has_ended or bool(self._matcher.is_stopped())

    @property
    def matcher(self) -> Any:
        """What fills this guide's mask by itself, with others at the same time; None: ``fill``."""
        return None if self._has_ended else self._matcher

    def fill(self, allowed: Mask) -> None:
        if self._has_ended:
            allow_only(allowed, self._grammar.ends)
            return
        own = np.empty(allowed.size, np.uint32)
        self.write(own.ctypes.data, own.nbytes)
        allowed &= own

    def write(self, address: int, num_bytes: int) -> None:
        """Write the mask of a grammar that has not ended to this place, whatever was there."""
        try:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if self._matcher.is_error():
                self.recover()
                self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
                self.check()
        except ORDINARY:
            raise
        except BaseException as panic:  # of native code
            raise GuideFault(f"its grammar failed: {reason(str(panic))}") from panic

    def take(self, token: int) -> None:
        self._taken.append(token)
        if token in self._grammar.ends:
            self._has_ended = True
        if self._has_ended:
            return
        try:
            if not self._matcher.consume_token(token):
                self.recover()
        except ORDINARY:
            raise
        except BaseException as panic:  # of native code
            raise GuideFault(f"its grammar failed: {reason(str(panic))}") from panic

    def restart(self, tokens: Sequence[int]) -> None:
        self._matcher = self._grammar.matcher()
        self._taken, self._has_ended = [], False
        for token in tokens:
            self.take(token)

    def fresh(self) -> Guide:
        return GrammarGuide(self._grammar)

    def and_then(self, grammar: Guide) -> Guide:
        return AllOf([self, grammar])

    def check(self) -> None:
        """Raise GuideFault if the matcher cannot go on."""
        if self._matcher.is_error():
            words = reason(self._matcher.get_error())
            raise GuideFault(f"its grammar cannot go on after {len(self._taken)} tokens: {words}")

    def recover(self) -> None:
        """Take all tokens again with a grammar that has learned nothing yet; raises GuideFault.

        The matchers of a grammar share the states that they learn, up to a limit. So a row may
        reach it through no fault of its own, after many others.
        """
        if self._grammar.num_used < RENEW_AFTER:
            self.check()
        try:
            self._grammar.renew()
        except GrammarFault as fault:
            raise GuideFault(str(fault)) from fault
        self._matcher = self._grammar.matcher()
        self._matcher.consume_tokens(self._taken)
        self.check()

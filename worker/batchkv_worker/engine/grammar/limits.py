"""The limits of grammars. The size of one is in ``wire.constraint``."""

from __future__ import annotations

from typing import Any

COMPILE_SECONDS = 1.0  # of processor time, for one grammar
WAIT_SECONDS = 60.0  # for one grammar on a machine that is busy with other things
START_SECONDS = 120.0  # until the process that tries grammars has read the tokenizer
TRIAL_BYTES = 2**30  # that a trial may take more than the tokenizer
MAX_KEPT = 256  # compiled grammars, and refused ones
MAX_THREADS = 8  # that fill masks

# Of llguidance's parser. The others are its own. A mask mostly takes far less than a millisecond.
MAX_LEXER_STATES = 100_000  # 1 to 2 kB each; the copies of a grammar share them
# Of one mask or token. An ambiguous grammar may reach it, in 0.1 s. With llguidance's own limit of
# 50,000 a mask takes 3 s, and all other rows wait.
MAX_STEP_ITEMS = 10_000


def parser_limits() -> Any:
    """The limits as llguidance takes them; its errors then have no text of a row."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_STEP_ITEMS, verbose_errors=False
    )

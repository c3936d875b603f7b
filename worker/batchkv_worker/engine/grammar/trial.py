"""The process that tries grammars, with limits: ``python -m batchkv_worker.engine.grammar.trial``.

A schema of a few hundred bytes can keep the compiler busy for hours, and fill all memory. A thread
cannot be ended, so each grammar is compiled here first. Its end is the end of one bad grammar.

Each message is one line of JSON. The first is the tokenizer; the others are constraints. An answer
has the grammar in llguidance's language, or the reason why it is refused. When standard input ends,
the parent is gone, and this process ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.grammar.limits import COMPILE_SECONDS, TRIAL_BYTES, parser_limits
from batchkv_worker.engine.grammar.text import (
    GrammarFault,
    grammar_text,
    reason,
    spells_any,
    unforced,
)
from batchkv_worker.engine.grammar.tokens import TokenTable


def answer(constraint: Constraint, tokenizer: Any, markers: tuple[str, ...] = ()) -> dict[str, str]:
    """The grammar, or why it is refused. The timer ends this process when it takes too long.

    ``markers`` are the texts of special tokens.
    """
    from llguidance import LLMatcher

    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    try:
        text = grammar_text(constraint)
        if spells_any(constraint, markers):
            text = unforced(text)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        fault = matcher.get_error()
    except GrammarFault as refused:
        return {"refused": str(refused)}
    except (ValueError, RuntimeError) as raised:
        return {"refused": reason(str(raised))}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"refused": reason(fault)} if fault else {"grammar": text}


def limit_memory() -> None:
    """End this process rather than fill the machine, where the system can count its memory."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer all requests until they end."""

    def send(**values: str) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    first = json.loads(requests.readline() or "null")
    if first is None:
        return
    table = TokenTable(first["text"], first["num_tokens"], tuple(first["ends"]))
    tokenizer, markers = table.build(), table.markers()
    limit_memory()
    send(ready="yes")
    for line in requests:
        asked = json.loads(line)
        send(**answer(Constraint(asked["kind"], asked["value"]), tokenizer, markers))


def main() -> None:
    """Keep standard output for answers: what libraries print goes elsewhere."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with own:
        serve(sys.stdin, own)


if __name__ == "__main__":
    main()

"""Compiles grammars on a thread of their own, one after the other.

Each is first compiled in another process (``trial``), which is ended when it takes too long or too
much memory. The grammars that passed are compiled here with the GIL released.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.grammar.limits import (
    COMPILE_SECONDS,
    START_SECONDS,
    WAIT_SECONDS,
    parser_limits,
)
from batchkv_worker.engine.grammar.text import GrammarFault, TrialFault, reason
from batchkv_worker.engine.grammar.tokens import TokenTable

_TOO_MUCH = f"compiling it takes more than {COMPILE_SECONDS:g} s or too much memory"
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class Compiled:
    """A grammar that passed: a matcher for each row, all of which share what they learn.

    ``num_used``: how many matchers it gave.
    """

    text: str
    tokenizer: Any
    ends: tuple[int, ...]
    first: Any
    num_used: int = 0

    def matcher(self) -> Any:
        """A matcher at the grammar's beginning."""
        self.num_used += 1
        return self.first.deep_copy()

    def renew(self) -> None:
        """Compile it again: what its matchers have learned together has become too much."""
        self.first = compiled_matcher(self.text, self.tokenizer)
        self.num_used = 0


def compiled_matcher(text: str, tokenizer: Any) -> Any:
    """A matcher of a grammar that passed its trial; raises GrammarFault."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()  # learns the first token of all rows
    if matcher.is_error():
        raise GrammarFault(reason(matcher.get_error()))
    return matcher


Outcome = Compiled | GrammarFault


class Trial:
    """The other process. It is started when it is needed, and again after it was ended."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._process: subprocess.Popen[str] | None = None
        self._was_killed = False  # the last process that ended, by somebody else

    def text_of(self, constraint: Constraint) -> str:
        """The grammar in llguidance's language; raises GrammarFault when it is refused.

        A system that is short of memory may kill the process for the memory of others. So a grammar
        is tried again after one kill.
        """
        found = self._tried(constraint)
        if found is None and self._was_killed:
            found = self._tried(constraint)
        if found is None:
            raise GrammarFault(_TOO_MUCH)
        if "refused" in found:
            raise GrammarFault(found["refused"])
        return found["grammar"]

    def _tried(self, constraint: Constraint) -> dict[str, str] | None:
        if self._process is None:
            self._start()
        asked = {"kind": constraint.kind, "value": constraint.value}
        return self._exchange(asked, WAIT_SECONDS)

    def kill(self) -> None:
        """End what the process does, from any thread: whoever waits for it finds it ended."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close(stream)

    def _start(self) -> None:
        # -P: a file named json.py in the working directory must not be imported.
        command = [sys.executable, "-P", "-m", "batchkv_worker.engine.grammar.trial"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
                start_new_session=True,  # a Ctrl-C is for the worker
            )
        except OSError as fault:
            raise TrialFault(f"the process that tries it cannot be started: {fault}") from fault
        if self._exchange(asdict(self._table), START_SECONDS) is None:
            raise TrialFault("llguidance cannot read this model's tokenizer")

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, str] | None:
        """Send one message, and read its answer. None: the process has ended, or is ended."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        has_answer = True
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            has_answer = _has_answer(process.stdout, seconds)
            if has_answer and (line := process.stdout.readline()):
                found: dict[str, str] = json.loads(line)
                return found
        except (OSError, ValueError):  # it has ended; or it was ended meanwhile
            pass
        self._was_killed = has_answer and _is_killed(process)
        self.end()
        return None


def _has_answer(stream: Any, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _is_killed(process: subprocess.Popen[str]) -> bool:
    """Whether a process whose pipes have ended was killed. Its own limits end it otherwise."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(CLOSE_SECONDS) == -signal.SIGKILL
    return False


def _close(stream: Any) -> None:
    with suppress(OSError):  # what was not sent is lost with the process
        stream.close()


class Compiler:
    """The thread. ``ask`` returns at once; ``done`` is called on the thread with each outcome."""

    def __init__(self, table: TokenTable, done: Callable[[str, Outcome], None]) -> None:
        self._table = table
        self._done = done
        self._trial = Trial(table)
        self._tokenizer: Any = None
        self._asked: SimpleQueue[tuple[str, Constraint] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name="batchkv-grammars", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that nothing is compiled any more."""
        return not self._thread.is_alive()

    def ask(self, key: str, constraint: Constraint) -> None:
        """Compile a grammar after those asked for before."""
        self._asked.put((key, constraint))

    def close(self) -> None:
        """End the process and the thread; a grammar that is being compiled is waited for."""
        self._is_closed = True
        self._asked.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._trial.kill()  # again and again: the thread may have just started another
            self._thread.join(0.05)

    def _main(self) -> None:
        while (asked := self._asked.get()) is not None and not self._is_closed:
            key, constraint = asked
            self._done(key, self._outcome(constraint))
        self._trial.end()

    def _outcome(self, constraint: Constraint) -> Outcome:
        """The compiled grammar, or why there is none: any fault is one of this grammar alone."""
        try:
            text = self._trial.text_of(constraint)
            if self._tokenizer is None:
                self._tokenizer = self._table.build()
            first = compiled_matcher(text, self._tokenizer)
            return Compiled(text, self._tokenizer, self._table.ends, first)
        except GrammarFault as refused:
            return refused
        except BaseException as fault:  # noqa: BLE001 - a panic of native code is a BaseException
            return GrammarFault(f"{type(fault).__name__}: {reason(str(fault))}")

"""The entry point of the ``batchkv`` script. It runs before the slow imports."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command. A Ctrl-C so early that nothing has begun ends it without a word."""
    try:
        prepare_streams()
        from batchkv_producer.cli import main as begin
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    begin()


def prepare_streams() -> None:
    """Let output go somewhere, and let every text be written, whatever the streams are.

    Of a closed stream the number would go to the next file that is opened: what is printed would go
    into that file, and processes that are started would have another file in its place. A character
    that a terminal's encoding lacks is spelled as in JSON: ``\\u2026``.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null(number)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # another kind of stream, which a caller has set
            stream.reconfigure(errors="spelled")  # type: ignore[union-attr]


def _open_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def _spelled(fault: UnicodeError) -> tuple[str, int]:
    assert isinstance(fault, UnicodeEncodeError)
    units = fault.object[fault.start : fault.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)), fault.end

"""The entry point of the ``batchkv`` script. Slow imports come after it has begun."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command. A Ctrl-C during the imports ends it without a message."""
    if "SUDO_UID" in os.environ:  # root's compiled files in a user's checkout would stay there
        sys.dont_write_bytecode = True
    try:
        prepare_streams()
        from batchkv_producer.cli import main as begin
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    begin()


def prepare_streams() -> None:
    """Open closed standard streams, and let every text be written to them.

    The next opened file would get the number of a closed stream. Then printed text would go into
    that file, and new processes would inherit it as a standard stream. A character that a
    terminal's encoding lacks is written as in JSON: ``\\u2026``.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null(number)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # a caller has set another kind of stream
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

# ruff: noqa: T201  (a helper that talks to a terminal)
"""What the tools that write a page of docs/ from a table have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_or_check(
    arguments: list[str], tool: str, page: Path, text: Callable[[], str], usage: str
) -> int:
    """Write the page, or with ``--check`` compare it with what ``text`` returns.

    ``tool`` is the file of the tool, for the sentence that says how to mend the page. Returns the
    exit code: 1 if the page differs, 2 for other arguments, after ``usage`` is printed.
    """
    if arguments == ["--check"]:
        if page.read_text(encoding="utf-8") == text():
            return 0
        print(f"{page.name} differs from its table: run python tools/{Path(tool).name}")
        return 1
    if arguments:
        print(usage)
        return 2
    page.write_text(text(), encoding="utf-8")
    return 0

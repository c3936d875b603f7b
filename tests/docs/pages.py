"""The pages that people read, taken apart: prose, links, anchors, and blocks of code.

A comment on the line above a block says how the tests treat it:

    <!-- background -->            its last line runs until the page ends
    <!-- not run: the reason -->   its commands and flags must exist, nothing more
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
BEFORE_BLOCK = re.compile(r"<!-- (background|not run: .+) -->")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``expected`` is the text block that follows it, else empty."""

    page: Path
    line: int
    language: str
    text: str
    note: str = ""
    expected: str = ""

    @property
    def place(self) -> str:
        """Where it begins, as an editor opens it."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the tests run it here."""
        return not self.note.startswith("not run")


def all_pages() -> list[Path]:
    """Every page of the repository that a person is sent to."""
    named = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "deploy/README.md")
    return [*(REPOSITORY / name for name in named), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, each with what it is expected to print."""
    found: list[Block] = []
    lines = page.read_text("utf-8").splitlines()
    number = 0
    while number < len(lines):
        if not lines[number].startswith("```"):
            number += 1
            continue
        start, language = number, lines[number].removeprefix("```").strip()
        number = lines.index("```", start + 1)
        text = "\n".join(lines[start + 1 : number]) + "\n"
        number += 1
        if language == "text" and found:
            last = found.pop()
            found.append(Block(last.page, last.line, last.language, last.text, last.note, text))
            continue
        before = BEFORE_BLOCK.fullmatch(lines[start - 1]) if start else None
        found.append(Block(page, start + 2, language, text, before[1] if before else ""))
    return found


def prose(page: Path) -> str:
    """The page without its blocks, indented drawings and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    kept = [line for line in text.splitlines() if not line.startswith(("    ", "|", "<!--"))]
    return "\n".join(kept)


def sentences(page: Path) -> list[str]:
    """The sentences of the prose; a heading or an item of a list ends one, too."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=#)|\n(?=\s*(?:-|\d+\.) )", prose(page)):
        words = re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split()))
        found += re.split(r"(?<=[.!?:;])(?:\*\*)? (?=[A-Z`*\[])", words)
    return [sentence for sentence in found if sentence]


def inline_code(page: Path) -> list[str]:
    """What stands between backticks, in prose and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def links(page: Path) -> list[str]:
    """The targets of a page's links to other pages and files; not those on the web."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [found for found in LINK.findall(text) if "://" not in found]


def anchors(page: Path) -> set[str]:
    """The names by which a link reaches a heading, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}

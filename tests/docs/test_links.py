"""The pages hang together: links lead somewhere, each page is reached, and README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import README, REPOSITORY, all_pages, anchors, links, sentences

MAX_README_LINES = 120
MAX_LINE_CHARS = 120
MAX_ARCHITECTURE_LINES = 60


def target_of(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


LINKING = (*all_pages(), REPOSITORY / "CHANGELOG.md")


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link names a file of the repository, and a heading that is there."""
    for link in links(page):
        target, anchor = target_of(page, link)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_each_page_is_reached_from_the_readme() -> None:
    """Whoever follows links from README.md comes to every page."""
    seen, waiting = set[Path](), [README]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        waiting += [target_of(page, link)[0] for link in links(page) if ".md" in link]
    assert set(all_pages()) - seen - {REPOSITORY / "CONTRIBUTING.md"} == set()


def test_each_page_of_docs_names_the_next() -> None:
    """From the first page of docs/, the last line of each leads through all of them, once."""
    page, seen = REPOSITORY / "docs" / "cli.md", list[Path]()
    while page.is_relative_to(REPOSITORY / "docs"):
        assert page not in seen
        seen.append(page)
        last = page.read_text("utf-8").rstrip().splitlines()[-1]
        (link,) = re.findall(r"\]\(([^)]+)\)", last)
        page = target_of(page, link)[0]
    assert sorted(seen) == sorted((REPOSITORY / "docs").rglob("*.md"))


def test_the_readme_is_one_page() -> None:
    """README.md has at most 120 lines, and its longest sentence fits on one."""
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert max(map(len, lines)) <= MAX_LINE_CHARS
    long = [sentence for sentence in sentences(README) if len(sentence) > MAX_LINE_CHARS]
    assert long == []


def test_the_architecture_is_one_page() -> None:
    """ARCHITECTURE.md has at most 60 lines, and each folder that it names is there."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8")
    assert len(text.splitlines()) <= MAX_ARCHITECTURE_LINES
    rooms = re.findall(
        r"^\| (producer|worker|cache_store|gateway)((?:,? `[\w/]+`)*)", text, re.MULTILINE
    )
    assert len(rooms) > 10
    for package, names in rooms:
        for name in re.findall(r"`([\w/]+)`", names):
            assert (REPOSITORY / package / f"batchkv_{package}" / name).is_dir(), name


def test_the_architecture_names_each_room() -> None:
    """Each folder of the packages, or one above it, is a room of ARCHITECTURE.md."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+)`", text))
    for package in ("producer", "worker", "cache_store", "gateway"):
        top = REPOSITORY / package / f"batchkv_{package}"
        for module in top.rglob("*.py"):
            folders = module.relative_to(top).parts[:-1]
            paths = {"/".join(folders[:n]) for n in range(1, len(folders) + 1)}
            assert not paths or paths & named or module.name == "__init__.py", module


def test_sentences_of_the_docs_are_short() -> None:
    """No sentence of docs/ is longer than two lines."""
    for page in (REPOSITORY / "docs").rglob("*.md"):
        long = [found for found in sentences(page) if len(found) > 2 * MAX_LINE_CHARS]
        assert long == [], page

"""The table of known failures is whole, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
COUNTS = {"F": 13, "O": 9, "M": 6, "R": 6, "S": 11, "D": 5, "H": 10, "W": 8}
COUNTS |= {"B": 10, "T": 6, "C": 8, "G": 8, "Q": 4}
ROW = re.compile(r"\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|")
NAMED = re.compile(r"`([\w./]+\.py)::(test_\w+)`")


def _rows() -> list[tuple[str, str, str]]:
    lines = (HERE / "REGRESSIONS.md").read_text("utf-8").splitlines()
    found = [ROW.fullmatch(line) for line in lines]
    return [(row[1], row[2], row[3]) for row in found if row]


def test_every_number_stands_once() -> None:
    """Each number has one line, with a test or a reason."""
    expected = [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]
    assert [number for number, _, _ in _rows()] == expected
    for number, _, answer in _rows():
        assert NAMED.search(answer) or len(answer.split()) > 4, number


def test_every_test_named_exists() -> None:
    """A test that was renamed or deleted is missed here."""
    known: dict[Path, set[str]] = {}
    for number, _, answer in _rows():
        for file, name in NAMED.findall(answer):
            path = (HERE / file).resolve()
            if path not in known:
                tree = ast.parse(path.read_text("utf-8"))
                known[path] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in known[path], f"{number} names {file}::{name}"


def test_tests_carry_numbers_that_the_table_gives_them() -> None:
    """A docstring that begins with numbers is that of a test which the table names for one."""
    named = {name for _, _, answer in _rows() for _, name in NAMED.findall(answer)}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if re.match(r"[A-Z]\d+[,:]", ast.get_docstring(node) or ""):
                assert node.name in named, node.name

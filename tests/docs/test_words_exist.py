"""What pages name is there: commands and their flags, variables, sentences of errors."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from batchkv_producer.cli import cli
from batchkv_producer.settings_table import VARIABLES
from docs.pages import REPOSITORY, all_pages, blocks, inline_code

PACKAGES = ("producer", "cache_store", "worker", "gateway")
ENDS_OF_A_COMMAND = {"|", "||", "&&", ";", ";;", "&", ">", ">>", "<", "|&"}
MIN_CHARS_OF_A_SENTENCE = 10
# What users have, or a model: not of this repository.
MADE_FILE = re.compile(r"^(out|prompts|bad|mended|results|OUT|.*config)\.|\.(old|errors)\.")


def command_lines(text: str) -> Iterator[list[str]]:
    """The words behind each ``batchkv`` of a script, up to the end of that command."""
    for line in text.replace("\\\n", " ").replace("$(", " ; ").replace("`", " ").splitlines():
        lexer = shlex.shlex(line.replace(")", " ; "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a heredoc's text, or prose
            continue
        starts = [n for n, word in enumerate(words) if word.rpartition("/")[2] == "batchkv"]
        for start in starts:
            rest = words[start + 1 :]
            ends = (n for n, word in enumerate(rest) if word in ENDS_OF_A_COMMAND)
            yield rest[: next(ends, len(rest))]


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and its arguments; AssertionError if there is none."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    return command, words


def options_of(command: click.Command) -> set[str]:
    named = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return named | {"--help", "-h"} | ({"--version"} if command is cli else set())


@cache
def every_option() -> frozenset[str]:
    def walk(command: click.Command) -> Iterator[str]:
        yield from options_of(command)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found)

    return frozenset(walk(cli))


@cache
def sources() -> str:
    """The texts of all programs, the parts of f-strings that vary left out as ``...``."""
    found: list[str] = []
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    scripts = ("tools/bootstrap.sh", "producer/batchkv_producer/service/supervise.sh")
    found += [(REPOSITORY / script).read_text("utf-8") for script in scripts]
    return " ".join("\n".join(found).split())


@cache
def others() -> str:
    """The texts of scripts that have flags of their own."""
    scripts = [*(REPOSITORY / "deploy").rglob("*.sh")]
    scripts += (REPOSITORY / "tests" / "benchmarks").rglob("*.py")
    return "\n".join(path.read_text("utf-8") for path in scripts)


PAGES = pytest.mark.parametrize(
    "page", all_pages(), ids=lambda page: str(page.relative_to(REPOSITORY))
)


@PAGES
def test_commands_and_flags_exist(page: Path) -> None:
    """Each ``batchkv`` command of a page, in blocks or between backticks, is one; so are flags."""
    scripts = [block.text for block in blocks(page) if block.language == "sh"]
    inline = [text for text in inline_code(page) if text.startswith("batchkv ")]
    for text in [*scripts, *inline]:
        for words in command_lines(text):
            command, rest = resolve(words)
            for word in rest:
                if word.startswith("-") and word != "-":
                    assert word.partition("=")[0] in options_of(command), (words, word)


@PAGES
def test_flags_that_stand_alone_exist(page: Path) -> None:
    """A flag between backticks belongs to some command, a script of deploy/ or a benchmark."""
    for text in inline_code(page):
        if text.startswith("--"):
            flag = re.split(r"[ =]", text)[0]
            assert flag in every_option() or flag in others(), text


@PAGES
def test_variables_exist(page: Path) -> None:
    """Each BATCHKV_ variable that a page names is read or set somewhere."""
    names = set(re.findall(r"\bBATCHKV_[A-Z_]+[A-Z]", page.read_text("utf-8")))
    assert {name for name in names - set(VARIABLES) if name not in sources()} == set()


@PAGES
def test_files_exist(page: Path) -> None:
    """A file of the sources that a page names is in the repository, by the end of its path."""
    for text in inline_code(page):
        if re.fullmatch(r"[\w/.-]+\.(py|lua|sh|acl|conf|jsonl?)", text) and not MADE_FILE.search(
            text
        ):
            found = any(REPOSITORY.glob(f"[a-z]*/**/{text}"))
            assert found or (REPOSITORY / text).exists(), text


def test_the_page_of_commands_has_all() -> None:
    """docs/cli.md has a row for each command that ``batchkv --help`` lists."""
    page = REPOSITORY / "docs" / "cli.md"
    rows = re.findall(r"^\| `([a-z-]+)[ `]", page.read_text("utf-8"), re.MULTILINE)
    assert set(cli.list_commands(click.Context(cli))) <= set(rows)


def test_errors_of_the_troubleshooting_page_are_said() -> None:
    """Each sentence of docs/troubleshooting.md is one of a program, its variable parts aside."""
    page = REPOSITORY / "docs" / "troubleshooting.md"
    rows = re.findall(r"^\| (`.*?) \| ", page.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 50
    found = [part for row in rows for part in said_in(row)]
    long = [part for part in found if len(part) >= MIN_CHARS_OF_A_SENTENCE]
    assert [part for part in long if part not in sources()] == []


def said_in(row: str) -> Iterator[str]:
    """What stands between backticks in a table's cell, without its variable parts."""
    for sentence in re.findall(r"`([^`]+)`", row):
        for part in sentence.split("..."):
            yield " ".join(part.split())

"""Every command of README.md and docs/ does what its page says, in an empty home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.pages import README, REPOSITORY, Block, blocks
from docs.shell import Machine, pattern

pytestmark = pytest.mark.timeout(600)

DOCS = REPOSITORY / "docs"
FAKE_WORKER = REPOSITORY / "tests" / "support" / "fake_worker.py"
# Runs a page's Python in one process, and tells what each block printed.
INTERPRETER = """
import contextlib, io, json, sys
names, printed = {}, []
for place, text in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, place, "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One home for all pages. Not in pytest's folder: a socket's path is short."""
    folder = Path(f"/tmp/bkv-docs-{os.getpid()}")
    found = Machine(folder)
    try:
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder)


def commands(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "sh" and block.is_run]


def all_with(language: str) -> list[Path]:
    pages = [README, *sorted(DOCS.rglob("*.md"))]
    return [page for page in pages if any(b.is_run for b in blocks(page) if b.language == language)]


@pytest.mark.parametrize("page", all_with("sh"), ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_order(machine: Machine, page: Path) -> None:
    """In one shell each block ends well, and prints at its end what stands below it."""
    for ran in machine.read(commands(page)):
        ran.check()


@pytest.mark.parametrize("page", all_with("python"), ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(machine: Machine, page: Path) -> None:
    """Its blocks run in one interpreter, on the embedded server, which ``connect`` starts."""
    found = [block for block in blocks(page) if block.language == "python"]
    machine.stop()
    start = [sys.executable, "-c", "import batchkv_producer; batchkv_producer.connect()"]
    subprocess.run(start, env=machine.environment, check=True, timeout=60)
    environment = {**machine.environment, "BATCHKV_REDIS_URL": machine.url}
    worker = [sys.executable, str(FAKE_WORKER), "--model", "demo", "--name", "docs"]
    serving = subprocess.Popen(worker, env=environment)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", INTERPRETER],
            input=json.dumps([(block.place, block.text) for block in found]),
            env=machine.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        serving.terminate()
        serving.wait(30)
    assert ended.returncode == 0
    printed = json.loads(ended.stdout)
    assert "q3 ok answer to 3 plus 3 is" in printed[0].splitlines()[3]
    for block, output in zip(found, printed, strict=True):
        assert not block.expected or pattern(block.expected).search(output), block.place


def test_blocks_are_commands_output_json_or_python() -> None:
    """No block is of a language that these tests pass over, and what is not run says why."""
    for page in (README, *DOCS.rglob("*.md")):
        for block in blocks(page):
            assert block.language in ("sh", "json", "python"), block.place
            assert block.is_run or len(block.note) > len("not run: why"), block.place

"""``batchkv plan``: groups, expected hits, and what the command prints of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchkv_producer.cli import cli
from batchkv_producer.order import prefix_estimate
from batchkv_producer.order.prefix_estimate import PrefixEstimate, estimate_prefixes
from batchkv_producer.order.prefix_order import Entry, text_key
from batchkv_producer.submit import submission

Write = Callable[..., Path]


def words(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("etaoin shrdlu", k=length))


def entries(*texts: str) -> list[Entry]:
    raws = [text.encode() for text in texts]
    return [Entry(line, text_key(raw), len(raw), 1) for line, raw in enumerate(raws, 1)]


def looked(*texts: str, num_workers: int = 1) -> PrefixEstimate:
    return estimate_prefixes(entries(*texts), len(texts), num_workers)


def plan(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], input=stdin)


def test_a_group_and_a_single_row() -> None:
    """Whole blocks of 256 estimated tokens count, for every row but the first."""
    prefix = words(1, 2500)
    found = looked(*(prefix + words(n, 100) for n in range(2, 6)), words(9, 4000))
    assert (found.num_groups, found.num_grouped) == (1, 4)
    [group] = found.groups
    assert (group.num_rows, group.first_line) == (4, 1)
    assert 2500 - 256 < group.shared_bytes <= 2500
    assert group.shared_tokens == group.shared_bytes // 4
    assert group.cached_tokens == 3 * 512
    assert found.num_tokens == 4 * 650 + 1000
    assert found.hit_rate_one == found.hit_rate == pytest.approx(3 * 512 / 3600)


def test_a_group_is_named_by_the_first_of_its_lines() -> None:
    """Not by the row that comes first in the order of the texts."""
    found = looked(*(words(1, 2500) + letter for letter in "dcab"))
    assert [group.first_line for group in found.groups] == [1]
    order = [entry for entry in entries(*(words(1, 2500) + letter for letter in "dcab"))]
    assert [one.first_line for one in estimate_prefixes(order[::-1], 4, 1).groups] == [1]


def test_nothing_shared_and_nothing_at_all() -> None:
    """No groups, no hits, no division by zero."""
    found = looked(words(1, 3000), words(2, 3000))
    assert (found.num_groups, found.groups, found.hit_rate) == (0, (), 0.0)
    assert estimate_prefixes([], 0, 3).hit_rate_one == 0.0


def test_every_worker_computes_a_prefix_once() -> None:
    """Three workers compute the prefix three times, one once."""
    texts = [words(1, 4096) + words(n, 10) for n in range(2, 302)]
    one, three = looked(*texts), looked(*texts, num_workers=3)
    assert one.hit_rate_one == three.hit_rate_one == one.hit_rate
    per_row = one.hit_rate_one / 299
    assert three.hit_rate == pytest.approx(297 * per_row)


def test_the_largest_groups_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows first; the others are counted."""
    monkeypatch.setattr(prefix_estimate, "MAX_SHOWN_GROUPS", 3)
    texts = [words(100 + size, 1500) + f"{n}" for size in (2, 5, 3, 7, 4) for n in range(size)]
    found = looked(*texts)
    assert (found.num_groups, found.num_grouped) == (5, 21)
    assert [group.num_rows for group in found.groups] == [7, 5, 4]


def test_a_survey_is_a_check_and_more(write_lines: Write) -> None:
    """The same reader, the same errors; bad rows take no part."""
    prefix = words(1, 2000)
    path = write_lines({"prompt": prefix + "a"}, "{broken", {"prompt": prefix + "b"})
    checked, found = submission.survey(path, model="m", num_workers=2)
    assert checked == submission.check(path, model="m")
    assert (checked.num_bad, found.num_grouped, found.num_workers) == (1, 2, 2)


def test_the_command(write_lines: Write) -> None:
    """Errors to standard error, groups and rates to standard output; estimates are called so."""
    prefix = words(1, 2000)
    path = write_lines(*({"prompt": prefix + f"{n}"} for n in range(40)), "{broken")
    found = plan(path, "-m", "demo", "--workers", 2)
    assert found.exit_code == 1
    assert "line 41: invalid_json" in found.stderr
    assert "41 rows = 40 good + 1 wrong" in found.stdout
    assert "40 rows in 1 group with a common prefix; tokens are estimates" in found.stdout
    assert "expected hit rate: " in found.stdout
    assert "with 2 that share no cache" in found.stdout
    alone = plan(path)
    assert "that share no cache" not in alone.stdout


def test_the_command_as_json() -> None:
    """--json holds all of it, from standard input as well."""
    found = plan("-", "--json", "--workers", 3, stdin='{"prompt": "a"}\n{"prompt": "b"}\n')
    value = json.loads(found.stdout)
    assert (value["checked"]["total"], value["outlook"]["num_workers"]) == (2, 3)
    assert value["outlook"]["groups"] == []


def test_a_file_without_sharing_is_told_so(write_lines: Write) -> None:
    """No table without groups."""
    found = plan(write_lines({"prompt": "a"}))
    assert "no rows share a prefix of 256 tokens or more (estimated)" in found.stdout


def test_faults_of_the_file_are_those_of_submit(write_lines: Write, tmp_path: Path) -> None:
    """No file, no rows: exit code 2 and one line."""
    for path in (tmp_path / "none.jsonl", write_lines()):
        found, dry = plan(path), CliRunner().invoke(cli, ["submit", str(path), "--dry-run"])
        assert (found.exit_code, found.stderr) == (dry.exit_code, dry.stderr)
        assert found.exit_code != 0

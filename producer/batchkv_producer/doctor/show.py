"""Prints findings: a line for each as it comes, or JSON at the end, without private facts."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import click

from batchkv_producer.doctor.contract import Finding, Level
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.doctor.privacy import Rule, scrubbed
from batchkv_producer.progress import printable

NAME_WIDTH = 16
_LEVEL_WIDTH = 6
_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 80, 60, 120
FORMAT = 1  # of the JSON


def lines_of(finding: Finding, width: int) -> list[str]:
    """``ok    python   what was found``, and below it what to do."""
    head = f"{finding.verdict.level:<{_LEVEL_WIDTH}}{finding.name:<{NAME_WIDTH}}"
    margin = " " * (len(head) + (len(finding.name) >= NAME_WIDTH))  # two blanks behind a long name
    room = min(max(width, _MIN_WIDTH), _MAX_WIDTH) - len(margin)
    found = _wrapped(finding.verdict.found, room)
    lines = [f"{head:<{len(margin)}} {found[0]}", *(f"{margin} {line}" for line in found[1:])]
    for number, line in enumerate(_wrapped(finding.verdict.todo, room - 3)):
        lines.append(f"{margin} {'-> ' if not number else '   '}{line}")
    return lines


def _wrapped(text: str, room: int) -> list[str]:
    plain = printable(" ".join(text.split()))
    return textwrap.wrap(plain, max(20, room - 1), break_on_hyphens=False, break_long_words=False)


def show(finding: Finding) -> None:
    """One finding on standard output, at once."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if is_terminal else _WIDTH
    for line in lines_of(finding, width):
        click.echo(line)


def summary(findings: Sequence[Finding]) -> str:
    """``31 checks: 29 ok, 2 warnings, 0 failed``."""
    counts = Counter(each.verdict.level for each in findings)
    warnings = counts[Level.WARN]
    return (
        f"{len(findings)} checks: {counts[Level.OK]} ok, {warnings} "
        f"warning{'' if warnings == 1 else 's'}, {counts[Level.FAIL]} failed"
    )


def as_json(
    findings: Iterable[Finding],
    machine: Machine,
    version: str,
    rules: Sequence[Rule],
    fixed: Sequence[str] = (),
) -> str:
    """All findings as JSON, with names of people and machines taken out."""
    listed = list(findings)
    checks: list[dict[str, Any]] = [
        {
            "name": each.name,
            "level": str(each.verdict.level),
            "found": scrubbed(each.verdict.found, rules),
            "todo": scrubbed(each.verdict.todo, rules),
            "seconds": each.seconds,
        }
        for each in listed
    ]
    whole = {
        "format": FORMAT,
        "batchkv": version,
        "system": machine.system,
        "arch": platform.machine(),
        "is_good": not has_failed(listed),
        "checks": checks,
        "fixed": [scrubbed(text, rules) for text in fixed],
    }
    return json.dumps(whole, indent=2, ensure_ascii=True)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether some check failed; a warning is none."""
    return any(each.verdict.level is Level.FAIL for each in findings)

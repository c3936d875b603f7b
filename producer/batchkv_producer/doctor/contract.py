"""What a check is: a name, a function that gathers facts, and a verdict on them.

Gathering is bounded in time and changes nothing. A verdict is a pure function of the facts, so a
test can hand it what another machine would have printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from batchkv_producer.doctor.machine import Machine

BOTH = ("darwin", "linux")
CHECK_SECONDS = 12.0  # of one check; all of them run at once

Facts = TypeVar("Facts")


class Level(StrEnum):
    """How bad it is. Only a failure makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence says what was found, and one what to do."""

    level: Level
    found: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """One thing to look at. ``judge`` returns None where it does not apply to this machine."""

    name: str
    gather: Callable[[Machine], Facts]
    judge: Callable[[Facts], Verdict | None]
    systems: tuple[str, ...] = BOTH
    seconds: float = CHECK_SECONDS


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that was made."""

    name: str
    verdict: Verdict
    seconds: float = 0.0


def ok(found: str, note: str = "") -> Verdict:
    """All is well; ``note`` is good to know."""
    return Verdict(Level.OK, found, note)


def warn(found: str, todo: str) -> Verdict:
    """It works, and something could be better or may go wrong later."""
    return Verdict(Level.WARN, found, todo)


def fail(found: str, todo: str) -> Verdict:
    """It does not work, or its results cannot be trusted."""
    return Verdict(Level.FAIL, found, todo)


def worst(verdicts: list[Verdict], otherwise: Verdict) -> Verdict:
    """All verdicts that are not ok as one, of the worst level; ``otherwise`` if all are ok."""
    bad = [each for each in verdicts if each.level is not Level.OK]
    if not bad:
        return otherwise
    level = Level.FAIL if any(each.level is Level.FAIL for each in bad) else Level.WARN
    bad.sort(key=lambda each: each.level is not Level.FAIL)
    found = "; ".join(each.found for each in bad)
    return Verdict(level, found, "; ".join(dict.fromkeys(each.todo for each in bad)))

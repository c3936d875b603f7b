"""Checks run at once, end in time, and never raise; what they say can be pasted anywhere."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from batchkv_producer.doctor import show
from batchkv_producer.doctor.contract import Check, Finding, Level, Verdict, fail, ok, warn, worst
from batchkv_producer.doctor.machine import Machine, Output, run_command
from batchkv_producer.doctor.privacy import rules, scrubbed
from batchkv_producer.doctor.runner import run_checks

PASSWORD = "p4ss/word+secret"


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that comes when the test is over: a check that waits for it hangs until then."""
    event = threading.Event()
    yield event
    event.set()


def test_findings_come_in_the_order_of_the_checks(never: threading.Event) -> None:
    """A check that hangs is a finding, and does not keep the next one from being made."""
    checks = [
        Check("good", lambda _: 1, lambda facts: ok(f"found {facts}")),
        Check("hangs", lambda _: never.wait(60), lambda _: ok("never said"), seconds=0.2),
        Check("last", lambda _: 2, lambda facts: ok(f"found {facts}")),
        Check("elsewhere", lambda _: 3, lambda _: ok("never said"), ("plan9",)),
        Check("does not apply", lambda _: 4, lambda _: None),
    ]
    found = list(run_checks(checks, Machine("linux")))
    assert [each.name for each in found] == ["good", "hangs", "last"]
    levels = [each.verdict.level for each in found]
    assert levels == [Level.OK, Level.WARN, Level.OK]
    assert "did not end within" in found[1].verdict.found


def test_a_check_that_raises_is_a_warning() -> None:
    """A fault of a check is said, with its kind, and ends nothing."""

    def gather(_: Machine) -> NoReturn:
        raise ZeroDivisionError("by zero")

    (found,) = run_checks([Check("broken", gather, lambda _: ok("never"))], Machine("linux"))
    assert found.verdict.level is Level.WARN
    assert "ZeroDivisionError: by zero" in found.verdict.found


def test_the_worst_of_several_verdicts_counts() -> None:
    """Failures come first, warnings stay, and each thing to do is said once."""
    both = worst([ok("a"), warn("b", "do it"), fail("c", "do it")], ok("well"))
    assert both == Verdict(Level.FAIL, "c; b", "do it")
    assert worst([ok("a")], ok("well")) == ok("well")


def test_commands_are_bounded(tmp_path: Path) -> None:
    """A program that is missing, hangs or ends badly gives an output and raises nothing."""
    assert run_command(["no-such-program-at-all"], 1.0) == Output(None)
    assert run_command(["sleep", "30"], 0.1) == Output(None)
    assert run_command(["sh", "-c", "echo no; exit 3"], 5.0) == Output(3, "no\n")


def test_private_facts_are_taken_out() -> None:
    """Home folders, users, hosts, passwords and the addresses of servers do not reach JSON."""
    machine = Machine("darwin", {"USER": "alicia"}, Path("/Users/alicia"))
    found = rules(machine, [f"redis://worker:{PASSWORD}@studio.local:6379/0"])
    private = (
        f"cannot open /Users/alicia/.batchkv/x as alicia at {socket.gethostname()}; "
        f"Redis at redis://worker:{PASSWORD}@studio.local:6379/0; /Users/bob/y; STUDIO.LOCAL"
    )
    text = scrubbed(private, found)
    for word in ("alicia", "bob", socket.gethostname(), PASSWORD, "studio", "STUDIO"):
        assert word not in text, text
    assert "~/.batchkv/x" in text


def test_words_that_only_contain_a_name_stay() -> None:
    """A user called cat does not make a category unreadable."""
    found = rules(Machine("linux", {"USER": "cat"}, Path("/home/cat")), [])
    assert scrubbed("a category of cat", found) == "a category of USER"


def finding(level: Level, found: str = "found", todo: str = "") -> Finding:
    return Finding("a check", Verdict(level, found, todo), 0.5)


def test_json_has_the_findings_and_the_outcome() -> None:
    """Levels, sentences and times, and one value for a script."""
    text = show.as_json([finding(Level.OK), finding(Level.WARN)], Machine("linux"), "1.0", ())
    values = json.loads(text)
    assert values["is_good"] is True
    assert [each["level"] for each in values["checks"]] == ["ok", "warn"]
    bad = json.loads(show.as_json([finding(Level.FAIL)], Machine("linux"), "1.0", ()))
    assert bad["is_good"] is False


def test_lines_fit_the_terminal() -> None:
    """Long sentences are folded below the first, and what to do has an arrow."""
    lines = show.lines_of(finding(Level.WARN, "word " * 40, "do " * 40), 80)
    assert max(map(len, lines)) <= 80
    assert sum("->" in line for line in lines) == 1
    assert lines[0].startswith("warn  a check")
    long = replace(finding(Level.OK, "found " * 30), name="stored prefix, demo2")
    first, *more = show.lines_of(long, 80)
    assert first.startswith("ok    stored prefix, demo2  found")
    assert all(line.startswith(" " * 28 + "found") and len(line) <= 80 for line in more)


def test_the_summary_counts() -> None:
    """Each level once."""
    found = [finding(Level.OK), finding(Level.WARN), finding(Level.FAIL)]
    assert show.summary(found) == "3 checks: 1 ok, 1 warning, 1 failed"

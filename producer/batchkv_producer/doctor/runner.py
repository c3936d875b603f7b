"""Makes all checks at once, each on a thread of its own, until a common deadline.

A check that does not end in time is a finding, and nobody waits for it: its thread is a daemon.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from batchkv_producer.doctor.contract import Check, Finding, Verdict, warn
from batchkv_producer.doctor.machine import Machine

TOTAL_SECONDS = 25.0  # for all checks that need neither a model nor a server

_Answer = tuple[int, Verdict | None, float]


def run_checks(
    checks: Sequence[Check[Any]], machine: Machine, total_seconds: float = TOTAL_SECONDS
) -> Iterator[Finding]:
    """The findings in the order of ``checks``; those that do not apply here are left out."""
    wanted = [check for check in checks if machine.system in check.systems]
    answers: queue.Queue[_Answer] = queue.Queue()
    began = time.monotonic()
    for index, check in enumerate(wanted):
        work = _work(index, check, machine, answers)
        threading.Thread(target=work, name=f"check {check.name}", daemon=True).start()
    known: dict[int, _Answer] = {}
    for index, check in enumerate(wanted):
        limit = min(check.seconds, total_seconds)
        while index not in known:
            left = began + limit - time.monotonic()
            try:
                answer = answers.get(timeout=max(0.001, left))
            except queue.Empty:
                known[index] = (index, _late(limit), limit)
            else:
                known.setdefault(answer[0], answer)
        _, verdict, seconds = known[index]
        if verdict is not None:
            yield Finding(check.name, verdict, round(seconds, 3))


def _work(
    index: int, check: Check[Any], machine: Machine, answers: queue.Queue[_Answer]
) -> Callable[[], None]:
    def work() -> None:
        began = time.monotonic()
        answers.put((index, examine(check, machine), time.monotonic() - began))

    return work


def examine(check: Check[Any], machine: Machine) -> Verdict | None:
    """Gather the facts of one check and judge them. Never raises."""
    try:
        return check.judge(check.gather(machine))
    except Exception as fault:  # noqa: BLE001 - a check that fails must not hide the others
        return broken(fault)


def broken(fault: BaseException) -> Verdict:
    """What is said of a check that itself went wrong."""
    text = " ".join(str(fault).split())[:200]
    return warn(
        f"this could not be examined: {type(fault).__name__}{f': {text}' if text else ''}",
        "report it, with what `batchkv doctor --json` prints",
    )


def _late(seconds: float) -> Verdict:
    return warn(
        f"this did not end within {seconds:.0f} s",
        "the machine is very busy, or a disk or a server hangs: run it again when it is quiet",
    )

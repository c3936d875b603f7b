"""What may slow a Mac or send it to sleep: sleep, battery, lid, low power, heat, the display."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from batchkv_producer.doctor.contract import Check, Verdict, ok, warn
from batchkv_producer.doctor.mac.launchd import installed_services
from batchkv_producer.doctor.machine import Machine

_MAC = ("darwin",)
FULL_SPEED = 100
DISPLAY_WORKAROUND = (
    "if a worker's log names 'Impacting Interactivity' or a timeout of the GPU, let the display "
    "sleep (`pmset displaysleepnow`), or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 for the worker"
)


def settings_in(text: str) -> dict[str, str]:
    """Names and first values of ``pmset -g``; names may have spaces."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"^\s*(\S.*?)\s+(\d+|/\S+)(\s.*)?$", line)
        if match:
            found[match[1]] = match[2]
    return found


@dataclass(frozen=True, slots=True)
class SleepFacts:
    """``minutes`` until the idle Mac sleeps; 0 never, None is not known.

    ``keepers`` are processes that keep it awake. ``restarts`` after a loss of power: None where the
    Mac does not have the setting.
    """

    minutes: int | None
    keepers: tuple[str, ...] = ()
    restarts: bool | None = None
    services: tuple[str, ...] = ()


def sleep_facts(machine: Machine) -> SleepFacts:
    """From ``pmset -g`` and its assertions."""
    found = settings_in(machine.run("pmset", "-g").text)
    sleep, restart = found.get("sleep", ""), found.get("autorestart", "")
    return SleepFacts(
        int(sleep) if sleep.isdigit() else None,
        keepers(machine.run("pmset", "-g", "assertions").text),
        restart == "1" if restart else None,
        installed_services(machine),
    )


def judge_sleep(facts: SleepFacts) -> Verdict | None:
    """A Mac that serves must not sleep while a worker runs, and should come back by itself."""
    if facts.minutes is None:
        return None
    is_serving = bool(facts.services)
    if facts.minutes and is_serving and not facts.keepers:
        return warn(
            f"this Mac sleeps after {facts.minutes} idle min, and nothing keeps it awake",
            "the service holds an assertion while it runs: `batchkv service status`; or "
            "`sudo pmset -c sleep 0`",
        )
    if is_serving and facts.restarts is False:
        return warn("after a loss of power this Mac stays off", "`sudo pmset autorestart 1`")
    awake = f", kept awake by {', '.join(facts.keepers)}" if facts.keepers else ""
    if facts.minutes:
        return ok(
            f"the idle Mac sleeps after {facts.minutes} min{awake}",
            "workers and `batchkv run` keep it awake while they run",
        )
    return ok(f"this Mac does not sleep by itself{awake}")


def keepers(text: str) -> tuple[str, ...]:
    """Processes that hold off idle sleep, from ``pmset -g assertions``, each once."""
    names = re.findall(
        r"pid \d+\(([^)]*)\):.*?\b(?:PreventUserIdleSystemSleep|PreventSystemSleep|"
        r"NoIdleSleepAssertion)\b",
        text,
    )
    return tuple(dict.fromkeys(name for name in names if name != "powerd"))


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """``source`` as ``pmset -g batt`` says it. ``is_low``: Low Power Mode is on."""

    source: str
    percent: int | None = None
    is_low: bool = False
    lid_is_closed: bool | None = None


def power_facts(machine: Machine) -> PowerFacts:
    """From ``pmset`` and the I/O registry."""
    battery = machine.run("pmset", "-g", "batt").text
    source = re.search(r"drawing from '([^']*)'", battery)
    percent = re.search(r"(\d+)%;", battery)
    found = settings_in(machine.run("pmset", "-g").text)
    lid = machine.run("ioreg", "-r", "-k", "AppleClamshellState", "-d", "1").text
    closed = re.search(r'"AppleClamshellState" = (Yes|No)', lid)
    return PowerFacts(
        source[1] if source else "",
        int(percent[1]) if percent else None,
        found.get("lowpowermode", found.get("powermode", "0")) == "1",
        closed[1] == "Yes" if closed else None,
    )


def judge_power(facts: PowerFacts) -> Verdict | None:
    """On mains, at full power, with the lid open or a display connected."""
    if not facts.source:
        return None
    if facts.source == "Battery Power":
        left = "" if facts.percent is None else f" ({facts.percent} %)"
        return warn(
            f"this Mac runs on its battery{left}",
            "connect it; `batchkv worker --polite` pauses on battery",
        )
    if facts.is_low:
        return warn("Low Power Mode is on, which slows the GPU", "`sudo pmset -a lowpowermode 0`")
    if facts.lid_is_closed:
        return warn(
            "the lid is closed: without a display connected, this Mac sleeps",
            "open it, or connect a display",
        )
    return ok(f"power: {facts.source}, not in Low Power Mode")


@dataclass(frozen=True, slots=True)
class HeatFacts:
    """``speed_limit`` in per cent; ``warnings`` are lines that name a level."""

    is_known: bool
    speed_limit: int | None = None
    warnings: tuple[str, ...] = field(default=())


def heat_facts(machine: Machine) -> HeatFacts:
    """From ``pmset -g therm``. A cool Mac with Apple silicon prints notes only."""
    asked = machine.run("pmset", "-g", "therm")
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", asked.text)
    levels = re.findall(r"((?:thermal|performance) warning level\D*[1-9]\d*)", asked.text, re.I)
    return HeatFacts(asked.is_good, int(limit[1]) if limit else None, tuple(levels))


def judge_heat(facts: HeatFacts) -> Verdict | None:
    """A hot Mac computes slower."""
    if not facts.is_known:
        return None
    if facts.warnings or (facts.speed_limit is not None and facts.speed_limit < FULL_SPEED):
        limit = "" if facts.speed_limit is None else f", speed limited to {facts.speed_limit} %"
        return warn(f"this Mac is hot{limit}", "let air to it; measure again when it has cooled")
    return ok("no heat warning is recorded")


@dataclass(frozen=True, slots=True)
class DisplayFacts:
    """Whether a display is awake; None is not known."""

    is_awake: bool | None


def display_facts(machine: Machine) -> DisplayFacts:
    """From ``pmset -g systemstate``, whose capabilities name Graphics while a display is on."""
    text = machine.run("pmset", "-g", "systemstate").text
    found = re.search(r"Current System Capabilities are:\s*(.*)", text)
    return DisplayFacts(None if not found else "Graphics" in found[1])


def judge_display(facts: DisplayFacts) -> Verdict | None:
    """macOS ends long GPU work while a display is awake; that was reported, not seen here."""
    if facts.is_awake is None:
        return None
    if facts.is_awake:
        return ok("a display is awake, for which macOS may interrupt the GPU", DISPLAY_WORKAROUND)
    return ok("no display is awake")


CHECKS = (
    Check("sleep", sleep_facts, judge_sleep, _MAC),
    Check("power", power_facts, judge_power, _MAC),
    Check("heat", heat_facts, judge_heat, _MAC),
    Check("display", display_facts, judge_display, _MAC),
)

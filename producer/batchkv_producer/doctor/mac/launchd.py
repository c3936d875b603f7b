"""What launchd knows of batchkv's services, and whether they start after a restart of the Mac."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn, worst
from batchkv_producer.doctor.machine import Machine, Output
from batchkv_producer.service.launchd import read_print
from batchkv_producer.service.manager import installed
from batchkv_producer.service.spec import SERVER_LABELS

DOCTOR_LABEL = "dev.batchkv.doctor"  # of our own jobs, which last for seconds
MANY_RUNS = 5
_MAC = ("darwin",)
_SERVERS = frozenset(SERVER_LABELS.values())
_RESTART = "`sudo fdesetup authrestart` restarts it once with the disk unlocked"
_MEANINGS = {
    1: "it failed at its start",
    2: "its configuration is wrong",
    3: "it cannot reach Redis",
    70: "its engine died",
    71: "its engine hung",
    72: "the model's files have changed",
    74: "the GPU failed twice within a minute, or at start",
    78: "launchd cannot run its program",
    126: "its program may not be run",
    127: "its program is not there",
}


@dataclass(frozen=True, slots=True)
class Service:
    """A service of ours. ``last_exit`` None: it never ended, or launchd does not say."""

    label: str
    is_daemon: bool
    is_loaded: bool
    is_running: bool = False
    runs: int = 0
    last_exit: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchdFacts:
    """``has_gui``: the user is logged in at the desktop. None: it is not known."""

    services: tuple[Service, ...]
    has_gui: bool
    encrypts: bool | None = None
    logs_in: bool | None = None


def launchd_facts(machine: Machine) -> LaunchdFacts:
    """From property lists and ``launchctl print``."""
    gui = f"gui/{machine.uid}"
    services = []
    for label, is_daemon in _labels(machine):
        domain = "system" if is_daemon else gui
        services.append(
            service_in(label, is_daemon, machine.run("launchctl", "print", f"{domain}/{label}"))
        )
    vault = machine.run("fdesetup", "status")
    login = machine.run(
        "defaults", "read", "/Library/Preferences/com.apple.loginwindow", "autoLoginUser"
    )
    return LaunchdFacts(
        tuple(services),
        machine.run("launchctl", "print", gui).is_good,
        "FileVault is On" in vault.text if vault.is_good else None,
        None if login.code is None else login.is_good,
    )


def installed_services(machine: Machine) -> tuple[str, ...]:
    """Labels of our services that are installed here."""
    return tuple(label for label, _ in _labels(machine))


def worker_is_daemon(machine: Machine) -> bool:
    """Whether workers are installed here, and each of them as a daemon."""
    kinds = [is_daemon for label, is_daemon in _labels(machine) if label not in _SERVERS]
    return bool(kinds) and all(kinds)


def _labels(machine: Machine) -> list[tuple[str, bool]]:
    """(label, is it a daemon) of the property lists of ours."""
    places = (
        (machine.user_home / "Library" / "LaunchAgents", False),
        (machine.root / "Library" / "LaunchDaemons", True),
    )
    return [
        (path.stem, is_daemon)
        for folder, is_daemon in places
        for path in installed(folder, ".plist")
    ]


def service_in(label: str, is_daemon: bool, printed: Output) -> Service:
    """From what ``launchctl print DOMAIN/LABEL`` printed."""
    text = printed.text
    if not printed.is_good:
        return Service(label, is_daemon, False)
    is_running, _, last_exit = read_print(text)
    runs = re.search(r"^\s*runs = (\d+)", text, re.MULTILINE)
    return Service(label, is_daemon, True, is_running, int(runs[1]) if runs else 0, last_exit)


def judge_launchd(facts: LaunchdFacts) -> Verdict:
    """Services that are loaded, that run, and that start again without anybody at the desktop."""
    if not facts.services:
        return ok(
            "no service of batchkv is installed",
            "`batchkv service install worker` starts one with the Mac",
        )
    verdicts = [each for service in facts.services if (each := _of_service(service, facts.has_gui))]
    agents = [each.label for each in facts.services if not each.is_daemon]
    daemons = {each.label for each in facts.services if each.is_daemon}
    twice = sorted(daemons & set(agents))
    if twice:
        verdicts.append(
            fail(
                f"{twice[0]} is installed as an agent and as a daemon",
                "`batchkv service uninstall` removes both; then install one",
            )
        )
    if agents and facts.encrypts and not facts.logs_in:
        verdicts.append(
            warn(
                f"after a restart {agents[0]} waits until somebody unlocks the disk (FileVault is "
                "on) and logs in at the desktop",
                "a daemon (`batchkv service install worker --daemon`) needs the unlocked disk "
                f"alone; {_RESTART}",
            )
        )
    elif agents and facts.logs_in is False:
        verdicts.append(
            warn(
                f"after a restart {agents[0]} waits until somebody logs in at the desktop",
                "turn automatic login on, or `batchkv service install worker --daemon`",
            )
        )
    running = sum(each.is_running for each in facts.services)
    return worst(
        verdicts,
        ok(
            f"{running} of {len(facts.services)} services run: "
            f"{', '.join(each.label for each in facts.services)}",
            f"FileVault is on: after a restart nothing starts before somebody unlocks the disk; "
            f"{_RESTART}"
            if facts.encrypts
            else "",
        ),
    )


def _of_service(service: Service, has_gui: bool) -> Verdict | None:
    label, kind = service.label, "daemon" if service.is_daemon else "agent"
    if not service.is_loaded and not service.is_daemon and not has_gui:
        return fail(
            f"the agent {label} cannot run: nobody is logged in at the desktop",
            "log in there, or `batchkv service install worker --daemon`",
        )
    if not service.is_loaded:
        return fail(
            f"the {kind} {label} is installed and not loaded",
            "`batchkv service install worker` (or hub) loads it again",
        )
    if service.is_running and (service.runs <= MANY_RUNS or not service.last_exit):
        return None
    why = _MEANINGS.get(service.last_exit or 0, "the log of the service tells more")
    shown = f"{label} ended {service.runs} times, last with exit code {service.last_exit} ({why})"
    if service.last_exit and not service.is_running:
        return fail(shown, "read the end of its log, ~/Library/Logs/batchkv")
    if service.last_exit:
        return warn(shown, "read the end of its log, ~/Library/Logs/batchkv")
    return warn(f"{label} does not run", "`batchkv service status` tells more")


CHECKS = (Check("services", launchd_facts, judge_launchd, _MAC),)

"""Whether a service of launchd reaches an address that this command reaches.

Since macOS 15, Local Network privacy denies agents of launchd the machines of the local network:
connecting fails at once with error 65, or a name has no address. Terminal, ssh, root and daemons
are exempt (Apple's technical note TN3179). So the same connection is made here and by an agent of
the worker's kind that lives for seconds.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_producer.doctor.mac.launchd import DOCTOR_LABEL, worker_is_daemon
from batchkv_producer.doctor.machine import Machine, read_text
from batchkv_producer.doctor.reach import Reached, reach, read_reached

WAIT_SECONDS = 8.0  # for launchd, and again for its job
POLL_SECONDS = 0.05
PRIVACY = (
    "allow Python in System Settings > Privacy & Security > Local Network, or run the worker as a "
    "daemon: `batchkv service install worker --daemon`"
)


@dataclass(frozen=True, slots=True)
class LaunchdReach:
    """The same connection from here and from launchd. ``there`` None: ``why_not`` says why.

    ``is_exempt``: the workers of this Mac are daemons, which macOS asks for no permission.
    """

    here: Reached
    there: Reached | None
    why_not: str = ""
    is_exempt: bool = False


def job(label: str, host: str, port: int, out: Path) -> dict[str, Any]:
    """The property list of the job: of the worker's kind, and run once."""
    return {
        "Label": label,
        "ProgramArguments": [
            *(sys.executable, "-m", "batchkv_producer.doctor.reach", host, str(port), str(out))
        ],
        "RunAtLoad": True,
        "ProcessType": "Interactive",
        "EnvironmentVariables": {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        "WorkingDirectory": str(out.parent),
        "StandardErrorPath": str(out.with_suffix(".log")),
        "StandardOutPath": str(out.with_suffix(".log")),
    }


def compare(machine: Machine, host: str, port: int) -> LaunchdReach:
    """Connect from here and from launchd. The job and its files are gone afterwards.

    Only root may start a daemon. Nothing is started where all workers are daemons.
    """
    here = reach(host, port)
    if worker_is_daemon(machine):
        return LaunchdReach(here, None, is_exempt=True)
    folder = Path(tempfile.mkdtemp(prefix="batchkv-doctor-"))
    label, domain = f"{DOCTOR_LABEL}.{os.getpid()}", f"gui/{machine.uid}"
    out, plist = folder / "reached", folder / f"{label}.plist"
    try:
        plist.write_bytes(plistlib.dumps(job(label, host, port, out)))
        plist.chmod(0o600)
        started = machine.run("launchctl", "bootstrap", domain, str(plist), seconds=WAIT_SECONDS)
        if not started.is_good:
            why = " ".join(started.text.split())[:120] or "launchctl does not answer"
            return LaunchdReach(here, None, f"launchd does not start a job ({why})")
        text = _wait_for(lambda: read_text(out))
        machine.run("launchctl", "bootout", f"{domain}/{label}")
        found = read_reached(text) if text else None
        log = " ".join((read_text(out.with_suffix(".log")) or "").split())[-120:]
        why = "" if found else f"the job of launchd wrote nothing{f' ({log})' if log else ''}"
        return LaunchdReach(here, found, why)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(look: Callable[[], str | None]) -> str | None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if text := look():
            return text
        time.sleep(POLL_SECONDS)
    return look()


def judge(facts: LaunchdReach) -> Verdict | None:
    """Here and not there is Local Network privacy."""
    if not facts.here.is_good:
        return None  # the check of the server says so already
    if facts.is_exempt:
        return ok("the worker is a daemon, which needs no permission for the local network")
    if facts.there is None:
        return warn(
            f"it is not known whether a service reaches the server: {facts.why_not}",
            "log in at the desktop and run this again; a daemon needs no permission",
        )
    if facts.there.is_good:
        return ok("a service of launchd reaches the server, too")
    if facts.there.is_denied:
        return fail(
            "this command reaches the server, and a service of launchd is denied it "
            "(Local Network privacy)",
            PRIVACY,
        )
    name = facts.there.number_name or f"error {facts.there.error}"
    return warn(
        f"a service of launchd does not reach the server ({name})",
        "run this again; if it stays so, look at firewall and VPN",
    )

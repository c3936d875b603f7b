"""By which interface a server is reached: cable, Thunderbolt or Wi-Fi."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchkv_producer.doctor.contract import Verdict, ok, warn
from batchkv_producer.doctor.machine import Machine

BRIDGE = "bridge0"  # macOS' name of the Thunderbolt Bridge


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """``port`` such as "Wi-Fi"; empty if it is not known. ``has_bridge``: Thunderbolt is linked."""

    port: str
    is_here: bool = False  # the server is on this Mac
    has_bridge: bool = False


def route_facts(machine: Machine, host: str) -> RouteFacts:
    """From ``route``, ``networksetup`` and ``ifconfig``. Nothing is sent."""
    route = machine.run("route", "-n", "get", host)
    found = re.search(r"^\s*interface:\s*(\S+)", route.text, re.MULTILINE)
    interface = found[1] if route.is_good and found else ""
    listed = machine.run("networksetup", "-listallhardwareports").text
    bridge = machine.run("ifconfig", BRIDGE).text
    return RouteFacts(
        port_of(listed, interface),
        interface.startswith("lo"),
        "status: active" in bridge,
    )


def port_of(listed: str, interface: str) -> str:
    """The name of an interface, from ``networksetup -listallhardwareports``."""
    if not interface:
        return ""
    for part in listed.split("\n\n"):
        device = re.search(r"^Device:\s*(\S+)", part, re.MULTILINE)
        name = re.search(r"^Hardware Port:\s*(.+)$", part, re.MULTILINE)
        if device and name and device[1] == interface:
            return name[1].strip()
    return ""


def judge_route(facts: RouteFacts) -> Verdict | None:
    """Blocks of the cache are megabytes: Wi-Fi is slow, and Thunderbolt the fastest."""
    if facts.is_here:
        return ok("the server is on this Mac")
    if not facts.port:
        return None
    shown = f"the server is reached by {facts.port}"
    if facts.has_bridge and "Thunderbolt" not in facts.port:
        return ok(
            shown,
            "Thunderbolt links this Mac to another one: a cache at that address is "
            "several times as fast",
        )
    if "Wi-Fi" in facts.port:
        return warn(shown, "use a cable for the cache of prefixes; the queue needs little")
    return ok(shown)

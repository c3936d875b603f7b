"""Folders that macOS closes to background services, and the firewall before a hub."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, ok, warn
from batchkv_producer.doctor.home_folder import home_of, model_cache
from batchkv_producer.doctor.mac.launchd import installed_services
from batchkv_producer.doctor.machine import Machine

_MAC = ("darwin",)
_FILTER = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_TIER_FOLDER = re.compile(r"disk:([^?\s]+)")
_ICLOUD = "Library/Mobile Documents"
# Folders of the home folder for which macOS asks, and which it may move into iCloud.
_GUARDED = ("Desktop", "Documents", "Downloads")


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """(what it is, why a service may not open it) of each place that is guarded."""

    guarded: tuple[tuple[str, str], ...]
    has_service: bool = False


def place_facts(machine: Machine) -> PlaceFacts:
    """Of the environment, the home folder, the models and the tiers that the environment names."""
    places = [
        ("the environment of Python", Path(sys.prefix)),
        ("the home folder of batchkv", home_of(machine).path),
        ("the folder of models", model_cache(machine)),
    ]
    tiers = machine.environ.get("BATCHKV_CACHE", "")
    places += [
        ("a tier of the cache", Path(text).expanduser()) for text in _TIER_FOLDER.findall(tiers)
    ]
    model = machine.environ.get("BATCHKV_MODEL", "")
    if model.startswith(("/", "~")):
        places.append(("the model", Path(model).expanduser()))
    found = [(name, why) for name, path in places if (why := guard_of(path, machine.user_home))]
    return PlaceFacts(tuple(found), bool(installed_services(machine)))


def guard_of(path: Path, user_home: Path) -> str:
    """Why a background service may not open a path; empty if it may."""
    try:
        inside = path.relative_to(user_home)
    except ValueError:
        parts = path.parts
        if len(parts) > 2 and parts[1] == "Volumes":
            return "on another volume"
        return ""
    if str(inside).startswith(_ICLOUD):
        return "in iCloud"
    if inside.parts and inside.parts[0] in _GUARDED:
        return f"in ~/{inside.parts[0]}"
    return ""


def judge_places(facts: PlaceFacts) -> Verdict:
    """A service is refused there, often without a question; the same command works in Terminal."""
    if not facts.guarded:
        return ok("nothing is in a folder that macOS closes to background services")
    shown = "; ".join(f"{name} is {why}" for name, why in facts.guarded)
    todo = (
        "move it to another folder of your home folder, or give the service Full Disk Access "
        "in System Settings"
    )
    if facts.has_service:
        return warn(f"{shown}, which macOS may close to the installed service", todo)
    return ok(f"{shown}", f"before you install a service: {todo}")


@dataclass(frozen=True, slots=True)
class FirewallFacts:
    """``is_on`` None: it is not known. ``is_hub``: the hub's servers run on this Mac."""

    is_on: bool | None
    blocks_all: bool
    is_hub: bool


def firewall_facts(machine: Machine) -> FirewallFacts:
    """From the application firewall's own tool."""
    state = machine.run(_FILTER, "--getglobalstate").text
    every = machine.run(_FILTER, "--getblockall").text
    number = re.search(r"State = (\d)", state)
    hub = any(label.endswith((".queue", ".cache")) for label in installed_services(machine))
    return FirewallFacts(
        None if not number else number[1] != "0",
        "set to enabled" in every or bool(number and number[1] == "2"),
        hub,
    )


def judge_firewall(facts: FirewallFacts) -> Verdict | None:
    """The server's program is signed for this machine only, so the firewall asks after updates."""
    if facts.is_on is None or not facts.is_hub:
        return None
    if facts.blocks_all:
        return warn(
            "the firewall blocks all connections to this hub",
            "turn 'Block all incoming connections' off in System Settings",
        )
    if facts.is_on:
        return ok(
            "the firewall is on",
            "after an update of batchkv, allow the server once more when macOS asks",
        )
    return ok("the firewall is off")


CHECKS = (
    Check("places", place_facts, judge_places, _MAC),
    Check("firewall", firewall_facts, judge_firewall, _MAC),
)

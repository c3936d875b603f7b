"""Which Mac this is, and whether MLX's build fits chip and macOS."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn
from batchkv_producer.doctor.installation import numbers
from batchkv_producer.doctor.mac.mach_o import minimum_os
from batchkv_producer.doctor.machine import Machine

MIN_MACOS = (14,)
HEADER_BYTES = 65_536
NAX_CHIP = 5  # from M5 on, the GPU has units for matrix products
_MAC = ("darwin",)
_WHEEL_TAG = re.compile(r"macosx_(\d+)_(\d+)_")
_ANEW = "run `make distclean venv`: it asks pip and uv to see the real macOS"


@dataclass(frozen=True, slots=True)
class MacFacts:
    """``chip`` such as "Apple M4 Pro"; ``is_translated``: this process runs under Rosetta."""

    chip: str
    arch: str
    is_translated: bool
    macos: tuple[int, ...]
    build: str = ""


def mac_facts(machine: Machine) -> MacFacts:
    """From ``sysctl`` and ``sw_vers``."""
    chip = machine.run("sysctl", "-n", "machdep.cpu.brand_string").text.strip()
    translated = machine.run("sysctl", "-n", "sysctl.proc_translated").text.strip() == "1"
    versions = machine.run("sw_vers").text
    return MacFacts(
        chip,
        platform.machine(),
        translated,
        numbers(_field(versions, "ProductVersion")),
        _field(versions, "BuildVersion"),
    )


def judge_mac(facts: MacFacts) -> Verdict:
    """Apple silicon, macOS 14 or newer, and a Python that runs on it natively."""
    shown = f"{facts.chip or 'an unknown chip'}, macOS {'.'.join(map(str, facts.macos)) or '?'}"
    if facts.is_translated or (facts.chip.startswith("Apple") and facts.arch == "x86_64"):
        return fail(
            f"{shown}: this Python is for Intel and runs under Rosetta, where MLX has no build",
            "install a Python for Apple silicon (uv fetches one) and run `make distclean venv`",
        )
    if not facts.chip.startswith("Apple"):
        return fail(f"{shown}: MLX needs Apple silicon", "use this Mac to submit, not to compute")
    if facts.macos and facts.macos < MIN_MACOS:
        return fail(f"{shown}: MLX needs macOS 14 or newer", "update macOS")
    return ok(shown + (f" ({facts.build})" if facts.build else ""))


def generation(chip: str) -> int:
    """4 of "Apple M4 Pro"; 0 where it is not known."""
    found = re.match(r"Apple M(\d+)", chip)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """MLX's build: for which macOS its wheel is, and from which its library runs.

    ``wheel`` and ``minimum`` are versions of macOS, empty where they are not known.
    """

    is_installed: bool
    wheel: tuple[int, ...] = ()
    minimum: tuple[int, ...] = ()
    macos: tuple[int, ...] = ()
    chip: str = ""


def build_facts(machine: Machine) -> BuildFacts:
    """From the wheel's notes and the head of MLX's library."""
    mac = mac_facts(machine)
    try:
        found = distribution("mlx-metal")
    except PackageNotFoundError:
        return BuildFacts(False, macos=mac.macos, chip=mac.chip)
    tag = _WHEEL_TAG.search(found.read_text("WHEEL") or "")
    minimum: tuple[int, ...] = ()
    for file in found.files or ():
        if file.name == "libmlx.dylib":
            with open(str(file.locate()), "rb") as library:
                minimum = minimum_os(library.read(HEADER_BYTES))
    wheel = (int(tag[1]), int(tag[2])) if tag else ()
    return BuildFacts(True, wheel, minimum, mac.macos, mac.chip)


def judge_build(facts: BuildFacts) -> Verdict | None:
    """A library for a newer macOS than this lacks kernels here; an older one lacks M5's units."""
    if not facts.is_installed or not facts.macos:
        return None
    here = ".".join(map(str, facts.macos))
    built = ".".join(map(str, facts.minimum or facts.wheel)) or "?"
    if facts.minimum and facts.minimum[:2] > facts.macos[:2]:
        return fail(
            f"MLX's library is for macOS {built}, and this is {here}: kernels may be missing",
            f"update macOS to {built} or newer",
        )
    if generation(facts.chip) >= NAX_CHIP and facts.wheel and facts.wheel < (26, 0):
        if facts.macos >= (26, 2):
            return warn(
                f"MLX's build for macOS {built} does not use the matrix units of {facts.chip}: "
                "prompts are computed about 3 times slower",
                _ANEW,
            )
        return warn(
            f"MLX's build for macOS {built} does not use the matrix units of {facts.chip}",
            "update macOS to 26.2 or newer, then run `make distclean venv`",
        )
    return ok(f"MLX's build is for macOS {built}, and this is {here}")


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


CHECKS = (
    Check("Mac", mac_facts, judge_mac, _MAC),
    Check("MLX build", build_facts, judge_build, _MAC),
)

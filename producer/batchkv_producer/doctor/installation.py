"""The installation: Python, the versions of MLX, and whether pip's notes fit the code."""

from __future__ import annotations

import importlib.util
import platform
import re
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, version
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn, worst
from batchkv_producer.doctor.machine import Machine, read_text

PACKAGE = "batchkv"
AGAIN = "run `make venv`, or install batchkv again"
MIN_PYTHON = (3, 11)
MIN_GLIBC = (2, 35)
_ENGINE = ("mlx", "mlx-lm")
_NUMBER = re.compile(r"\d+")
_CLAUSE = re.compile(r"(>=|<=|==|<|>|!=)\s*([\w.]+)")


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 32, 4) of 0.32.4."""
    return tuple(int(part) for part in _NUMBER.findall(text))


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """The interpreter. ``is_venv``: whether it is one of a virtual environment."""

    version: tuple[int, ...]
    arch: str
    bits: int
    is_venv: bool
    glibc: tuple[int, ...] = ()


def python_facts(machine: Machine) -> PythonFacts:
    """Of the interpreter that runs this."""
    name, found = platform.libc_ver() if not machine.is_mac else ("", "")
    return PythonFacts(
        tuple(sys.version_info[:3]),
        platform.machine(),
        struct.calcsize("P") * 8,
        sys.prefix != sys.base_prefix,
        numbers(found)[:2] if name == "glibc" else (),
    )


def judge_python(facts: PythonFacts) -> Verdict:
    """Old, 32-bit, or on a C library for which MLX has no build."""
    shown = ".".join(map(str, facts.version))
    if facts.version < MIN_PYTHON or facts.bits != 64:
        return fail(
            f"this is Python {shown} of {facts.bits} bits; batchkv needs 3.11 or newer of 64 bits",
            "install a newer Python (uv fetches one) and run `make venv` again",
        )
    if facts.glibc and facts.glibc < MIN_GLIBC:
        old = ".".join(map(str, facts.glibc))
        return fail(
            f"the C library is glibc {old}; MLX's builds for Linux need 2.35",
            "use a newer distribution (Ubuntu 22.04, Debian 12), or only submit from here",
        )
    place = "in a virtual environment" if facts.is_venv else "outside a virtual environment"
    return ok(f"Python {shown}, {facts.arch}, {place}")


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """By package: what is installed, which versions batchkv allows, which its lock file names."""

    installed: Mapping[str, str | None]
    allowed: Mapping[str, str]
    locked: Mapping[str, str] = field(default_factory=dict)


def version_facts(machine: Machine, names: tuple[str, ...] = _ENGINE) -> VersionFacts:
    """From pip's notes, and from the lock file where batchkv is installed from a clone."""
    return VersionFacts(
        {name: _installed(name) for name in names},
        {name: _allowed(name) for name in names},
        _locked(names, repository()),
    )


def judge_versions(facts: VersionFacts) -> Verdict:
    """MLX and mlx-lm: there, of a version that batchkv was tested with."""
    missing = [name for name, found in facts.installed.items() if found is None]
    if len(missing) == len(facts.installed):
        return ok(
            "without MLX: this machine can submit and follow, and run no worker",
            "`make venv SET=worker` adds what a worker needs",
        )
    if missing:
        return fail(f"{', '.join(missing)} is not installed", "run `make venv SET=worker`")
    verdicts = []
    for name, found in facts.installed.items():
        allowed, locked = facts.allowed.get(name, ""), facts.locked.get(name, "")
        if found and allowed and not is_allowed(found, allowed):
            sentence = f"{name} is {found}; batchkv is made for {allowed}"
            verdicts.append(fail(sentence, "run `make venv`, which installs the tested version"))
        elif found and locked and found != locked:
            sentence = f"{name} is {found}; batchkv was tested with {locked}"
            verdicts.append(warn(sentence, "run `make venv`, which installs the tested version"))
    shown = ", ".join(f"{name} {found}" for name, found in facts.installed.items())
    return worst(verdicts, ok(shown))


def is_allowed(found: str, clauses: str) -> bool:
    """Whether a version fits clauses such as ``>=0.32.4,<0.33``."""
    own = numbers(found)
    for operator, text in _CLAUSE.findall(clauses):
        other = numbers(text)
        length = max(len(own), len(other))
        a, b = own + (0,) * (length - len(own)), other + (0,) * (length - len(other))
        fits = {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b, "!=": a != b}
        if not fits[operator]:
            return False
    return True


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """Entry points that pip noted, of our groups, and those that the code declares, if known.

    Each is ``group: name = module:attribute``. ``broken`` are noted ones without a module.
    """

    noted: frozenset[str] | None
    declared: frozenset[str] | None
    broken: tuple[str, ...] = ()


def entry_facts(machine: Machine) -> EntryFacts:
    """Of the installed distribution, and of pyproject.toml where that is beside the code."""
    try:
        points = [each for each in distribution(PACKAGE).entry_points if _is_ours(each.group)]
    except PackageNotFoundError:
        return EntryFacts(None, None)
    broken = [each.name for each in points if not has_module(each)]
    noted = frozenset(f"{each.group}: {each.name} = {each.value}" for each in points)
    return EntryFacts(noted, _declared(repository()), tuple(sorted(broken)))


def judge_entries(facts: EntryFacts) -> Verdict:
    """An installation in place whose code was updated since."""
    if facts.noted is None:
        return warn(
            "pip does not know batchkv here, so commands of other packages are missing",
            "install it: `make venv`",
        )
    if facts.broken:
        return fail(
            f"the code of {', '.join(facts.broken)} has moved since the installation", AGAIN
        )
    missing = sorted((facts.declared or frozenset()) - facts.noted)
    if missing:
        names = ", ".join(each.partition(" = ")[0] for each in missing)
        return warn(f"the code is newer than its installation, which lacks {names}", AGAIN)
    return ok(f"all {len(facts.noted)} entry points of batchkv lead to its code")


def has_module(point: EntryPoint) -> bool:
    """Whether the module of an entry point is there; nothing of it is run but its packages."""
    try:
        return importlib.util.find_spec(point.module) is not None
    except (ImportError, ValueError):
        return False


def repository() -> Path | None:
    """The clone that this code runs from, if it does."""
    root = Path(__file__).resolve().parents[3]
    text = read_text(root / "pyproject.toml") or ""
    return root if f'name = "{PACKAGE}"' in text else None


def _is_ours(group: str) -> bool:
    return group.startswith(f"{PACKAGE}.")


def _declared(root: Path | None) -> frozenset[str] | None:
    if root is None:
        return None
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    groups = project.get("entry-points", {}).items()
    return frozenset(f"{g}: {n} = {v}" for g, items in groups for n, v in items.items())


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _allowed(name: str) -> str:
    return next(iter(_clauses(name)), "")


def _clauses(name: str) -> Iterator[str]:
    try:
        required = distribution(PACKAGE).requires or []
    except PackageNotFoundError:
        return
    for line in required:
        found = re.match(rf"{re.escape(name)}(\[[\w,]+\])?\s*((?:[<>=!~][^;]*)?)(;|$)", line)
        if found and found[2].strip():
            yield found[2].strip()


def _locked(names: tuple[str, ...], root: Path | None) -> dict[str, str]:
    text = "" if root is None else read_text(root / "requirements" / "worker.txt") or ""
    found = {name: re.search(rf"^{name}==([\w.]+)", text, re.MULTILINE) for name in names}
    return {name: match[1] for name, match in found.items() if match}


CHECKS = (
    Check("python", python_facts, judge_python),
    Check("versions", version_facts, judge_versions),
    Check("installation", entry_facts, judge_entries),
)

"""The server's program, the server that runs, open files, and variables that change MLX."""

from __future__ import annotations

import difflib
import resource
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn, worst
from batchkv_producer.doctor.home_folder import home_of
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.errors import ServerError
from batchkv_producer.server import embedded
from batchkv_producer.server.binary import Candidates, candidates, find_binary
from batchkv_producer.settings_table import VARIABLES

WANTED_FILES = 2048  # a worker raises its own limit to this, as far as it may
FEW_FILES = 512
MAX_SHOWN_CHARS = 200
OTHERS = ("MLX_", "METAL_", "MTL_", "AGX_")
# Variables of others that do no harm, or that these pages name.
HARMLESS = frozenset(
    {
        "MLX_METAL_JIT",
        "MLX_BUFFER_CACHE_SIZE",
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT",
        "MLX_CCACHE",
    }
)
SLOWING = frozenset(
    {
        "MLX_DISABLE_COMPILE",
        "METAL_DEVICE_WRAPPER_TYPE",
        "MTL_DEBUG_LAYER",
        "MTL_SHADER_VALIDATION",
        "METAL_CAPTURE_ENABLED",
        "MTL_CAPTURE_ENABLED",
        "MLX_METAL_DEBUG",
    }
)


@dataclass(frozen=True, slots=True)
class BinaryFacts:
    """The server's program. ``signature`` is what codesign says, empty where nobody asks."""

    shown: str = ""
    version: str = ""
    fault: str = ""
    is_signed: bool | None = None
    signature: str = ""


def binary_facts(machine: Machine, from_candidates: Candidates = candidates) -> BinaryFacts:
    """Run the program with ``--version``; on a Mac, check its signature, too."""
    try:
        found = find_binary(from_candidates)
    except ServerError as fault:
        first = next(from_candidates(), None)
        is_signed, text = _signature(machine, first)
        return BinaryFacts(fault=str(fault), is_signed=is_signed, signature=text)
    is_signed, text = _signature(machine, found.path)
    shown = ".".join(map(str, found.version))
    return BinaryFacts(machine.shown(found.path), f"{found.name} {shown}", "", is_signed, text)


def _signature(machine: Machine, path: Path | None) -> tuple[bool | None, str]:
    if not machine.is_mac or path is None:
        return None, ""
    asked = machine.run("codesign", "-v", str(path))
    if asked.code is None:
        return None, ""
    return asked.is_good, " ".join(asked.text.split()).rpartition(": ")[2][:MAX_SHOWN_CHARS]


def judge_binary(facts: BinaryFacts) -> Verdict:
    """It runs. macOS kills a program whose signature does not fit (exit code -9)."""
    again = "install batchkv again (`make venv`), or `brew install valkey`"
    if facts.is_signed is False:
        why = f" ({facts.signature})" if facts.signature else ""
        return fail(
            f"the signature of the server's program is not valid{why}: macOS kills it", again
        )
    if facts.fault:
        return fail(
            facts.fault.partition(". Install one")[0],
            "install Valkey or Redis (`brew install valkey`, `apt install redis-server`), "
            "or name a server with --url",
        )
    return ok(f"{facts.version} runs")


@dataclass(frozen=True, slots=True)
class EmbeddedFacts:
    """The embedded server. ``is_held``: some process holds the lock of its data."""

    is_running: bool
    is_held: bool
    memory_bytes: int = 0
    shown_log: str = ""


def embedded_facts(machine: Machine) -> EmbeddedFacts:
    """Ask it, if it runs; it is not started."""
    home = home_of(machine)
    log = machine.shown(home.log)
    if not home.path.is_dir():
        return EmbeddedFacts(False, False, 0, log)
    status = embedded.status(home)
    held = (home.path / "running.lock").exists() and embedded.holds_data(home)
    return EmbeddedFacts(status.is_running, held, status.memory_bytes or 0, log)


def judge_embedded(facts: EmbeddedFacts) -> Verdict:
    """A server that has the data and does not answer is in the way of every command."""
    if facts.is_running:
        return ok(f"the embedded server runs, in {facts.memory_bytes / 2**20:,.0f} MiB")
    if facts.is_held:
        return warn(
            "a process holds the data of the embedded server, and does not answer",
            f"it may be loading; if that lasts, `batchkv server stop`. {facts.shown_log} tells "
            "more",
        )
    return ok("the embedded server does not run; a command that needs it starts it")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Limits of open files of this process; None is no limit."""

    soft: int | None
    hard: int | None


def file_facts(machine: Machine) -> FileFacts:
    """As the kernel gives them to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    none = resource.RLIM_INFINITY
    return FileFacts(None if soft == none else soft, None if hard == none else hard)


def judge_files(facts: FileFacts) -> Verdict:
    """A worker raises its soft limit; the hard limit binds it."""
    way = "raise it: `ulimit -Hn 4096` as root, or LimitNOFILE or SoftResourceLimits of the service"
    if facts.hard is not None and facts.hard < FEW_FILES:
        return fail(f"only {facts.hard} files may be open at once", way)
    if facts.hard is not None and facts.hard < WANTED_FILES:
        return warn(f"only {facts.hard} files may be open at once; large models have many", way)
    shown = ["no limit" if each is None else f"{each:,}" for each in (facts.soft, facts.hard)]
    return ok(f"open files: {shown[0]}, at most {shown[1]}")


@dataclass(frozen=True, slots=True)
class VariableFacts:
    """Names of variables; no values, for those may be passwords."""

    of_mlx: tuple[str, ...]
    unknown: tuple[str, ...]


def variable_facts(machine: Machine) -> VariableFacts:
    """Of MLX and Metal, and those that begin with BATCHKV_ and that nobody reads."""
    names = sorted(name for name, value in machine.environ.items() if value)
    own = [name for name in names if name.startswith("BATCHKV_") and name not in VARIABLES]
    return VariableFacts(
        tuple(name for name in names if name.startswith(OTHERS)),
        tuple(own),
    )


def judge_variables(facts: VariableFacts) -> Verdict:
    """A variable that slows MLX, or one that does nothing because its name is wrong."""
    verdicts = [
        warn(f"{name} is set, which makes MLX much slower", f"unset {name}")
        for name in facts.of_mlx
        if name in SLOWING
    ]
    for name in facts.unknown:
        close = difflib.get_close_matches(name, sorted(VARIABLES), n=1, cutoff=0.75)
        hint = f"did you mean {close[0]}?" if close else "docs/settings.md lists all variables"
        verdicts.append(warn(f"{name} is not a setting of batchkv and does nothing", hint))
    verdicts += [
        warn(
            f"{name} is set, which changes how MLX computes",
            f"unset {name}, unless you know why it is set",
        )
        for name in facts.of_mlx
        if name not in SLOWING | HARMLESS
    ]
    return worst(verdicts, ok("no variable changes how MLX computes"))


CHECKS = (
    Check("server program", binary_facts, judge_binary),
    Check("embedded server", embedded_facts, judge_embedded),
    Check("open files", file_facts, judge_files),
    Check("variables", variable_facts, judge_variables),
)

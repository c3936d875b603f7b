"""The checks of Linux, and those of any machine: installation, programs, home folder."""

from __future__ import annotations

import platform
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from batchkv_producer.doctor import home_folder, installation, linux, programs
from batchkv_producer.doctor.contract import Check, Level, Verdict
from batchkv_producer.doctor.examine import MACHINE_CHECKS
from batchkv_producer.doctor.machine import Machine, Output
from batchkv_producer.doctor.runner import examine
from producer.doctor import recorded
from producer.doctor.recorded import a_linux, a_mac

ALL: dict[str, Check[Any]] = {
    check.name: check for check in MACHINE_CHECKS if "linux" in check.systems
}
CPUINFO = "model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu sse avx avx2 fma\n"
MEMINFO = (
    "MemTotal:       24613840 kB\nMemFree:        12000000 kB\nMemAvailable:   23000000 kB\n"
    "SwapTotal:       2097148 kB\nSwapFree:        2097148 kB\n"
)
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.free,memory.total",
              "--format=csv,noheader,nounits")  # fmt: skip
NVIDIA = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module"}
FILES = {"/proc/cpuinfo": CPUINFO, "/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/\n"}


def test_this_machine_is_well() -> None:
    """Where the suite runs, no check of the machine fails."""
    for check in ALL.values():
        verdict = examine(check, Machine())
        assert verdict is None or verdict.level is not Level.FAIL, (check.name, verdict)


@pytest.mark.parametrize(
    ("name", "files", "level", "words"),
    [
        ("processor", {"/proc/cpuinfo": CPUINFO.replace("avx2 ", "")}, Level.WARN, "without avx2"),
        ("processor", {}, Level.OK, "Xeon"),
        ("memory", {}, Level.OK, "21.9 of 23.5 GiB available"),
        ("memory", {"/proc/meminfo": MEMINFO.replace("23000000", "1000000")}, Level.WARN, "1.0 of"),
        ("memory", {"/proc/self/cgroup": "0::/box\n", "/sys/fs/cgroup/box/memory.max":
                    "8589934592\n"}, Level.WARN, "may use 8.0 GiB"),
        ("memory", {"/sys/fs/cgroup/memory.max": "max\n"}, Level.OK, "available"),
        ("memory", {"/proc/self/cgroup": "5:memory:/old\n",
                    "/sys/fs/cgroup/memory/old/memory.limit_in_bytes": "2147483648\n"},
         Level.WARN, "may use 2.0 GiB"),
    ],
)  # fmt: skip
def test_files_of_linux_are_judged(
    name: str,
    files: dict[str, str],
    level: Level,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processor and memory, with a container's limit, from files that the kernel writes."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    verdict = examine(ALL[name], a_linux(tmp_path, {**FILES, **files}))
    assert verdict is not None and verdict.level is level, verdict
    assert words in verdict.found


def test_a_machine_without_nvidia_has_no_such_check(tmp_path: Path) -> None:
    """Nothing is said of devices that are not there."""
    assert examine(ALL["NVIDIA"], a_linux(tmp_path, FILES)) is None


def test_a_driver_that_does_not_answer_fails(tmp_path: Path) -> None:
    """The kernel has the driver, and its tool gives an error."""
    machine = a_linux(tmp_path, NVIDIA, {NVIDIA_SMI: Output(9, "couldn't communicate")})
    verdict = examine(ALL["NVIDIA"], machine)
    assert verdict is not None and verdict.level is Level.FAIL


@pytest.mark.parametrize(
    ("text", "build", "level"),
    [
        (recorded.H200, "13", Level.FAIL),  # 570 is older than what CUDA 13 needs
        (recorded.H200, "12", Level.OK),
        (recorded.H200.replace("570", "535"), "12", Level.FAIL),
        (recorded.H200.replace("142884", "20000"), "12", Level.WARN),
        (recorded.H200, "", Level.WARN),
        (recorded.H200 * 8, "12", Level.OK),
    ],
)
def test_drivers_are_judged_by_the_build_of_mlx(text: str, build: str, level: Level) -> None:
    """Driver, build and free memory, from what nvidia-smi prints of an H200."""
    machine = Machine("linux", {}, Path("/root"), Path("/none"), recorded.recorded({}))
    rows = [line.split(", ") for line in text.splitlines()]
    facts = linux.NvidiaFacts(True, True, rows[0][1], tuple(row[0] for row in rows),
                              int(rows[0][2]), int(rows[0][3]), build, "0.32.4")  # fmt: skip
    verdict = linux.judge_nvidia(facts)
    assert verdict is not None and verdict.level is level, verdict
    assert linux.nvidia_facts(machine) == linux.NvidiaFacts(False)


@pytest.mark.parametrize(("driver", "build"), [("570.195.03", "12"), ("580.65.06", "13")])
def test_the_build_of_mlx_that_is_missing_is_one_for_the_driver(driver: str, build: str) -> None:
    """A device, and MLX for CPUs: the fix installs MLX's own version, for the driver's CUDA."""
    facts = linux.NvidiaFacts(True, True, driver, ("NVIDIA H200",), 142884, 143771, "", "0.32.4")
    verdict = linux.judge_nvidia(facts)
    assert verdict is not None
    assert f"`pip install 'mlx[cuda{build}]==0.32.4'`" in verdict.todo


@pytest.mark.parametrize(
    ("found", "clauses", "fits"),
    [
        ("0.32.4", ">=0.32.4,<0.33", True),
        ("0.32.10", ">=0.32.4,<0.33", True),
        ("0.33.0", ">=0.32.4,<0.33", False),
        ("0.31.9", ">=0.32.4,<0.33", False),
        ("1.0", "==1.0.0", True),
    ],
)
def test_versions_are_compared_by_numbers(found: str, clauses: str, fits: bool) -> None:
    """As pip would, for the plain versions that our requirements have."""
    assert installation.is_allowed(found, clauses) is fits


@pytest.mark.parametrize(
    ("installed", "level"),
    [
        ({"mlx": "0.32.4", "mlx-lm": "0.32.2"}, Level.OK),
        ({"mlx": None, "mlx-lm": None}, Level.OK),  # a machine that submits only
        ({"mlx": "0.32.4", "mlx-lm": None}, Level.FAIL),
        ({"mlx": "0.33.0", "mlx-lm": "0.32.2"}, Level.FAIL),
        ({"mlx": "0.32.5", "mlx-lm": "0.32.2"}, Level.WARN),
    ],
)
def test_versions_of_mlx_are_judged(installed: dict[str, str | None], level: Level) -> None:
    """What the requirements forbid fails; what the lock file does not name is a warning."""
    facts = installation.VersionFacts(
        installed,
        {"mlx": ">=0.32.4,<0.33", "mlx-lm": ">=0.32.2,<0.33"},
        {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
    )
    assert installation.judge_versions(facts).level is level


def test_the_versions_of_this_installation_are_read() -> None:
    """The range comes from pip's notes, the pin from the lock file of the clone."""
    facts = installation.version_facts(Machine())
    assert set(facts.locked) == {"mlx", "mlx-lm"}
    for name, pin in facts.locked.items():
        assert installation.is_allowed(pin, facts.allowed[name])
        assert not installation.is_allowed("0.1", facts.allowed[name])


def test_code_that_moved_is_an_old_installation() -> None:
    """A noted entry point whose module is gone fails; one that was never noted is a warning."""
    gone = EntryPoint("why", "batchkv_producer.no_such_module:why", "batchkv.cache_commands")
    assert not installation.has_module(gone)
    here = EntryPoint("cache", "batchkv_cache_store.cli:cache", "batchkv.commands")
    assert installation.has_module(here)
    noted = frozenset({"batchkv.commands: cache = batchkv_cache_store.cli:cache"})
    judge = installation.judge_entries
    assert judge(installation.EntryFacts(noted, noted, ("why",))).level is Level.FAIL
    newer = noted | {"batchkv.commands: other = batchkv_worker.other:other"}
    assert judge(installation.EntryFacts(noted, newer)).level is Level.WARN
    assert judge(installation.EntryFacts(noted, noted)).level is Level.OK
    assert judge(installation.EntryFacts(None, None)).level is Level.WARN


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (installation.PythonFacts((3, 12, 1), "arm64", 64, True), Level.OK),
        (installation.PythonFacts((3, 9, 6), "arm64", 64, True), Level.FAIL),
        (installation.PythonFacts((3, 12, 1), "armv7l", 32, True), Level.FAIL),
        (installation.PythonFacts((3, 12, 1), "x86_64", 64, True, (2, 31)), Level.FAIL),
        (installation.PythonFacts((3, 12, 1), "x86_64", 64, False, (2, 35)), Level.OK),
    ],
)
def test_interpreters_are_judged(facts: installation.PythonFacts, level: Level) -> None:
    """Old ones, ones of 32 bits and an old C library fail."""
    assert installation.judge_python(facts).level is level


def home(changes: dict[str, Any]) -> Verdict:
    facts = {"free_bytes": 10**12, "file_system": "ext4", **changes}
    return home_folder.judge_home(home_folder.HomeFacts("~/.batchkv", True, **facts))


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, Level.OK),
        ({"mode": 0o755}, Level.FAIL),
        ({"is_own": False}, Level.FAIL),
        ({"is_folder": False}, Level.FAIL),
        ({"is_writable": False}, Level.FAIL),
        ({"locks": False}, Level.FAIL),
        ({"free_bytes": 10**7}, Level.FAIL),
        ({"free_bytes": 10**9}, Level.WARN),
        ({"file_system": "nfs4"}, Level.WARN),
    ],
)
def test_home_folders_are_judged(changes: dict[str, Any], level: Level) -> None:
    """Rights, locks, room and kind of disk of the home folder."""
    assert home(changes).level is level


def test_the_home_folder_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    """Its rights and locks are found; nothing remains in it."""
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    machine = a_linux(tmp_path, {"/proc/self/mounts": recorded.MOUNTS}, {},
                      {"BATCHKV_HOME": str(folder)})  # fmt: skip
    facts = home_folder.home_facts(machine)
    assert (facts.exists, facts.mode, facts.locks, facts.is_own) == (True, 0o700, True, True)
    assert not list(folder.iterdir())
    folder.chmod(0o755)
    verdict = home_folder.judge_home(home_folder.home_facts(machine))
    assert verdict.level is Level.FAIL and "755" in verdict.found


def test_locks_that_keep_nobody_out_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a volume where every lock is granted, the check of the home folder sees it."""
    monkeypatch.setattr(home_folder.fcntl, "flock", lambda *_: None)
    assert not home_folder.locks_hold(tmp_path)


def test_mounts_of_linux_are_read() -> None:
    """The longest place that holds the folder says its kind."""
    kind = home_folder.type_in_mounts
    assert kind(recorded.MOUNTS, "/home/alice/shared/kv") == "nfs4"
    assert kind(recorded.MOUNTS, "/home/alice/kv") == "ext4"
    assert kind(recorded.MOUNTS, "/srv") == "overlay"


@pytest.mark.parametrize(
    ("free", "writable", "level"),
    [(10**11, True, Level.OK), (10**9, True, Level.WARN), (10**11, False, Level.WARN)],
)
def test_room_for_models_is_judged(free: int, writable: bool, level: Level) -> None:
    """A full disk, or a folder that is closed, keeps a model from being downloaded."""
    facts = home_folder.ModelDiskFacts("~/.cache/huggingface/hub", free, writable)
    assert home_folder.judge_model_disk(facts).level is level


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_server_program_that_does_not_run_fails(tmp_path: Path) -> None:
    """A truncated program, and one whose signature macOS does not accept."""
    broken = program(tmp_path / "valkey-server", "\x7fELF")
    facts = programs.binary_facts(Machine(), lambda: iter([broken]))
    assert programs.judge_binary(facts).level is Level.FAIL
    good = program(tmp_path / "good", "#!/bin/sh\necho 'Valkey server v=9.1.2 sha=0'\n")
    facts = programs.binary_facts(Machine("linux"), lambda: iter([good]))
    assert programs.judge_binary(facts) == Verdict(Level.OK, "valkey 9.1.2 runs")
    asked = ("codesign", "-v", str(good))
    mac = a_mac(tmp_path, {asked: Output(1, recorded.UNSIGNED)})
    verdict = programs.judge_binary(programs.binary_facts(mac, lambda: iter([good])))
    assert verdict.level is Level.FAIL and "signature" in verdict.found
    mac = a_mac(tmp_path, {asked: ""})
    facts = programs.binary_facts(mac, lambda: iter([good]))
    assert programs.judge_binary(facts).level is Level.OK


@pytest.mark.parametrize(
    ("hard", "level"), [(None, Level.OK), (1024, Level.WARN), (256, Level.FAIL)]
)
def test_limits_of_open_files_are_judged(hard: int | None, level: Level) -> None:
    """launchd's 256 files are too few; a worker raises the soft limit by itself."""
    assert programs.judge_files(programs.FileFacts(256, hard)).level is level


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [
        ("MLX_DISABLE_COMPILE", Level.WARN, "slower"),
        ("MLX_MAX_OPS_PER_BUFFER", Level.WARN, "changes how MLX computes"),
        ("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", Level.OK, "no variable"),
        ("BATCHKV_SLOT", Level.WARN, "does nothing"),
        ("BATCHKV_SLOTS", Level.OK, "no variable"),
    ],
)
def test_variables_are_judged(name: str, level: Level, words: str, tmp_path: Path) -> None:
    """Variables that slow MLX, and settings that nobody reads; values are never shown."""
    machine = a_linux(tmp_path, {}, {}, {name: "a-secret-value"})
    verdict = examine(ALL["variables"], machine)
    assert verdict is not None and verdict.level is level
    assert words in verdict.found and "secret" not in f"{verdict.found} {verdict.todo}"


def test_every_variable_is_named(tmp_path: Path) -> None:
    """A variable that slows MLX hides none that does nothing."""
    machine = a_linux(tmp_path, {}, {}, {"MTL_DEBUG_LAYER": "1", "BATCHKV_SLOT": "3"})
    verdict = examine(ALL["variables"], machine)
    assert verdict is not None
    assert "MTL_DEBUG_LAYER" in verdict.found and "BATCHKV_SLOT" in verdict.found
    assert "did you mean BATCHKV_SLOTS?" in verdict.todo


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (programs.EmbeddedFacts(True, True, 2**20), Level.OK),
        (programs.EmbeddedFacts(False, True), Level.WARN),
        (programs.EmbeddedFacts(False, False), Level.OK),
    ],
)
def test_the_embedded_server_is_judged(facts: programs.EmbeddedFacts, level: Level) -> None:
    """One that holds its data and does not answer is in the way."""
    assert programs.judge_embedded(facts).level is level

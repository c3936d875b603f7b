"""Every check of a Mac on recorded outputs: it finds nothing on a good Mac, and each fault."""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchkv_producer.doctor.contract import Check, Level
from batchkv_producer.doctor.examine import MACHINE_CHECKS
from batchkv_producer.doctor.home_folder import HomeFacts, judge_home, type_in_mounts_of_mac
from batchkv_producer.doctor.mac import chip, memory, network, power
from batchkv_producer.doctor.mac.mach_o import minimum_os
from batchkv_producer.doctor.machine import Machine, Output
from batchkv_producer.doctor.runner import examine
from producer.doctor import recorded
from producer.doctor.recorded import a_mac, install_plist

OURS: dict[str, Check[Any]] = {
    check.name: check for check in MACHINE_CHECKS if check.systems == ("darwin",)
}
GIB = 2**30
WORKER, HUB = "dev.batchkv.worker", "dev.batchkv.queue"
PRINT_WORKER = ("launchctl", "print", f"gui/501/{WORKER}")
SYSCTL = ("sysctl", "-n")


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter says what one for Apple silicon says."""
    monkeypatch.setattr(platform, "machine", lambda: "arm64")


def printed(text: str, runs: int = 1, last: str = "(never exited)", config: str = "-c") -> str:
    return text.format(label=WORKER, runs=runs, last=last, config=config)


@pytest.mark.parametrize("name", OURS)
def test_a_mac_that_lacks_nothing_is_well(name: str, tmp_path: Path) -> None:
    """On the recorded Mac every check of a Mac is ok, or does not apply."""
    verdict = examine(OURS[name], a_mac(tmp_path))
    assert verdict is None or verdict.level is Level.OK, verdict


Planted = tuple[str, Mapping[tuple[str, ...], str | Output], Level, str]
FAULTS: dict[str, Planted] = {
    "Intel": ("Mac", {(*SYSCTL, "machdep.cpu.brand_string"): "Intel(R) Core(TM) i9\n"},
              Level.FAIL, "needs Apple silicon"),
    "Rosetta": ("Mac", {(*SYSCTL, "sysctl.proc_translated"): "1\n"}, Level.FAIL, "Rosetta"),
    "macOS 13": ("Mac", {("sw_vers",): recorded.SW_VERS.replace("14.2.1", "13.7")},
                 Level.FAIL, "macOS 14 or newer"),
    "pressure": ("memory", {(*SYSCTL, "kern.memorystatus_vm_pressure_level"): "4\n"},
                 Level.WARN, "critical"),
    "swap": ("memory", {(*SYSCTL, "vm.swapusage"): recorded.SWAP_MUCH}, Level.WARN, "8.9 GiB"),
    "wired limit": ("memory", {(*SYSCTL, "iogpu.wired_limit_mb"): "23552\n"},
                    Level.WARN, "iogpu.wired_limit_mb"),
    "battery": ("power", {("pmset", "-g", "batt"): recorded.ON_BATTERY}, Level.WARN, "97 %"),
    "low power": ("power", {("pmset", "-g"): recorded.PMSET_LAPTOP.replace(
        "lowpowermode         0", "lowpowermode         1")}, Level.WARN, "Low Power Mode"),
    "lid": ("power", {("ioreg", "-r", "-k", "AppleClamshellState", "-d", "1"):
                      recorded.LID_CLOSED}, Level.WARN, "lid is closed"),
    "heat": ("heat", {("pmset", "-g", "therm"): recorded.HOT}, Level.WARN, "62 %"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_fault_is_found(fault: str, tmp_path: Path) -> None:
    """One other answer of one tool, and its check says what was found and what to do."""
    name, changes, level, words = FAULTS[fault]
    verdict = examine(OURS[name], a_mac(tmp_path, changes))
    assert verdict is not None
    assert (verdict.level, verdict.todo != "") == (level, True), verdict
    assert words in verdict.found


SERVICE_FAULTS: dict[str, tuple[str, Mapping[tuple[str, ...], str | Output], Level, str]] = {
    "not loaded": ("services", {}, Level.FAIL, "not loaded"),
    "no desktop": ("services", {("launchctl", "print", "gui/501"): Output(125, "")},
                   Level.FAIL, "nobody is logged in at the desktop"),
    "crash loop": ("services", {PRINT_WORKER: printed(recorded.NOT_RUNNING, 41, "2")},
                   Level.FAIL, "its configuration is wrong"),
    "named code": ("services", {PRINT_WORKER: printed(recorded.NOT_RUNNING, 9, "78: EX_CONFIG")},
                   Level.FAIL, "cannot run its program"),
    "no login": (
        "services",
        {
            PRINT_WORKER: printed(recorded.RUNNING),
            (
                "defaults",
                "read",
                "/Library/Preferences/com.apple.loginwindow",
                "autoLoginUser",
            ): Output(1, ""),
        },
        Level.WARN,
        "until somebody logs in",
    ),
    "stopped": (
        "services",
        {PRINT_WORKER: printed(recorded.NOT_RUNNING, 1, "0")},
        Level.WARN,
        "does not run",
    ),
    "restarts": ("services", {PRINT_WORKER: printed(recorded.RUNNING, 17, "70")},
                 Level.WARN, "its engine died"),
    "FileVault": ("services", {PRINT_WORKER: printed(recorded.RUNNING),
                               ("fdesetup", "status"): recorded.VAULT_ON,
                               ("defaults", "read", "/Library/Preferences/com.apple.loginwindow",
                                "autoLoginUser"): Output(1, "")},
                  Level.WARN, "FileVault"),
    "asleep": ("sleep", {("pmset", "-g", "assertions"): recorded.NO_ASSERTIONS},
               Level.WARN, "nothing keeps it awake"),
    "stays off": ("sleep", {("pmset", "-g"): recorded.PMSET_STUDIO}, Level.WARN, "stays off"),
    "place": ("places", {}, Level.WARN, "in ~/Documents"),
    "volume": ("places", {}, Level.WARN, "on another volume"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SERVICE_FAULTS)
def test_a_fault_of_a_service_is_found(fault: str, tmp_path: Path) -> None:
    """With an agent installed, what would keep it from working is said."""
    name, changes, level, words = SERVICE_FAULTS[fault]
    home = tmp_path / "Users" / "alice"
    environ = {
        "place": {"BATCHKV_HOME": str(home / "Documents" / "kv")},
        "volume": {"BATCHKV_CACHE": "disk:/Volumes/fast/blocks?max=9GB"},
    }.get(fault, {})
    mac = a_mac(tmp_path, changes, environ)
    install_plist(mac, WORKER)
    verdict = examine(OURS[name], mac)
    assert verdict is not None
    assert (verdict.level, verdict.todo != "") == (level, True), verdict
    assert words in verdict.found


# Checks whose faults have tests of their own below. A display that is awake is no fault.
OTHER_FAULTS = {"hub on this Mac", "firewall", "crash reports", "MLX build", "display"}


def test_every_check_of_a_mac_has_a_planted_fault() -> None:
    """A new check without one fails here."""
    planted = {name for name, *_ in [*FAULTS.values(), *SERVICE_FAULTS.values()]}
    assert planted | OTHER_FAULTS == set(OURS)


def test_a_service_that_runs_is_well(tmp_path: Path) -> None:
    """A loaded agent that runs and a user who is logged in automatically: nothing to say."""
    mac = a_mac(tmp_path, {PRINT_WORKER: printed(recorded.RUNNING)})
    install_plist(mac, WORKER)
    verdict = examine(OURS["services"], mac)
    assert verdict is not None and verdict.level is Level.OK
    assert "1 of 1 services run" in verdict.found


@pytest.mark.parametrize("is_daemon", [False, True])
def test_an_encrypted_disk_waits_for_its_password(is_daemon: bool, tmp_path: Path) -> None:
    """With FileVault neither an agent nor a daemon starts before somebody unlocks the disk."""
    domain = "system" if is_daemon else "gui/501"
    login = ("defaults", "read", "/Library/Preferences/com.apple.loginwindow", "autoLoginUser")
    changes: dict[tuple[str, ...], str | Output] = {
        ("launchctl", "print", f"{domain}/{WORKER}"): printed(recorded.RUNNING),
        ("fdesetup", "status"): recorded.VAULT_ON,
        login: Output(1, ""),
    }
    mac = a_mac(tmp_path, changes)
    install_plist(mac, WORKER, is_daemon=is_daemon)
    verdict = examine(OURS["services"], mac)
    assert verdict is not None and verdict.level is (Level.OK if is_daemon else Level.WARN)
    assert "unlock" in verdict.found + verdict.todo and "fdesetup authrestart" in verdict.todo


def test_agent_and_daemon_of_one_label_are_too_many(tmp_path: Path) -> None:
    """Two workers of one label would share a log and a name."""
    system_label = ("launchctl", "print", f"system/{WORKER}")
    runs = printed(recorded.RUNNING)
    mac = a_mac(tmp_path, {PRINT_WORKER: runs, system_label: runs})
    install_plist(mac, WORKER)
    install_plist(mac, WORKER, is_daemon=True)
    verdict = examine(OURS["services"], mac)
    assert verdict is not None and verdict.level is Level.FAIL
    assert "as an agent and as a daemon" in verdict.found


@pytest.mark.parametrize(("total", "level"), [(8, Level.WARN), (16, Level.WARN), (64, Level.OK)])
def test_a_hub_leaves_the_worker_its_share(total: int, level: Level, tmp_path: Path) -> None:
    """4 and 8 GB for the hub's servers are too much on a small Mac."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "queue.conf").write_text("port 6379\nmaxmemory 4gb\n")
    (tmp_path / "hub" / "cache.conf").write_text("maxmemory 8gb\n")
    changes: dict[tuple[str, ...], str | Output] = {
        ("launchctl", "print", f"gui/501/dev.batchkv.{kind}"):
            printed(recorded.RUNNING, config=f"/hub/{kind}.conf") for kind in ("queue", "cache")
    }  # fmt: skip
    changes[(*SYSCTL, "hw.memsize")] = f"{total * GIB}\n"
    verdict = examine(OURS["hub on this Mac"], a_mac(tmp_path, changes))
    assert verdict is not None and verdict.level is level
    assert "12.0 of" in verdict.found


def test_a_display_that_is_awake_brings_the_workaround(tmp_path: Path) -> None:
    """It is no fault, but the GPU may be interrupted: the two ways around are named."""
    verdict = examine(OURS["display"], a_mac(tmp_path))
    assert verdict is not None and "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in verdict.todo
    dark = examine(OURS["display"], a_mac(tmp_path, {("pmset", "-g", "systemstate"):
                                                     recorded.DARK}))  # fmt: skip
    assert dark is not None and not dark.todo


def test_the_firewall_matters_to_a_hub_only(tmp_path: Path) -> None:
    """Without a server here nothing is said; with one, blocking everything is a fault."""
    tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    mac = a_mac(tmp_path, {(tool, "--getglobalstate"): recorded.FIREWALL_ON,
                           (tool, "--getblockall"): recorded.BLOCKS_ALL})  # fmt: skip
    assert examine(OURS["firewall"], mac) is None
    install_plist(mac, HUB)
    verdict = examine(OURS["firewall"], mac)
    assert verdict is not None and verdict.level is Level.WARN


@pytest.mark.parametrize(
    ("interface", "bridge", "level", "words"),
    [
        ("en0", recorded.BRIDGE_DOWN, Level.OK, "by Ethernet"),
        ("en1", recorded.BRIDGE_DOWN, Level.WARN, "by Wi-Fi"),
        ("bridge0", recorded.BRIDGE_UP, Level.OK, "by Thunderbolt Bridge"),
        ("lo0", recorded.BRIDGE_DOWN, Level.OK, "on this Mac"),
    ],
)
def test_the_way_to_a_server_is_judged(
    interface: str, bridge: str, level: Level, words: str, tmp_path: Path
) -> None:
    """Wi-Fi is slow for blocks of the cache."""
    changes: dict[tuple[str, ...], str | Output] = {
        ("route", "-n", "get", "hub"): recorded.ROUTE.replace("en0", interface),
        ("networksetup", "-listallhardwareports"): recorded.PORTS,
        ("ifconfig", "bridge0"): bridge,
    }
    verdict = network.judge_route(network.route_facts(a_mac(tmp_path, changes), "hub"))
    assert verdict is not None and verdict.level is level and words in verdict.found, verdict


def test_a_thunderbolt_link_that_is_not_used_is_named(tmp_path: Path) -> None:
    """Two Macs are linked, and the server's address goes by Ethernet."""
    facts = network.RouteFacts("Ethernet", has_bridge=True)
    verdict = network.judge_route(facts)
    assert verdict is not None and "Thunderbolt" in verdict.todo
    assert network.judge_route(network.route_facts(a_mac(tmp_path), "hub")) is None


def report(machine: Machine, name: str, text: str, hours_old: float) -> None:
    folder = machine.user_home / "Library" / "Logs" / "DiagnosticReports"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    then = (folder / name).stat().st_mtime - hours_old * 3600
    os.utime(folder / name, (then, then))


def test_recent_reports_of_crashes_are_counted(tmp_path: Path) -> None:
    """Panics of the GPU's driver and memory events of three days count; older ones do not."""
    mac = a_mac(tmp_path)
    report(mac, "panic-full-2026-06-20.panic", recorded.GPU_PANIC, 100)
    verdict = examine(OURS["crash reports"], mac)
    assert verdict is not None and verdict.level is Level.OK
    report(mac, "panic-full-2026-06-25.panic", recorded.GPU_PANIC, 5)
    report(mac, "JetsamEvent-2026-06-25-101112.ips", recorded.JETSAM, 6)
    verdict = examine(OURS["crash reports"], mac)
    assert verdict is not None and verdict.level is Level.WARN
    assert "panics of the GPU's driver in three days: 1" in verdict.found
    assert "Python was the largest process" in verdict.found


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("panic-full-2026-06-25.panic", "panic(cpu 0): NVMe", "other kernel panics"),
        ("python3.12-2026-06-25-1.ips", '{"image": "libmlx.dylib"}', "crashes of Python in MLX"),
    ],
)
def test_other_crashes_are_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    """A panic of another driver, and an interpreter that crashed in MLX."""
    mac = a_mac(tmp_path)
    report(mac, name, text, 5)
    verdict = examine(OURS["crash reports"], mac)
    assert verdict is not None and verdict.level is Level.WARN and words in verdict.found


def test_a_hub_without_a_limit_is_named(tmp_path: Path) -> None:
    """A server without maxmemory may take all of the Mac's memory."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "queue.conf").write_text("port 6379\n")
    shown = printed(recorded.RUNNING, config="/hub/queue.conf")
    mac = a_mac(tmp_path, {("launchctl", "print", f"gui/501/{HUB}"): shown})
    verdict = examine(OURS["hub on this Mac"], mac)
    assert verdict is not None and verdict.level is Level.WARN
    assert "has no maxmemory" in verdict.found


BUILDS = {
    "as it should be": ((26, 0), (26, 2, 0), (26, 4), "Apple M5", Level.OK),
    "kernels of a newer macOS": ((26, 0), (26, 2, 0), (26, 1), "Apple M5", Level.FAIL),
    "without the units of an M5": ((15, 0), (15, 0, 0), (26, 4), "Apple M5 Max", Level.WARN),
    "an M5 on the first macOS 26": ((15, 0), (15, 0, 0), (26, 1), "Apple M5", Level.WARN),
    "an M4 needs no units": ((14, 0), (14, 0, 0), (15, 6, 1), "Apple M4", Level.OK),
}


@pytest.mark.parametrize("name", BUILDS)
def test_the_build_of_mlx_fits_chip_and_macos(name: str) -> None:
    """A build for a newer macOS lacks kernels here; one for an older leaves an M5's units idle."""
    wheel, minimum, macos, name_of_chip, level = BUILDS[name]
    verdict = chip.judge_build(chip.BuildFacts(True, wheel, minimum, macos, name_of_chip))
    assert verdict is not None and verdict.level is level
    # An environment that has the version already would keep the other build of it.
    assert ("make distclean venv" in verdict.todo) is (level is Level.WARN)


def mach_o(commands: list[bytes]) -> bytes:
    """The head of a 64-bit library for Apple silicon with these load commands."""
    header = struct.pack("<IIIIIIII", 0xFEEDFACF, 0x0100000C, 0, 6, len(commands), 0, 0, 0)
    return header + b"".join(commands)


UUID = struct.pack("<II16s", 0x1B, 24, b"0" * 16)
BUILD_26_2 = struct.pack("<IIIIII", 0x32, 24, 1, 26 << 16 | 2 << 8, 26 << 16, 0)


def test_the_lowest_macos_of_a_library_is_read() -> None:
    """From LC_BUILD_VERSION behind other commands, from LC_VERSION_MIN_MACOSX, in a fat file."""
    assert minimum_os(mach_o([UUID, BUILD_26_2])) == (26, 2, 0)
    old = struct.pack("<IIII", 0x24, 16, 11 << 16, 12 << 16)
    assert minimum_os(mach_o([old])) == (11, 0, 0)
    thin = mach_o([BUILD_26_2])
    fat = struct.pack(">II", 0xCAFEBABE, 1) + struct.pack(">IIIII", 0x0100000C, 0, 64, len(thin), 6)
    assert minimum_os(fat.ljust(64, b"\0") + thin) == (26, 2, 0)


@pytest.mark.parametrize(
    ("tag", "lowest"),
    [("macosx_14_0", (14, 0, 0)), ("macosx_15_0", (15, 0, 0)), ("macosx_26_0", (26, 2, 0))],
)
def test_mlxs_own_library_says_from_which_macos_it_runs(tag: str, lowest: tuple[int, ...]) -> None:
    """The head of the real library of each wheel; that of 26.0 needs 26.2."""
    commands = [struct.pack("<II", *each).ljust(each[1], b"\0") for each in recorded.MLX_LIBRARY]
    build = struct.pack("<IIIIII", *recorded.MLX_BUILD[tag]).ljust(32, b"\0")
    assert minimum_os(mach_o([*commands, build])) == lowest


@pytest.mark.parametrize("data", [b"", b"\x7fELF", mach_o([BUILD_26_2])[:40], mach_o([b"\0" * 8])])
def test_what_is_no_library_says_nothing(data: bytes) -> None:
    """A file that is cut short, or another one, has no lowest macOS; nothing is raised."""
    assert minimum_os(data) == ()


def test_outputs_are_read_to_numbers() -> None:
    """Swap, pages and settings, from the recorded texts."""
    assert memory.swap_used(recorded.SWAP_LITTLE) == int(710.81 * 2**20)
    assert memory.available(recorded.VM_STAT) == (45231 + 234521 + 12345 + 23456) * 16384
    assert power.settings_in(recorded.PMSET_LAPTOP)["sleep"] == "1"
    assert power.settings_in(recorded.PMSET_LAPTOP)["Sleep On Power Button"] == "1"
    assert power.settings_in(recorded.PMSET_STUDIO)["autorestart"] == "0"
    assert power.keepers(recorded.ASSERTIONS) == ("caffeinate",)


def test_the_file_system_of_a_folder_is_read() -> None:
    """The longest place that holds the folder says it."""
    assert type_in_mounts_of_mac(recorded.MOUNT_OF_MAC, "/Volumes/home/kv") == "smbfs"
    assert type_in_mounts_of_mac(recorded.MOUNT_OF_MAC, "/Users/alice") == "apfs"


def test_a_network_volume_is_no_home() -> None:
    """Locks and the server's data need a disk of this machine."""
    facts = HomeFacts("/Volumes/home/kv", True, file_system="smbfs", free_bytes=10**12)
    assert judge_home(facts).level is Level.WARN
    assert judge_home(replace(facts, file_system="apfs")).level is Level.OK


@pytest.mark.parametrize(
    "spoil", [lambda text: "", lambda text: text[: len(text) // 2], lambda text: "\ufffd\0 = = \n"]
)
def test_no_output_breaks_a_check(spoil: Callable[[str], str], tmp_path: Path) -> None:
    """Tools that print nothing, half or nonsense make no check raise, and none fail."""
    changes: dict[tuple[str, ...], str | Output] = {}
    for command, answer in recorded.MAC_COMMANDS.items():
        changes[command] = spoil(answer if isinstance(answer, str) else answer.text)
    mac = a_mac(tmp_path, changes)
    install_plist(mac, WORKER)
    for name, check in OURS.items():
        verdict = check.judge(check.gather(mac))
        assert verdict is None or verdict.level is not Level.FAIL or name in ("Mac", "services")

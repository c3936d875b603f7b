"""What tools of macOS and Linux print, recorded, and a machine that answers with it.

Sources are named beside each text. Where a report showed a part of an output, the rest is in the
format of the tool's manual page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from batchkv_producer.doctor.machine import Machine, Output, Runner

# sw_vers(1), as the page of pmset for macOS 14.2.1 at sudo.is shows it.
SW_VERS = "ProductName:\t\tmacOS\nProductVersion:\t\t14.2.1\nBuildVersion:\t\t23C71\n"

# pmset -g of a MacBook Air on its charger: a guide on sleep settings in a public repository.
PMSET_LAPTOP = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         0
 womp                 0
"""
# pmset -g custom of a Mac Studio: the fixture of a probe for unattended hosts.
PMSET_STUDIO = """AC Power:
 Sleep On Power Button 1
 autorestartatconnect 0
 lowpowermode         0
 standby              0
 ttyskeepawake        1
 powernap             1
 displaysleep         0
 womp                 1
 networkoversleep     0
 sleep                0
 tcpkeepalive         1
 autorestart          0
 disksleep            0
"""
# pmset -g batt, as several monitors record it; the second is of a Mac without a battery.
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=22675555)\t97%; discharging; 4:09 remaining present: true
"""
ON_MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=22675555)\t100%; charged; 0:00 remaining present: true
"""
DESKTOP = "Now drawing from 'AC Power'\n"
# pmset -g assertions with caffeinate on behalf of a process: the fixture of a sleep guard.
ASSERTIONS = """2026-08-31 19:27:51 -0300
Assertion status system-wide:
   PreventUserIdleSystemSleep     1
Listed by owning process:
   pid 7591(caffeinate): [0x004c3689000198ef] 124:49:32 PreventUserIdleSystemSleep named: \
"caffeinate command-line tool"
\tDetails: caffeinate asserting on behalf of Process ID 7584
   pid 157(powerd): [0x0000000f00108005] 00:00:41 PreventUserIdleSystemSleep named: \
"Powerd - Prevent sleep while display is on"
   pid 578(dasd): [0x004c36890007ffff] 12:00:00 BackgroundTask named: "dasd"
Kernel Assertions: 0x104=USB,MAGICWAKE
"""
NO_ASSERTIONS = """2026-08-31 19:27:51 -0300
Assertion status system-wide:
   PreventUserIdleSystemSleep     0
Listed by owning process:
"""
# pmset -g therm: Apple silicon when cool; and a notification with tabs, when it is not.
COOL = (
    "Note: No thermal warning level has been recorded\n"
    "Note: No performance warning level has been recorded\n"
)
COOL_WITH_LIMITS = f"""{COOL}2026-08-20 05:08:37 -0700 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 12
\tCPU_Speed_Limit \t= 100
"""
HOT = COOL_WITH_LIMITS.replace("Speed_Limit \t= 100", "Speed_Limit \t= 62")
# pmset -g systemstate, awake and in a dark wake.
AWAKE = "Current System Capabilities are: CPU Graphics Audio Network \nCurrent Power State: 4\n"
DARK = "Current System Capabilities are: CPU Network \nCurrent Power State: 4\n"
# ioreg -r -k AppleClamshellState.
LID_OPEN = (
    '+-o IOPMrootDomain  <class IOPMrootDomain>\n    {\n      "AppleClamshellState" = No\n    }\n'
)
LID_CLOSED = LID_OPEN.replace("No", "Yes")
# sysctl -n vm.swapusage, of two Macs in reports about memory.
SWAP_LITTLE = "total = 2048.00M  used = 710.81M  free = 1337.19M  (encrypted)\n"
SWAP_MUCH = "total = 10240.00M  used = 9105.88M  free = 1134.12M  (encrypted)\n"
# vm_stat, as a book on macOS shows it.
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               45231.
Pages active:                            892341.
Pages inactive:                          234521.
Pages speculative:                        12345.
Pages throttled:                              0.
Pages wired down:                        456789.
Pages purgeable:                          23456.
"Translation faults":                1234567890.
Pages occupied by compressor:            123456.
"""
# launchctl print of a loaded job (wazuh-packages#2206), in the order of macOS 15.
RUNNING = """{label} = {{
\tactive count = 1
\tpath = /Users/alice/Library/LaunchAgents/{label}.plist
\ttype = LaunchAgent
\tstate = running

\tprogram = /bin/sh
\targuments = {{
\t\t/bin/sh
\t\t{config}
\t}}

\tdefault environment = {{
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}}

\tdomain = gui/501 [100004]
\tminimum runtime = 30
\texit timeout = 120
\truns = {runs}
\tpid = 1486
\timmediate reason = speculative
\tforks = 3
\texecs = 1
\tlast exit code = {last}

\tspawn type = interactive (4)
\tendpoints = {{
\t}}
\tproperties = runatload | inferred program
}}
"""
NOT_RUNNING = RUNNING.replace("state = running", "state = not running").replace(
    "\tpid = 1486\n", ""
)
# What launchctl says of a job that is not loaded (exit code 113), toss-agent-runtime#40.
NOT_LOADED = 'Bad request.\nCould not find service "{label}" in domain for user gui: 501\n'
# bootstrap without a login at the desktop.
NO_DESKTOP = "Bootstrap failed: 125: Domain does not support specified action\n"
VAULT_ON, VAULT_OFF = "FileVault is On.\n", "FileVault is Off.\n"
FIREWALL_ON = "Firewall is enabled. (State = 1)\n"
FIREWALL_OFF = "Firewall is disabled. (State = 0)\n"
BLOCKS_ALL = "Firewall has block all state set to enabled.\n"
BLOCKS_NONE = "Firewall has block all state set to disabled.\n"
# codesign -v: silent when all is well (exit code 0), a line and exit code 1 when it is not.
UNSIGNED = (
    "{path}: invalid signature (code or signature have been modified)\nIn architecture: arm64\n"
)
# The load commands (kind, bytes) of libmlx.dylib in mlx_metal 0.32.4's wheels, up to the one that
# names the system, and that one: platform, lowest macOS, SDK, number of tools, a tool. By the
# wheel's tag; what stands between is left out.
MLX_LIBRARY = ((0x19, 712), (0x19, 232), (0x19, 552), (0x19, 72), (0xD, 48), (0x80000034, 16),
               (0x80000033, 16), (0x2, 24), (0xB, 80), (0x1B, 24))  # fmt: skip
MLX_BUILD = {
    "macosx_14_0": (0x32, 32, 1, 917504, 1705216, 1),
    "macosx_15_0": (0x32, 32, 1, 983040, 1705216, 1),
    "macosx_26_0": (0x32, 32, 1, 1704448, 1705216, 1),
}
# mount(8) on macOS 14.
MOUNT_OF_MAC = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
devfs on /dev (devfs, local, nobrowse)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse, protect, root data)
//alice@nas._smb._tcp.local/home on /Volumes/home (smbfs, nodev, nosuid, mounted by alice)
"""
# proc_pid_mounts(5).
MOUNTS = """overlay / overlay rw,relatime,lowerdir=/l 0 0
proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0
/dev/sda1 /home ext4 rw,relatime 0 0
hub:/export/home /home/alice/shared nfs4 rw,relatime,vers=4.2 0 0
"""
# A panic of the GPU's driver, the first lines of mlx-lm#1666.
GPU_PANIC = """{"bug_type":"210","os_version":"macOS 26.5"}
{"panicString" : "panic(cpu 9 caller 0xfffffe004b8cd288): \\"completeMemory() prepare count \
underflow\\" @IOGPUMemory.cpp:550\\nDebugger message: panic\\nOS version: 25F84"}
"""
# A memory event, from a report of sd-server on macOS 26.6.
JETSAM = """{"bug_type":"298","timestamp":"2026-09-29 17:13:21.00 +0530","os_version":"macOS 26.6"}
{
  "product" : "Mac17,3",
  "largestProcess" : "python3.13",
  "processes" : [
    { "name" : "spotlightknowledged", "pid" : 73341, "reason" : "per-process-limit" }
  ]
}
"""
# route(8), networksetup(8) and ifconfig(8) of a Mac with Ethernet, Wi-Fi and Thunderbolt.
ROUTE = """   route to: 192.168.1.10
destination: 192.168.1.0
       mask: 255.255.255.0
  interface: en0
      flags: <UP,DONE,CLONING,STATIC>
"""
PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:03

VLAN Configurations
===================
"""
BRIDGE_UP = "bridge0: flags=8863<UP,BROADCAST> mtu 1500\n\tmember: en2\n\tstatus: active\n"
BRIDGE_DOWN = BRIDGE_UP.replace("active", "inactive")
# nvidia-smi --query-gpu=name,driver_version,memory.free,memory.total --format=csv,noheader,nounits
H200 = "NVIDIA H200, 570.133.20, 142884, 143771\n"

MAC_COMMANDS: dict[tuple[str, ...], str | Output] = {
    ("sw_vers",): SW_VERS.replace("14.2.1", "15.6.1").replace("23C71", "24G90"),
    ("sysctl", "-n", "machdep.cpu.brand_string"): "Apple M4 Pro\n",
    ("sysctl", "-n", "sysctl.proc_translated"): "0\n",
    ("sysctl", "-n", "hw.memsize"): "25769803776\n",
    ("sysctl", "-n", "iogpu.wired_limit_mb"): "0\n",
    ("sysctl", "-n", "kern.memorystatus_vm_pressure_level"): "1\n",
    ("sysctl", "-n", "vm.swapusage"): SWAP_LITTLE,
    ("vm_stat",): VM_STAT,
    ("pmset", "-g"): PMSET_LAPTOP,
    ("pmset", "-g", "assertions"): ASSERTIONS,
    ("pmset", "-g", "batt"): ON_MAINS,
    ("pmset", "-g", "therm"): COOL,
    ("pmset", "-g", "systemstate"): AWAKE,
    ("ioreg", "-r", "-k", "AppleClamshellState", "-d", "1"): LID_OPEN,
    ("launchctl", "print", "gui/501"): "com.apple.xpc.launchd.domain.user.501 = {\n}\n",
    ("fdesetup", "status"): VAULT_OFF,
    ("defaults", "read", "/Library/Preferences/com.apple.loginwindow", "autoLoginUser"): "alice\n",
    ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate"): FIREWALL_OFF,
    ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getblockall"): BLOCKS_NONE,
    ("mount",): MOUNT_OF_MAC,
}


def recorded(answers: Mapping[tuple[str, ...], str | Output]) -> Runner:
    """A runner that answers each command as recorded, and knows no other."""

    def run(command: Sequence[str], seconds: float) -> Output:
        answer = answers.get(tuple(command))
        if answer is None:
            return Output(None)
        return answer if isinstance(answer, Output) else Output(0, answer)

    return run


def a_mac(
    folder: Path,
    changes: Mapping[tuple[str, ...], str | Output] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """A Mac with an M4 Pro and 24 GiB that lacks nothing, with some answers changed."""
    home = folder / "Users" / "alice"
    home.mkdir(parents=True, exist_ok=True)
    answers = {**MAC_COMMANDS, **(changes or {})}
    return Machine("darwin", environ or {}, home, folder, recorded(answers), uid=501)


def a_linux(
    folder: Path,
    files: Mapping[str, str],
    changes: Mapping[tuple[str, ...], str | Output] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """A machine with Linux and these system files."""
    for name, text in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    home = folder / "home" / "alice"
    home.mkdir(parents=True, exist_ok=True)
    return Machine("linux", environ or {}, home, folder, recorded(changes or {}), uid=1000)


def install_plist(machine: Machine, label: str, *, is_daemon: bool = False) -> None:
    """The property list of a service of ours, as far as its name goes."""
    home, root = machine.user_home, machine.root
    folder = root / "Library" / "LaunchDaemons" if is_daemon else home / "Library" / "LaunchAgents"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{label}.plist").write_text(f"<plist>batchkv, {label}</plist>")

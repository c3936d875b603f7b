"""Agents and daemons: what launchd is given, when it is refused, and what it says of them."""

from __future__ import annotations

import os
import plistlib
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchkv_producer.cli import cli
from batchkv_producer.service import command
from batchkv_producer.service.launchd import SUPERVISOR, read_print
from support.fake_services import PASSWORD, FakeServices

MODEL = "mlx-community/Model & <Friends> 50%-4bit"
Batchkv = Callable[..., Result]
LABEL = "dev.batchkv.worker"
# What `launchctl print` says of a service, shortened; the form is that of macOS 14, as quoted in
# the manual page's examples and in threads about "last exit code".
RUNNING = """gui/501/dev.batchkv.worker = {
\tactive count = 1
\tpath = /Users/ada/Library/LaunchAgents/dev.batchkv.worker.plist
\ttype = LaunchAgent
\tstate = running

\tprogram = /bin/sh
\tdomain = gui/501 [100023]
\tminimum runtime = 30
\texit timeout = 120
\truns = 3
\tpid = 1234
\timmediate reason = inefficient
\tforks = 0
\texecs = 1
\tlast exit code = 70
}
"""
ENDED = RUNNING.replace("state = running", "state = not running").replace("\tpid = 1234\n", "")


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    """A Mac with a launchctl that takes notes."""
    made = FakeServices(tmp_path / "a home").install()
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("PATH", f"{made.home}/fake:{os.environ['PATH']}")
    for name in ("BATCHKV_REDIS_URL_FILE", "BATCHKV_HOME"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def batchkv(mac: FakeServices, monkeypatch: pytest.MonkeyPatch) -> Batchkv:
    """Run a command there; ``is_sudo`` as root, with the system's folders below the home."""

    def run(*arguments: object, is_sudo: bool = False) -> Result:
        monkeypatch.setattr(command, "this_machine", lambda _=None: mac.machine(is_sudo=is_sudo))
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["batchkv", *words])
        return CliRunner().invoke(cli, words)

    return run


def worker_words(mac: FakeServices, *more: object) -> tuple[object, ...]:
    return ("service", "install", "worker", "-m", MODEL, "--url-file", mac.url_file, *more)


def test_a_dry_run_prints_the_property_list(mac: FakeServices, batchkv: Batchkv) -> None:
    """Standard output is what would be written; nothing is written or called."""
    before = sorted(mac.home.rglob("*"))
    shown = batchkv(*worker_words(mac, "--dry-run"))
    assert shown.exit_code == 0, shown.output
    agent = plistlib.loads(shown.stdout.encode())
    assert agent["Label"] == LABEL and "UserName" not in agent
    assert sorted(mac.home.rglob("*")) == before
    assert f"would write: {mac.agents / LABEL}.plist" in shown.stderr
    assert f"would run: launchctl bootstrap gui/{os.getuid()} " in shown.stderr


def test_an_agent_has_all_that_launchd_needs(mac: FakeServices, batchkv: Batchkv) -> None:
    """The programs exist, limits and times are set, and paths are whole."""
    flags = ("--slots", "16", "--polite", "--drain-seconds", "300")
    assert batchkv(*worker_words(mac, *flags)).exit_code == 0
    agent = mac.agent()
    shell, script, log, codes, seconds, awake, program, *words = agent["ProgramArguments"]
    assert os.access(shell, os.X_OK) and os.access(program, os.X_OK)
    assert script == str(SUPERVISOR) and SUPERVISOR.is_file()
    assert (codes, seconds, awake) == ("2 126 127", "600", "no")
    assert words == [
        "worker",
        "--model",
        MODEL,
        "--slots",
        "16",
        "--drain-seconds",
        "300",
        "--polite",
    ]
    assert agent["StandardOutPath"] == agent["StandardErrorPath"] == log
    assert stat.S_IMODE(Path(log).stat().st_mode) == 0o600
    assert agent["ExitTimeOut"] == 390  # more than the drain
    assert agent["KeepAlive"] is True and agent["RunAtLoad"] is True
    assert agent["ThrottleInterval"] == 30 and agent["Umask"] == 0o77
    assert agent["SoftResourceLimits"] == {"NumberOfFiles": 8192}
    assert agent["EnvironmentVariables"]["BATCHKV_REDIS_URL_FILE"] == str(mac.url_file)
    assert all(
        Path(value).is_absolute() for key, value in agent.items() if key.endswith(("Path", "tory"))
    )


def test_adapters_have_full_paths(mac: FakeServices, batchkv: Batchkv) -> None:
    """A service starts in another folder, so each adapter's folder is made whole."""
    adapters = ("--adapter", "a=adapters/a", "--adapter", "b=/b")
    assert batchkv(*worker_words(mac, *adapters)).exit_code == 0
    words = mac.agent()["ProgramArguments"]
    given = [word for flag, word in pairwise(words) if flag == "--adapter"]
    assert given == [f"a={Path.cwd() / 'adapters' / 'a'}", "b=/b"]


def test_installing_again_replaces_the_service(mac: FakeServices, batchkv: Batchkv) -> None:
    """The old one is stopped first. A property list of an earlier version has the same place."""
    mac.agents.mkdir(parents=True)
    (mac.agents / f"{LABEL}.plist").write_bytes(plistlib.dumps({"Label": LABEL, "batchkv": "old"}))
    (mac.home / "loaded").mkdir()
    (mac.home / "loaded" / f"gui_{os.getuid()}_{LABEL}").touch()
    assert batchkv(*worker_words(mac)).exit_code == 0
    assert [call.split()[0] for call in mac.calls] == ["bootout", "enable", "bootstrap"]
    assert batchkv(*worker_words(mac, "-m", "demo")).exit_code == 0
    assert [call.split()[0] for call in mac.calls[3:]] == ["bootout", "enable", "bootstrap"]
    assert mac.agent()["ProgramArguments"][-1] == "demo"


def test_a_daemon_runs_as_its_user(mac: FakeServices, batchkv: Batchkv) -> None:
    """It has user, group and home, and takes the place of the user's agent, which it names."""
    assert batchkv(*worker_words(mac)).exit_code == 0
    installed = batchkv(*worker_words(mac, "--daemon"), is_sudo=True)
    assert installed.exit_code == 0, installed.output
    daemon = mac.daemon()
    assert (daemon["UserName"], daemon["GroupName"]) == ("ada", "staff")
    assert daemon["EnvironmentVariables"]["HOME"] == str(mac.home)
    assert daemon["EnvironmentVariables"]["USER"] == "ada"
    assert list(mac.agents.iterdir()) == []
    assert f"the agent {LABEL} is removed" in installed.stderr
    assert mac.calls[-1].startswith("bootstrap system ")
    assert stat.S_IMODE((mac.daemons / f"{LABEL}.plist").stat().st_mode) == 0o644


def test_an_agent_beside_a_daemon_is_refused(mac: FakeServices, batchkv: Batchkv) -> None:
    """Both would run. The message has the command that removes the daemon."""
    assert batchkv(*worker_words(mac, "--daemon"), is_sudo=True).exit_code == 0
    refused = batchkv(*worker_words(mac))
    assert refused.exit_code == 2 and not mac.agents.exists()
    assert f"batchkv service uninstall --label {LABEL} --daemon" in refused.stderr


@pytest.mark.parametrize(
    ("words", "is_sudo", "says"),
    [
        (("--daemon",), False, "needs root: run `sudo "),
        ((), True, "run this without sudo"),
        (("--user", "ada"), False, "--user goes with --daemon"),
        (("--system", "linux"), False, "--dry-run can show"),
    ],
)
def test_root_is_for_daemons(
    mac: FakeServices, batchkv: Batchkv, words: tuple[str, ...], is_sudo: bool, says: str
) -> None:
    """Who may install what: the message says how; nothing is written."""
    refused = batchkv(*worker_words(mac, *words), is_sudo=is_sudo)
    assert refused.exit_code == 2 and says in refused.stderr
    assert not mac.agents.exists() and not mac.daemons.exists() and mac.calls == []


def test_a_login_by_ssh_is_explained(mac: FakeServices, batchkv: Batchkv) -> None:
    """Without a desktop login launchd has no place for agents: nothing is written, and a daemon
    is offered."""
    (mac.home / "no-desktop").touch()
    refused = batchkv(*worker_words(mac))
    assert refused.exit_code == 2 and not mac.agents.exists()
    assert "not logged in at this Mac's desktop" in refused.stderr
    assert "sudo " in refused.stderr and " --daemon`" in refused.stderr


def test_a_refusal_of_launchd_is_shown(mac: FakeServices, batchkv: Batchkv) -> None:
    """Its own words, and the way out, with exit code 4."""
    (mac.home / "refused").touch()
    refused = batchkv(*worker_words(mac))
    assert refused.exit_code == 4
    assert "Bootstrap failed: 5: Input/output error" in refused.stderr
    assert "use --daemon" in refused.stderr


def test_a_service_that_does_not_stop_is_no_endless_wait(
    mac: FakeServices, batchkv: Batchkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchd is asked for as long as the service has to stop, and then it is an error."""
    assert batchkv(*worker_words(mac)).exit_code == 0
    script = mac.home / "fake" / "launchctl"
    script.write_text(script.read_text().replace('bootout*) rm -f "$state"', "bootout*) :"))
    slept: list[float] = []
    monkeypatch.setattr("batchkv_producer.service.launchd._POLL_SECONDS", 45.0)
    monkeypatch.setattr(command, "Launchd", lambda acting: launchd_of(acting, slept.append))
    stuck = batchkv(*worker_words(mac))
    assert stuck.exit_code == 4 and "does not stop" in stuck.stderr
    assert 120 <= sum(slept) <= 180


def launchd_of(acting: object, sleep: Callable[[float], None]) -> object:
    from batchkv_producer.service.launchd import Launchd

    return Launchd(acting, sleep)  # type: ignore[arg-type]


def test_uninstall_removes_every_kind(mac: FakeServices, batchkv: Batchkv) -> None:
    """An agent by its user, a daemon by root only; files of the user stay."""
    assert batchkv(*worker_words(mac)).exit_code == 0
    removed = batchkv("service", "uninstall", "worker")
    assert removed.exit_code == 0 and list(mac.agents.iterdir()) == []
    assert f"{LABEL}: removed" in removed.stderr
    again = batchkv(*worker_words(mac, "--uninstall"))
    assert again.exit_code == 0 and "was not installed" in again.stderr
    assert batchkv(*worker_words(mac, "--daemon"), is_sudo=True).exit_code == 0
    refused = batchkv("service", "uninstall")
    assert refused.exit_code == 2 and "needs root" in refused.stderr
    assert batchkv("service", "uninstall", "--daemon", is_sudo=True).exit_code == 0
    assert list(mac.daemons.iterdir()) == [] and mac.url_file.exists()


def test_a_dry_uninstall_says_what_is_missing(mac: FakeServices, batchkv: Batchkv) -> None:
    """Without the service it says so; with it, only what would be done. Both kinds are found."""
    words = ("service", "uninstall", "worker", "--dry-run")
    assert f"{LABEL} is not installed here" in batchkv(*words).stderr
    assert batchkv(*worker_words(mac)).exit_code == 0
    shown = batchkv(*words)
    assert "is not installed" not in shown.stderr and "would remove" in shown.stdout + shown.stderr
    assert batchkv(*worker_words(mac, "--daemon"), is_sudo=True).exit_code == 0
    assert f"would remove: {mac.daemons / f'{LABEL}.plist'}" in batchkv(*words).stderr


def test_the_password_is_nowhere(mac: FakeServices, batchkv: Batchkv) -> None:
    """Neither output, nor property list, nor a command line has it."""
    done = batchkv(*worker_words(mac))
    shown = done.output + done.stderr + (mac.agents / f"{LABEL}.plist").read_text()
    assert PASSWORD not in shown + (mac.home / "calls").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-m", "two\nlines"), "cannot be printed"),
        (("-m", "./models/mine"), "full path"),
        (("--label", "../x"), "a label has letters"),
        (("--slots", "0"), "--slots 0: expected"),
        (("--adapter", "mine"), "--adapter mine: adapter mine needs its folder"),
        (("--kv-scheme", "int3"), "int3"),
        (("--url-file", "missing"), "No such file or directory. Copy the hub's secrets/worker.url"),
        (("--cache-file", "missing"), "Copy the hub's secrets/cache.tiers to it"),
        (("--cache-file", "/etc/hosts"), "/etc/hosts"),
    ],
)
def test_a_bad_value_is_named(
    mac: FakeServices, batchkv: Batchkv, words: tuple[str, ...], says: str
) -> None:
    """A value that cannot be is refused before anything is written."""
    refused = batchkv(*worker_words(mac, *words))
    assert refused.exit_code == 2 and says in refused.stderr
    assert not mac.agents.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_an_open_url_file_is_refused(mac: FakeServices, batchkv: Batchkv, mode: int) -> None:
    """A URL that others can read is no secret: the message has the command that closes it."""
    mac.url_file.chmod(mode)
    refused = batchkv(*worker_words(mac))
    assert refused.exit_code == 2 and f"chmod 600 {mac.url_file}" in refused.stderr


@pytest.mark.parametrize("content", ["", "studio.local:6379\n", "http://studio.local/\n"])
def test_a_file_without_a_url_is_refused(mac: FakeServices, batchkv: Batchkv, content: str) -> None:
    """What is no URL of Redis ends here, and not in a worker that is started again and again."""
    mac.url_file.write_text(content)
    refused = batchkv(*worker_words(mac))
    assert refused.exit_code == 2 and "does not hold a URL" in refused.stderr


def test_places_of_the_caller_are_kept(
    mac: FakeServices, batchkv: Batchkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that name folders reach the service; a secret in a variable does not."""
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")
    monkeypatch.setenv("HF_TOKEN", PASSWORD)
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(mac.url_file))
    assert batchkv("service", "install", "worker", "-m", "demo").exit_code == 0
    environment = mac.agent()["EnvironmentVariables"]
    assert environment["HF_HOME"] == "/models" and "HF_TOKEN" not in environment
    assert environment["AGX_RELAX_CDM_CTXSTORE_TIMEOUT"] == "1"


def test_the_cache_is_named_by_a_closed_file(mac: FakeServices, batchkv: Batchkv) -> None:
    """With --cache-file the agent names it, as a whole path; without, it names none."""
    tiers = mac.home / "cache.tiers"
    tiers.write_text("disk:/tmp/blocks?max=1GB")
    tiers.chmod(0o600)
    assert batchkv(*worker_words(mac)).exit_code == 0
    assert "BATCHKV_CACHE_FILE" not in mac.agent()["EnvironmentVariables"]
    assert batchkv(*worker_words(mac, "--cache-file", "~/cache.tiers")).exit_code == 0
    assert mac.agent()["EnvironmentVariables"]["BATCHKV_CACHE_FILE"] == str(tiers)
    tiers.chmod(0o644)
    assert batchkv(*worker_words(mac, "--cache-file", tiers)).exit_code == 2


def test_the_hub_needs_its_folder(mac: FakeServices, batchkv: Batchkv, tmp_path: Path) -> None:
    """Without the configuration, or with users that others can read, nothing is installed."""
    hub = tmp_path / "hub"
    words = ("service", "install", "hub", "--hub", hub)
    assert "setup.sh makes it" in batchkv(*words).stderr
    (hub / "secrets").mkdir(parents=True)
    (hub / "queue.conf").touch()
    users = hub / "secrets" / "queue-users.acl"
    users.touch(mode=0o644)
    assert f"chmod 600 {users}" in batchkv(*words).stderr
    assert not mac.agents.exists()
    users.chmod(0o600)
    assert batchkv(*words).exit_code == 0
    assert batchkv(*words, "--uninstall").exit_code == 0
    assert list(mac.agents.iterdir()) == []


def test_guarded_folders_are_warned_of(mac: FakeServices, batchkv: Batchkv) -> None:
    """macOS keeps services out of the desktop: it is said, and nothing is refused."""
    (mac.home / "Desktop").mkdir()
    moved = mac.url_file.rename(mac.home / "Desktop" / "queue.url")
    done = batchkv("service", "install", "worker", "-m", "demo", "--url-file", moved)
    assert done.exit_code == 0 and f"may keep services from {moved}" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RUNNING, (True, 1234, 70)),
        (ENDED, (False, None, 70)),
        (ENDED.replace("= 70", "= (never exited)"), (False, None, None)),
        (ENDED.replace("not running", "spawn scheduled"), (False, None, 70)),
        ("", (False, None, None)),
    ],
)
def test_launchctl_print_is_read(text: str, expected: tuple[bool, int | None, int | None]) -> None:
    """State, process and last exit code; text that is unknown means that nothing runs."""
    assert read_print(text) == expected


def test_status_lists_what_is_installed(mac: FakeServices, batchkv: Batchkv) -> None:
    """Each service with its state and log; exit code 1 while one of them does not run."""
    assert batchkv("service", "status").exit_code == 0
    (mac.home / "printed").write_text(RUNNING)
    assert batchkv(*worker_words(mac)).exit_code == 0
    shown = batchkv("service", "status")
    assert shown.exit_code == 0
    assert f"{LABEL} (agent): running, process 1234; log: {mac.home}" in shown.stdout
    (mac.home / "printed").write_text(ENDED)
    assert batchkv(*worker_words(mac, "--label", "second")).exit_code == 0
    (mac.agents / "com.apple.other.plist").write_bytes(plistlib.dumps({"Label": "x"}))
    shown = batchkv("service", "status")
    assert shown.exit_code == 1 and shown.stdout.count("\n") == 2
    assert "second (agent): not running, last exit code 70" in shown.stdout

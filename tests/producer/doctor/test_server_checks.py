"""The queue's server: reached or not, with which rights, and from inside launchd."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.doctor.contract import Level
from batchkv_producer.doctor.mac import one_shot
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.doctor.queue_server import (
    QueueFacts,
    checks,
    judge_queue,
    judge_rights,
    queue_facts,
)
from batchkv_producer.doctor.reach import Reached, address_of, reach, read_reached
from batchkv_producer.doctor.runner import run_checks
from producer.doctor.recorded import install_plist
from support.hub import HUB_SOURCE, Hub, running_hub

# A launchctl that runs the job of a property list at once, or refuses it. Where DENIED is set, the
# job's network is that of an agent without permission: every connection fails with EHOSTUNREACH.
LAUNCHCTL = """#!{python}
import os, plistlib, subprocess, sys
with open(os.environ["CALLS"], "a") as log:
    log.write(" ".join(sys.argv[1:3]) + "\\n")
if sys.argv[1] == "bootstrap":
    if os.environ.get("NO_DESKTOP"):
        print("Bootstrap failed: 125: Domain does not support specified action")
        sys.exit(125)
    job = plistlib.load(open(sys.argv[3], "rb"))
    command = job["ProgramArguments"]
    if os.environ.get("DENIED"):
        command = [command[0], "-c", os.environ["DENIED"], *command[3:]]
    subprocess.run(command, cwd=job["WorkingDirectory"], check=not os.environ.get("DENIED"))
"""
DENIED = """
import errno, os, socket, sys
def refuse(*_): raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
socket.socket.connect = refuse
from batchkv_producer.doctor.reach import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with its users, as setup.sh makes it."""
    with running_hub(HUB_SOURCE) as found:
        yield found


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port of this machine that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("role", "level", "words"),
    [
        ("worker", Level.OK, "may run workers"),
        ("producer", Level.OK, "may submit, and run no workers"),
        ("admin", Level.OK, "may run workers and submit"),
    ],
)
def test_rights_of_the_hubs_users_are_told_apart(
    hub: Hub, role: str, level: Level, words: str
) -> None:
    """With each role's URL the check says what it may do; the server has nothing new."""
    with hub.connect("admin") as redis:
        before = redis.dbsize()
        first, second = run_checks(checks(hub.url(role)), Machine("linux"))
        assert first.verdict.level is Level.OK, first
        assert second.verdict.level is level and words in second.verdict.found, second
        assert redis.dbsize() == before


def test_a_user_without_rights_fails(hub: Hub) -> None:
    """One that may connect and do nothing can neither work nor submit."""
    with hub.connect("admin") as redis:
        redis.execute_command("ACL", "SETUSER", "nobody", "on", ">pw", "+ping", "+info",
                              "+client|setinfo")  # fmt: skip
    facts = queue_facts(f"redis://nobody:pw@127.0.0.1:{hub.ports['queue']}/0")
    verdict = judge_rights(facts)
    assert verdict is not None and verdict.level is Level.FAIL, verdict
    assert "setup.sh" in verdict.todo


def test_rights_of_an_older_hub_are_named(hub: Hub) -> None:
    """A worker's user that lacks one right fails, and the right is named."""
    with hub.connect("admin") as redis:
        redis.execute_command("ACL", "SETUSER", "worker", "-srem")
        try:
            verdict = judge_rights(queue_facts(hub.url("worker")))
        finally:
            redis.execute_command("ACL", "SETUSER", "worker", "+srem")
    assert verdict is not None and verdict.level is Level.FAIL
    assert "SREM rq:workers is refused" in verdict.found


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/0", "cannot be reached"),
        ("redis://no-such-host.invalid:6379/0", "cannot be found"),
        ("http://127.0.0.1/", "this needs the Redis URL"),
        ("127.0.0.1:6379", "must begin with"),
    ],
)
def test_a_server_that_is_not_reached_fails(url: str, words: str) -> None:
    """The sentence is that of every other command."""
    verdict = judge_queue(queue_facts(url))
    assert verdict.level is Level.FAIL and words in verdict.found, verdict
    assert verdict.todo


def test_a_wrong_password_fails_and_is_not_shown(hub: Hub) -> None:
    """What the URL holds appears nowhere."""
    facts = queue_facts(f"redis://worker:not-the-one@127.0.0.1:{hub.ports['queue']}/0")
    verdict = judge_queue(facts)
    assert verdict.level is Level.FAIL
    assert "not-the-one" not in f"{verdict.found} {verdict.todo}"
    assert judge_rights(facts) is None


def test_a_server_that_drops_keys_is_a_warning(redis_url: str, redis_connection: Redis) -> None:
    """Its policy, its append-only file and its memory are read from the real server."""
    before = redis_connection.config_get("maxmemory*")
    redis_connection.config_set("maxmemory", "100mb")
    redis_connection.config_set("maxmemory-policy", "allkeys-lru")
    try:
        verdict = judge_queue(queue_facts(redis_url))
    finally:
        for name in ("maxmemory", "maxmemory-policy"):
            redis_connection.config_set(name, before[name])
    assert verdict.level is Level.WARN
    assert "maxmemory-policy allkeys-lru" in verdict.found and "noeviction" in verdict.todo


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (QueueFacts(version="8.0", milliseconds=0.4, keeps_log=True), Level.OK),
        (QueueFacts(milliseconds=0.4), Level.OK),  # a user who may not ask
        (QueueFacts(milliseconds=80.0, keeps_log=True), Level.WARN),
        (QueueFacts(keeps_log=False), Level.WARN),
        (QueueFacts(keeps_log=True, writes_log=False), Level.FAIL),
        (QueueFacts(keeps_log=True, used_bytes=95, max_bytes=100), Level.WARN),
    ],
)
def test_servers_are_judged(facts: QueueFacts, level: Level) -> None:
    """Slow, forgetful, full."""
    assert judge_queue(facts).level is level


def test_an_address_is_tried(port: int) -> None:
    """A connection, a refusal and a name without an address are told apart."""
    assert reach("127.0.0.1", port).is_good
    refused = reach("127.0.0.1", 1)
    assert refused.number_name == "ECONNREFUSED" and not refused.is_denied
    unknown = reach("no-such-host.invalid", 6379)
    assert not unknown.resolved and unknown.is_denied


def test_urls_have_addresses() -> None:
    """Of a socket there is nothing to reach."""
    assert address_of("redis://:p@studio.local/0") == ("studio.local", 6379)
    assert address_of("rediss://h:7000") == ("h", 7000)
    assert address_of("unix:///tmp/s") is None
    assert address_of("redis://h:port") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"error": "x"}'])
def test_a_job_that_wrote_nonsense_says_nothing(text: str) -> None:
    """What cannot be read is nothing, and nothing is raised."""
    assert read_reached(text) is None


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake launchctl on PATH, and the file in which it notes its calls."""
    tool = tmp_path / "bin" / "launchctl"
    tool.parent.mkdir()
    tool.write_text(LAUNCHCTL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "calls"


def compare(port: int) -> one_shot.LaunchdReach:
    return one_shot.compare(Machine("darwin", uid=501), "127.0.0.1", port)


def test_a_service_that_reaches_the_server_is_well(calls: Path, tmp_path: Path, port: int) -> None:
    """The job runs once, in the domain of the desktop, and nothing of it remains."""
    verdict = one_shot.judge(compare(port))
    assert verdict is not None and verdict.level is Level.OK
    verbs = calls.read_text().splitlines()
    assert verbs[0] == "bootstrap gui/501" and verbs[1].startswith("bootout gui/501/dev.batchkv")
    assert not list(tmp_path.glob("batchkv-doctor-*"))


def test_a_service_that_is_denied_is_local_network_privacy(
    calls: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This command reaches the server, and the job fails at once with EHOSTUNREACH."""
    monkeypatch.setenv("DENIED", DENIED)
    facts = compare(port)
    assert facts.here.is_good and facts.there is not None
    assert facts.there.error == errno.EHOSTUNREACH
    verdict = one_shot.judge(facts)
    assert verdict is not None and verdict.level is Level.FAIL
    assert "Local Network" in verdict.found and "--daemon" in verdict.todo


def test_without_a_desktop_it_is_not_known(
    calls: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ssh, launchd has no domain for agents: that is said, and not taken for a denial."""
    monkeypatch.setenv("NO_DESKTOP", "1")
    verdict = one_shot.judge(compare(port))
    assert verdict is not None and verdict.level is Level.WARN
    assert "125: Domain does not support" in verdict.found


@pytest.mark.parametrize(("as_agent", "level"), [(False, Level.OK), (True, Level.FAIL)])
def test_daemons_need_no_permission(
    calls: Path,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    as_agent: bool,
    level: Level,
) -> None:
    """Where a daemon alone works, an agent is not tried. A hub's agent is no worker."""
    monkeypatch.setenv("DENIED", DENIED)
    mac = Machine("darwin", user_home=tmp_path / "home", root=tmp_path / "root", uid=501)
    install_plist(mac, "dev.batchkv.worker", is_daemon=True)
    install_plist(mac, "dev.batchkv.queue")
    if as_agent:
        install_plist(mac, "dev.batchkv.worker.second")
    verdict = one_shot.judge(one_shot.compare(mac, "127.0.0.1", port))
    assert verdict is not None and verdict.level is level
    assert calls.exists() is as_agent


@pytest.mark.parametrize(
    ("there", "level"),
    [
        (Reached(resolved=False), Level.FAIL),
        (Reached(errno.ECONNREFUSED, "ECONNREFUSED"), Level.WARN),
        (Reached(errno.ETIMEDOUT, "ETIMEDOUT"), Level.WARN),
    ],
)
def test_other_faults_are_told_apart(there: Reached, level: Level) -> None:
    """A name that only this command resolves is privacy, too; a refusal is not."""
    verdict = one_shot.judge(one_shot.LaunchdReach(Reached(), there))
    assert verdict is not None and verdict.level is level


def test_a_server_that_nobody_reaches_is_no_matter_of_privacy() -> None:
    """The check of the server says it already."""
    there = Reached(errno.EHOSTUNREACH, "EHOSTUNREACH")
    assert one_shot.judge(one_shot.LaunchdReach(there, there)) is None


def test_the_program_of_the_job_writes_all_or_nothing(tmp_path: Path, port: int) -> None:
    """As launchd runs it: from another folder, with a bare environment."""
    out = tmp_path / "reached"
    plist = one_shot.job("dev.batchkv.doctor.1", "127.0.0.1", port, out)
    environment = plist["EnvironmentVariables"]
    subprocess.run(plist["ProgramArguments"], cwd="/", env=environment, check=True, timeout=60)
    found = read_reached(out.read_text())
    assert found is not None and found.is_good
    assert [path.name for path in tmp_path.iterdir()] == ["reached"]

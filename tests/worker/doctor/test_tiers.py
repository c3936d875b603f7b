"""The tiers of the cache: real ones, broken ones, slow ones, and rights that are missing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.doctor.contract import Level, Verdict
from batchkv_worker.doctor import tiers
from batchkv_worker.doctor.program import made
from batchkv_worker.doctor.tiers import Speed, judge_speed, measure_disk, measure_redis, refused
from support.hub import HUB_SOURCE, Hub, running_hub


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with a cache's server and its users."""
    with running_hub(HUB_SOURCE) as found:
        yield found


def verdicts(cache: str, queue: str = "", pays: float | None = None) -> dict[str, Verdict]:
    """The verdict of each step on this text."""
    request = {"cache": cache, "queue": queue}
    found = {name: made(make) for name, make in tiers.steps(request, pays)}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def test_good_tiers_are_well(hub: Hub, tmp_path: Path) -> None:
    """Memory, a folder and the cache's server; nothing that was written remains."""
    (tmp_path / "blocks").mkdir()
    text = f"memory:?max=1GB disk:{tmp_path}/blocks?max=5GB {hub.url('cache')}"
    found = verdicts(text, hub.url("worker"), pays=0.001)
    assert list(found) == ["memory tier", "disk tier", "redis tier"]
    assert {each.level for each in found.values()} == {Level.OK}, found
    assert "MB/s" in found["redis tier"].found
    with hub.connect("cache") as redis:
        assert redis.dbsize() == 0
    assert not list((tmp_path / "blocks").rglob("*.kv"))


def test_a_key_ends_by_itself_if_doctor_dies(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for a measurement has a time to live, and a name of no block."""
    password = (hub.folder / "secrets" / "passwords" / "cache-admin").read_text().strip()
    with (
        hub.connect("cache") as redis,
        Redis(port=hub.ports["cache"], username="admin", password=password) as admin,
    ):
        monkeypatch.setattr(redis, "delete", lambda *_: 0)
        measure_redis(redis)
        (key,) = admin.keys()
        assert key.endswith(b".doctor")
        assert 0 < admin.pttl(key) <= tiers.KEY_MILLISECONDS
        admin.delete(key)


def test_rights_that_are_missing_are_named(hub: Hub) -> None:
    """The cache's user without a command that a worker needs."""
    port = hub.ports["cache"]
    password = (hub.folder / "secrets" / "passwords" / "cache-admin").read_text().strip()
    with Redis(port=port, username="admin", password=password) as admin:
        admin.execute_command("ACL", "SETUSER", "cache", "-getrange")
        try:
            verdict = verdicts(hub.url("cache"))["redis tier"]
        finally:
            admin.execute_command("ACL", "SETUSER", "cache", "+getrange")
    assert verdict.level is Level.FAIL and "GETRANGE is refused" in verdict.found
    with hub.connect("cache") as redis:
        assert refused(redis) == ()


@pytest.mark.parametrize(
    ("cache", "name", "level", "words"),
    [
        ("redis://127.0.0.1:1/0?max=1GB", "redis tier", Level.FAIL, "is away"),
        ("nonsense:", "cache", Level.FAIL, "begins with"),
        ("disk:/no/such/volume/blocks", "disk tier", Level.WARN, "is away"),
        ("disk:relative", "cache", Level.FAIL, "not absolute"),
    ],
)
def test_tiers_that_cannot_be_used(cache: str, name: str, level: Level, words: str) -> None:
    """A server that is down, a text that is none, a volume that is not mounted."""
    verdict = verdicts(cache)[name]
    assert verdict.level is level and words in verdict.found, verdict
    assert verdict.todo


def test_the_queues_own_database_is_no_cache(redis_url: str) -> None:
    """A cache that evicts would evict jobs."""
    found = verdicts(f"{redis_url}&max=1GB", redis_url)
    assert found["cache"].level is Level.FAIL and "server of its own" in found["cache"].todo


def test_a_password_of_a_tier_is_not_shown(hub: Hub) -> None:
    """Neither of a wrong password nor of a text that cannot be read."""
    for text in (
        f"redis://cache:wr0ng-secret@127.0.0.1:{hub.ports['cache']}/0",
        "redis://cache:wr0ng-secret@h:port/0",
    ):
        (verdict,) = verdicts(text).values()
        assert verdict.level is Level.FAIL
        assert "wr0ng-secret" not in f"{verdict.found} {verdict.todo}"


def test_a_file_in_the_place_of_a_folder_fails(tmp_path: Path) -> None:
    """The sentence is that of a worker which starts."""
    (tmp_path / "blocks").write_text("a file")
    verdict = verdicts(f"disk:{tmp_path}/blocks")["disk tier"]
    assert verdict.level is Level.FAIL, verdict


def test_a_folder_that_takes_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails is found; one that works has a speed."""
    assert (measure_disk(str(tmp_path)) or 0) > 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tiers, "measure_disk", lambda _: None)
    assert verdicts(f"disk:{tmp_path}")["disk tier"].level is Level.FAIL


@contextmanager
def slowed(port: int, bytes_per_second: int) -> Iterator[int]:
    """A port that passes to another one, and back no faster than that."""

    def pump(source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if is_slow:
                    threading.Event().wait(len(data) / bytes_per_second)
                target.sendall(data)

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()
                opened.extend((near, far))

    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for each in opened:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


def test_a_slow_network_is_measured(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a line of 40 MB/s a prefix comes later than it is computed; the model decides."""
    monkeypatch.setattr(tiers, "MEASURED_BYTES", 2**21)
    with slowed(hub.ports["cache"], 40_000_000) as port:
        url = hub.url("cache").replace(f":{hub.ports['cache']}/", f":{port}/")
        slow = verdicts(url)["redis tier"]
        assert slow.level is Level.WARN and "too slow" in slow.found, slow
        assert verdicts(url, pays=1.0)["redis tier"].level is Level.OK


@pytest.mark.parametrize(
    ("read", "pays", "level", "advice"),
    [
        (1000.0, None, Level.OK, ""),
        (100.0, None, Level.OK, "affine4"),  # gigabit Ethernet: 4 bits pay
        (30.0, None, Level.WARN, "network"),
        (100.0, 150.0, Level.WARN, "affine4"),
        (100.0, 50.0, Level.OK, ""),
    ],
)
def test_speeds_are_judged(read: float, pays: float | None, level: Level, advice: str) -> None:
    """Against the model's own speed where it was measured, else against that of a fast Mac."""
    verdict = judge_speed("redis", Speed(0.5, 80.0, read), pays)
    assert verdict.level is level and advice in verdict.todo

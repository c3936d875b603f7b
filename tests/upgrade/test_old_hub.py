"""A hub whose users are of an older version: what works there, and what is said of the rest."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkv_producer.manage import forget as forgetting
from batchkv_producer.wire import redis_keys
from hostile.traps import batchkv
from support.hub import HUB_SOURCE, Hub, running_hub
from support.worker_harness import MODEL, WorkerProcess, num_ended, wait_until, workers

PATIENCE = 60.0
OLD = Path(__file__).parent / "v0.1.0"
LUA = Path(redis_keys.__file__).parent / "lua"


def hub_with(tmp_path: Path, acl: str) -> Path:
    """The folder of setup.sh with these users of the queue's server."""
    source = tmp_path / "hub"
    shutil.copytree(HUB_SOURCE, source)
    (source / "queue.acl").write_text(acl)
    shutil.copy(OLD / "cache.acl", source / "cache.acl")
    return source


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub whose setup.sh was last run at version 0.1.0."""
    source = hub_with(tmp_path_factory.mktemp("old"), (OLD / "queue.acl").read_text())
    with running_hub(source) as found:
        yield found


def test_an_older_hub_serves_all_that_it_did(hub: Hub, tmp_path: Path) -> None:
    """Submit, work, look, cancel, retry, results: no right is missed by what was there before."""
    source, out, url = tmp_path / "p.jsonl", tmp_path / "out.jsonl", hub.url("producer")
    rows = [f'{{"prompt": "p{n}"}}' for n in range(4)] + ['{"prompt": "slow:1000000"}']
    rows += ['{"prompt": "same", "temperature": 0}'] * 2
    source.write_text("\n".join(rows))

    def ok(*arguments: object, code: int = 0) -> str:
        found = batchkv(*arguments, url=url)
        assert found.exit_code == code, (arguments, found.output)
        return found.stdout.strip()

    batch = ok("submit", source, "-m", MODEL, "--dedupe", "--priority", "high", "--keep", "1d")
    settings: dict[str, object] = {"HEARTBEAT_SECONDS": 0.1, "LEASE_SECONDS": 60}
    settings |= {"MAINTENANCE_SECONDS": 0.1, "DRAIN_SECONDS": 0}
    log = tmp_path / "log"
    plan: dict[str, object] = {"step_seconds": 0.001}
    worker = WorkerProcess(hub.url("worker"), log, settings=settings, plan=plan)
    with workers(worker), hub.connect("admin") as admin:
        wait_until(lambda: num_ended(admin, batch) == 6, PATIENCE)
        assert "server's memory" in ok("status")
        ok("status", batch)
        ok("list")
        assert "affine8" in ok("workers")
        ok("cancel", f"{batch}-5")
        ok("retry", batch, "--canceled")
        ok("cancel", batch)
        ok("wait", batch, code=1)
        ok("results", batch, "-o", out)
        assert ok("ask", "-m", MODEL, "why?") == "echo why?"  # by a batch: no rights for live rows
        # Somebody began to forget: who may not go on with it leaves it alone, and lives.
        forgetting._step(admin, batch, redis_keys.queue_name(MODEL), "mark")
        lock = redis_keys.maintenance_lock(redis_keys.queue_name(MODEL))
        for _ in range(2):  # the second time, what the first one did is over
            admin.delete(lock)
            wait_until(lambda: admin.exists(lock), PATIENCE)
        assert worker.process.poll() is None
        worker.process.terminate()
        assert worker.wait(PATIENCE) == 0
        ok("forget", batch, "--yes")
        assert not admin.exists(redis_keys.batch(batch))
    assert "NOPERM" not in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("role", "right"), [("producer", "+rpush "), ("worker", "~batchkv:held:* ")]
)
def test_a_right_that_is_missed_names_setup(tmp_path: Path, role: str, right: str) -> None:
    """A command or a key that the hub's users lack is one sentence, with what to run there."""
    acl = (HUB_SOURCE / "queue.acl").read_text()
    before, own, rest = re.split(rf"(user {role} (?:.*\n)*?\n)", acl, maxsplit=1)
    assert right in own
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "a"}')
    with running_hub(hub_with(tmp_path, before + own.replace(right, " ") + rest)) as hub:
        if role == "producer":
            found = batchkv("submit", source, "-m", MODEL, url=hub.url("producer"))
            code, said = found.exit_code, found.stderr
        else:
            batchkv("submit", source, "-m", MODEL, url=hub.url("producer"))
            command = (sys.executable, "-m", "support.fake_engine", "-m", MODEL, "--burst")
            worker = WorkerProcess(hub.url("worker"), tmp_path / "log", command=command)
            with workers(worker):
                code, said = worker.wait(PATIENCE), worker.said
    assert code == 3 and "Traceback" not in said
    assert "(NOPERM)" in said and "run deploy/hub/setup.sh of this version there" in said


def test_the_users_may_do_what_scripts_do() -> None:
    """Every command of a script, and every key of ours, is in the file of the queue's users."""
    acl = (HUB_SOURCE / "queue.acl").read_text()
    said = set(re.findall(r"\+([a-z|]+)", acl))
    for script in LUA.glob("*.lua"):
        used = set(re.findall(r"redis\.p?call\('([A-Z]+)'", script.read_text()))
        assert {command.lower() for command in used} <= said, script.name
    keys = re.findall(r"^``((?:batchkv|rq):[a-z]+)", redis_keys.__doc__ or "", re.MULTILINE)
    assert len(keys) > 12
    for key in keys:
        assert re.search(rf"[~&%R]{re.escape(key)}\b", acl), key

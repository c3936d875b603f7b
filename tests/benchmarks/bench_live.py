"""What rows cost that a client waits for, through the gateway: calls, first tokens, a batch beside.

    python tests/benchmarks/bench_live.py [--quick] [--slots N] [--equal] [--json FILE]

1. **Calls.** A worker whose engine does nothing; 64 connections that ask one after the other. Calls
   a second, whole and as streams, and processor time of each process for a call. Target: 300.
2. **First token.** A real engine on a tiny model: the time from a request to the first piece of its
   stream, while the worker is idle and while a batch fills all slots.
3. **A batch beside.** The same worker: a batch alone; then beside two clients that ask for whole
   answers and two that read streams; then as many of their rows alone. In turns, medians. What the
   batch loses, as time and as processor time of the worker, beside what the rows take alone.
   Prompts and answers of the batch are of unequal length. With --equal all are alike: their rows
   begin and end together, so alone they need no masks, and live rows among them cost more.

Everything runs on this machine, each part in a process of its own. The worker has one thread for
matrices, so that the others have a core. Exit code 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchkv_producer.wire.job import Request, SamplingParams, encode_job
from support.gateway import Gateway, running_gateway
from support.redis_server import running_server
from support.tiny_worker import COMMAND_CLASS
from support.worker_harness import FAKE_CLASS, MODEL, WorkerProcess, num_ended, submit, wait_until
from support.worker_harness import workers as ended_with_the_block

TARGET_CALLS = 300.0
CONNECTIONS = 64
PROMPT_TOKENS, ANSWER_TOKENS = 64, 48  # means of a batch; both vary by half of that
SPREAD_STEP = 0.618  # between the lengths of two rows; they come near every length, evenly
LIVE_TOKENS = 32
CLIENTS = (False, False, True, True)  # whether each reads a stream

Figures = dict[str, Any]


@dataclass(slots=True)
class World:
    """The processes: a server, a gateway and a worker. ``is_equal``: rows of batches are alike."""

    connection: Redis
    gateway: Gateway
    pids: dict[str, int]
    is_equal: bool = False

    def length(self, mean: int, row: int) -> int:
        """Tokens of a row's prompt or answer: half of the mean up to one and a half, in turns."""
        spread = 0.0 if self.is_equal else (row * SPREAD_STEP) % 1.0 - 0.5
        return mean + round(mean * spread)

    def processor_seconds(self) -> dict[str, float]:
        """Of each process, since its start; empty where the system does not say it."""
        found = {}
        for name, pid in self.pids.items():
            file = Path(f"/proc/{pid}/stat")
            if file.exists():
                parts = file.read_text().rpartition(")")[2].split()
                found[name] = (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
        return found


@contextmanager
def world(worker_class: str, slots: int, *, is_equal: bool = False) -> Iterator[World]:
    """All processes, once the worker answers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(running_server())
        gateway = stack.enter_context(running_gateway(server.url, folder / "home"))
        worker = WorkerProcess(
            server.url,
            folder / "log",
            settings={"SLOTS": slots},
            environ={"OPENBLAS_NUM_THREADS": "1"},
            worker_class=worker_class,
        )
        stack.enter_context(ended_with_the_block(worker))
        connection = stack.enter_context(server.connect())
        found = World(
            connection,
            gateway,
            {"gateway": gateway.process.pid, "redis": server.pid, "worker": worker.process.pid},
            is_equal,
        )
        for _ in range(3):  # while it loads, the first ones wait, or are refused
            wait_until(lambda: asyncio.run(Asker(gateway.port).ask(is_stream=False)), 120)
            time.sleep(0.5)
        yield found


@dataclass(slots=True)
class Asker:
    """A client with one connection, which asks one row after the other."""

    port: int
    prompt: str = "1 2 3"
    num_tokens: int = 1
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    first_ms: list[float] = field(default_factory=list)  # until the first piece of a stream

    async def ask(self, *, is_stream: bool) -> bool:
        """Ask a row, and read its answer. Returns whether there is one."""
        if self.connection is None:
            self.connection = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.connection
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": self.prompt,
                "max_tokens": self.num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": is_stream,
            }
        )
        began = time.perf_counter()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if is_stream and b" 200 " in head:
            await reader.readuntil(b'"text":')
            self.first_ms.append((time.perf_counter() - began) * 1000)
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            return True
        length = int(head.partition(b"content-length: ")[2].split()[0])
        await reader.readexactly(length)
        return b" 200 " in head


def measure_calls(found: World, num: int, *, is_stream: bool) -> Figures:
    """Calls a second, and processor time of each process for one."""

    async def all_calls() -> None:
        left = iter(range(num))

        async def one() -> None:
            asker = Asker(found.gateway.port)
            for _ in left:
                assert await asker.ask(is_stream=is_stream)

        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))

    before, began = found.processor_seconds(), time.perf_counter()
    asyncio.run(all_calls())
    seconds = time.perf_counter() - began
    after = found.processor_seconds()
    cost = {f"{name} ms a call": (after[name] - before[name]) / num * 1000 for name in after}
    return {"calls a second": num / seconds, **cost, "load": os.getloadavg()[0]}


def begin_batch(found: World, name: str, num_rows: int) -> str:
    """A batch whose prompts have nothing in common; its id."""
    answers: dict[str, int] = {}
    for row in range(num_rows):
        numbers = [row // 90 + 1, *(row + 7 * at for at in range(found.length(PROMPT_TOKENS, row)))]
        prompt = " ".join(str(number % 90 + 1) for number in numbers)
        answers[prompt] = found.length(ANSWER_TOKENS, row + 1)

    def data(prompt: str) -> bytes:
        params = SamplingParams(max_tokens=answers[prompt], temperature=0.0, ignore_eos=True)
        return encode_job(Request("c", "completion", prompt=prompt, params=params))

    return submit(found.connection, [*answers], name=name, data=data)


async def ask_until(found: World, batch: str) -> list[int]:
    """Ask rows until the batch is over; how many answers each client got."""
    num_rows = int(found.connection.hget(f"batchkv:batch:{batch}", "total") or 0)
    counts = [0] * len(CLIENTS)
    is_over = False

    async def one(index: int) -> None:
        asker = Asker(found.gateway.port, f"{index + 1} 2 3", LIVE_TOKENS)
        while not is_over:
            assert await asker.ask(is_stream=CLIENTS[index])
            counts[index] += not is_over

    asking = [asyncio.create_task(one(index)) for index in range(len(CLIENTS))]
    while num_ended(found.connection, batch) < num_rows:
        await asyncio.sleep(0.01)
    is_over = True
    await asyncio.gather(*asking)
    return counts


async def ask_counts(found: World, counts: list[int]) -> None:
    """Ask as many rows, each client its own number."""

    async def one(index: int) -> None:
        asker = Asker(found.gateway.port, f"{index + 1} 2 3", LIVE_TOKENS)
        for _ in range(counts[index]):
            assert await asker.ask(is_stream=CLIENTS[index])

    await asyncio.gather(*(one(index) for index in range(len(CLIENTS))))


def measure_beside(found: World, number: int, num_rows: int) -> Figures:
    """One turn: the batch alone, beside live rows, and those alone."""

    def timed(work: Any) -> tuple[float, float, Any]:
        before, began = found.processor_seconds(), time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        after = found.processor_seconds()
        return seconds, after.get("worker", 0.0) - before.get("worker", 0.0), result

    def alone() -> None:
        batch = begin_batch(found, f"alone {number}", num_rows)
        wait_until(lambda: num_ended(found.connection, batch) == num_rows, 600)

    def beside() -> list[int]:
        return asyncio.run(ask_until(found, begin_batch(found, f"beside {number}", num_rows)))

    usual, usual_processor, _ = timed(alone)
    longer, longer_processor, counts = timed(beside)
    live, live_processor, _ = timed(lambda: asyncio.run(ask_counts(found, counts)))
    tokens = sum(counts) * LIVE_TOKENS
    of_batch = sum(found.length(ANSWER_TOKENS, row + 1) for row in range(num_rows))
    return {
        "batch s": usual,
        "beside s": longer,
        "live rows": sum(counts),
        "tokens %": 100 * tokens / (tokens + of_batch),
        "lost s": longer - usual,
        "alone s": live,
        "lost of alone": (longer - usual) / live,
        "lost processor s": longer_processor - usual_processor,
        "alone processor s": live_processor,
        "lost of alone, processor": (longer_processor - usual_processor) / (live_processor or 1),
        "load": os.getloadavg()[0],
    }


def measure_first(found: World, num: int, num_rows: int) -> Figures:
    """Milliseconds until the first piece: idle, and while a batch fills the slots."""

    async def some() -> list[float]:
        asker = Asker(found.gateway.port, "5 6 7", 4)
        for _ in range(num):
            await asker.ask(is_stream=True)
            await asyncio.sleep(0.02)
        return asker.first_ms

    idle = asyncio.run(some())
    batch = begin_batch(found, "filling", num_rows)
    wait_until(lambda: num_ended(found.connection, batch) > 0, 60)
    busy = asyncio.run(some())
    is_full = num_ended(found.connection, batch) < num_rows
    wait_until(lambda: num_ended(found.connection, batch) == num_rows, 600)
    return {
        **_spread("idle", idle),
        **_spread("busy", busy),
        "slots were full": is_full,
        "load": os.getloadavg()[0],
    }


def _spread(name: str, values: list[float]) -> Figures:
    return {f"{name} median ms": statistics.median(values), f"{name} worst ms": max(values)}


def show(title: str, figures: Figures) -> None:
    """One line for people."""
    texts = (
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )
    print(f"{title}: {', '.join(texts)}", flush=True)


def main() -> int:
    """Measure all, print it, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller, to try it")
    parser.add_argument("--slots", type=int, default=32, help="of the worker [32, as on an M4]")
    parser.add_argument("--equal", action="store_true", help="all rows of the batch are alike")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    num_calls, num_rows, turns = (600, 160, 1) if options.quick else (6000, 800, 5)
    found: Figures = {}
    with world(FAKE_CLASS, options.slots) as running:
        measure_calls(running, num_calls // 4, is_stream=False)  # nothing is compiled or cached yet
        for name, is_stream in (("calls", False), ("streams", True)):
            found[name] = measure_calls(running, num_calls, is_stream=is_stream)
            show(name, found[name])
    with world(COMMAND_CLASS, options.slots, is_equal=options.equal) as running:
        measure_beside(running, 0, num_rows // 4)
        found["first token"] = measure_first(running, 20, num_rows)
        show("first token", found["first token"])
        runs = [measure_beside(running, number, num_rows) for number in range(1, turns + 1)]
        for run in runs:
            show("a batch beside", run)
        found["a batch beside"] = {
            name: statistics.median(run[name] for run in runs) for name in runs[0]
        }
        show("a batch beside, medians", found["a batch beside"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["calls"]["calls a second"] >= TARGET_CALLS else 1


if __name__ == "__main__":
    sys.exit(main())

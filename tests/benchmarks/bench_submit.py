"""How fast a file becomes a queued batch, and in how much memory.

    python tests/benchmarks/bench_submit.py                    # 50,000 prompts of 1,000 characters
    python tests/benchmarks/bench_submit.py --jobs 1000000     # and the memory for a million lines

Starts a server of its own on a unix socket. ``jobs/s`` is end to end, in a process of its own:
reading, JSON, validation, ordering, duplicate ids, compression, enqueueing. The baseline is RQ's
``enqueue_many`` on the same prompts, in chunks of 500, which checks and orders nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.redis_server import RedisServer, running_server

MIB = 2**20


def write_prompts(path: Path, num_jobs: int, num_chars: int, model: str | None = "demo") -> None:
    """OpenAI Batch lines: English-like words, a fifth of the prompts behind a common prefix."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    words = ["".join(rng.choices(letters, weights, k=rng.randint(2, 9))) for _ in range(5000)]
    ranks = [1 / (rank + 3) for rank in range(len(words))]
    text = " ".join(rng.choices(words, ranks, k=400_000))
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_jobs):
            start = 0 if index % 5 == 0 else rng.randrange(len(text) - num_chars)
            prompt = f"{text[start : start + num_chars - 8]}{index:08}"
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 100,
                "temperature": 0.7,
            }
            if model is not None:
                body = {"model": model, **body}
            row = {
                "custom_id": f"request-{index}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(row) + "\n")


def peak_bytes() -> int:
    """The largest resident size of this process so far.

    Linux's getrusage starts a child at its parent's peak; /proc does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_child(path: Path, url: str, profile: bool) -> None:
    """Submit once and print seconds and the peak of this process's memory as JSON."""
    from batchkv_producer import Client

    client = Client(Redis.from_url(url))
    profiler = cProfile.Profile() if profile else None
    started, started_cpu = time.perf_counter(), time.process_time()
    if profiler:
        profiler.enable()
    submitted = client.submit(path)
    if profiler:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - started_cpu
    figures = {
        "total": submitted.total,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(figures))


def measure_baseline(path: Path) -> float:
    """Jobs a second of RQ's enqueue_many."""
    with running_server() as server:
        return _enqueue_many(path, server)


def _enqueue_many(path: Path, server: RedisServer) -> float:
    from rq import Queue
    from rq.serializers import JSONSerializer

    queue = Queue("baseline", connection=server.connect(), serializer=JSONSerializer)
    bodies = [json.loads(line)["body"] for line in path.read_bytes().splitlines()[:20_000]]
    started = time.perf_counter()
    for start in range(0, len(bodies), 500):
        jobs = [
            Queue.prepare_data("batchkv.generate", (body,), job_id=f"b-{start + i}", timeout=3600)
            for i, body in enumerate(bodies[start : start + 500])
        ]
        queue.enqueue_many(jobs)
    return len(bodies) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--chars", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--baseline", action="store_true", help="also measure RQ's enqueue_many")
    parser.add_argument("--profile", action="store_true", help="profile the submitting process")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_child(Path(arguments.child[0]), arguments.child[1], arguments.profile)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        write_prompts(path, arguments.jobs, arguments.chars)
        for _ in range(arguments.repeat):
            baseline = measure_baseline(path) if arguments.baseline else None
            with running_server() as server:
                report(run_once(path, server, arguments.profile), path, baseline)


def run_once(path: Path, server: RedisServer, profile: bool) -> dict[str, float]:
    """One submit into an empty server, in a process of its own."""
    connection = server.connect()
    empty = connection.info("memory")["used_memory"]
    command = [sys.executable, __file__, "--child", str(path), server.url]
    output = subprocess.run(
        command + ["--profile"] * profile, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    figures: dict[str, float] = json.loads(output)
    figures["redis_bytes"] = connection.info("memory")["used_memory"] - empty
    figures["redis_cpu_seconds"] = _cpu_seconds(connection)
    return figures


def _cpu_seconds(connection: Redis) -> float:
    cpu = connection.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def report(figures: dict[str, float], path: Path, baseline: float | None) -> None:
    """Print one run as a table and as JSON."""
    total, seconds = figures["total"], figures["seconds"]
    rows = {
        "jobs": f"{total:,.0f}",
        "input": f"{path.stat().st_size / MIB:,.1f} MiB",
        "time": f"{seconds:.2f} s",
        "processor time": f"{figures['cpu_seconds']:.2f} s + {figures['redis_cpu_seconds']:.2f} s",
        "speed": f"{total / seconds:,.0f} jobs/s",
        "peak memory": f"{figures['peak_bytes'] / MIB:.1f} MiB",
        "Redis memory": f"{figures['redis_bytes'] / total:,.0f} bytes a job",
    }
    if baseline:
        rows["RQ's enqueue_many"] = f"{baseline:,.0f} jobs/s"
    for name, value in rows.items():
        print(f"{name:<20} {value:>18}")
    print(json.dumps({**figures, "jobs_per_second": total / seconds, "baseline": baseline}))


if __name__ == "__main__":
    main()

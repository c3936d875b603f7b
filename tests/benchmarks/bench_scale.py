"""What more workers bring, and what a million queued jobs cost those who look at them.

    python tests/benchmarks/bench_scale.py [--quick] [--part workers] [--json FILE]

``workers``: 1 and 2 real workers (the demo model), and 1, 2, 4 and 8 whose engine sleeps instead of
computing, which shows the queue's side alone; timed from the moment at which all are ready. On one
machine real workers share its cores: two are no faster than one unless it has some to spare.
``queue``: a batch is submitted, ten thousand of its rows are answered, and each command that people
wait for is run, as a process of its own, three times: the best of them, what of it only starting
Python takes, and the server's processor time, which tells whether a queue's length costs anything.
Exit code 1 when a command takes a second longer than starting it does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from bench_submit import MIB, run_once, write_prompts

from batchkv_producer import Client
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import SamplingParams
from batchkv_producer.wire.transitions import Transitions
from support.redis_server import RedisServer, running_server

TESTS = Path(__file__).parents[1]
CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
SUSPENDED = "rq:suspended"
READY = "the engine is ready"
READY_SECONDS = 120.0
SLEEPY = {"steps": 8, "step_seconds": 0.025}  # 160 rows a second in 32 slots
MAX_SECONDS = 1.0  # for a command that somebody waits for
NUM_PULLS, PULL_JOBS = 20, 128
NUM_TRIES = 3
STARTING = "--version (starting)"
LEASE_SECONDS = 600

Figures = dict[str, Any]


def environment(server: RedisServer, home: Path, **more: str) -> dict[str, str]:
    """What the commands see: this server, a home of their own, and nothing of the caller's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATCHKV_")}
    own = {"BATCHKV_REDIS_URL": server.url, "BATCHKV_HOME": str(home), "PYTHONPATH": str(TESTS)}
    return {**kept, **own, **more}


@contextmanager
def worker(command: Sequence[str], env: dict[str, str]) -> Iterator[None]:
    """A worker that is ready; its end is asked for and waited for."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    is_ready = threading.Event()

    def read(lines: Any) -> None:
        for line in lines:
            if READY in line:
                is_ready.set()

    reader = threading.Thread(target=read, args=(process.stdout,))
    reader.start()
    try:
        if not is_ready.wait(READY_SECONDS):
            raise RuntimeError(f"a worker does not get ready: {' '.join(command)}")
        yield
    finally:
        process.terminate()
        process.wait()
        reader.join()


def timed_batch(
    num_workers: int, command: Sequence[str], file: Path, model: str, max_tokens: int, plan: Figures
) -> Figures:
    """A batch through so many workers, from the moment at which all are ready."""
    with tempfile.TemporaryDirectory() as home, running_server() as server:
        client = Client(server.connect())
        env = environment(server, Path(home), FAKE_PLAN=json.dumps(plan))
        connection = server.connect()
        connection.set(SUSPENDED, 1)  # nobody takes anything before all are there
        with ExitStack() as workers:
            for _ in range(num_workers):
                workers.enter_context(worker(command, env))
            defaults = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            batch_id = client.submit(file, model=model, defaults=defaults).batch_id
            connection.delete(SUSPENDED)
            begin = time.perf_counter()
            while not (status := client.status(batch_id)).is_done:
                time.sleep(0.02)
            seconds = time.perf_counter() - begin
    assert status.ok == status.total, status.reconciliation()
    return {
        "workers": num_workers,
        "jobs": status.total,
        "seconds": round(seconds, 2),
        "jobs_per_second": round(status.total / seconds, 1),
        "tokens_per_second": round((status.prompt_tokens + status.completion_tokens) / seconds, 1),
    }


def measure_workers(arguments: argparse.Namespace) -> Figures:
    """Real workers, then workers that sleep."""
    share = 10 if arguments.quick else 1
    real = [*CLI, "worker", "-m", "demo"]
    fake = [sys.executable, "-m", "support.fake_engine", "-m", "fake"]
    found: Figures = {"cores": os.cpu_count(), "real": [], "sleeping": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        write_prompts(path, arguments.real_jobs // share, 1_000, model=None)
        for number in (1, 2):
            found["real"].append(timed_batch(number, real, path, "demo", 32, {}))
            tell("demo model", found["real"])
        write_prompts(path, arguments.fake_jobs // share, 100, model=None)
        for number in (1, 2, 4, 8):
            found["sleeping"].append(timed_batch(number, fake, path, "fake", 8, SLEEPY))
            tell("sleeping engine", found["sleeping"])
    return found


def tell(name: str, rows: list[Figures]) -> None:
    """The last row, against the first."""
    row = rows[-1]
    ratio = row["jobs_per_second"] / rows[0]["jobs_per_second"]
    print(
        f"{name:<16} {row['workers']} workers {row['jobs']:>6,} jobs {row['seconds']:>8.2f} s "
        f"{row['jobs_per_second']:>8,.1f} jobs/s {row['tokens_per_second']:>10,.0f} tokens/s "
        f"{ratio:>5.2f}x",
        flush=True,
    )


def command_seconds(env: dict[str, str], *arguments: str) -> float:
    """A command from its start to its end."""
    begin = time.perf_counter()
    done = subprocess.run(
        [*CLI, *arguments], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.decode()}")
    return seconds


def first_line_seconds(env: dict[str, str], *arguments: str) -> float:
    """A command from its start to the first line that it prints; then it is ended."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*CLI, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - begin
    process.kill()
    process.communicate()
    assert line, arguments
    return seconds


def best(
    connection: Redis,
    env: dict[str, str],
    run: Callable[..., float],
    tries: Sequence[tuple[str, ...]],
) -> tuple[float, float]:
    """(seconds, seconds of the server's processor), the best of some tries."""
    found = []
    for words in tries:
        before = server_seconds(connection)
        found.append((run(env, *words), server_seconds(connection) - before))
    return min(seconds for seconds, _ in found), min(used for _, used in found)


def server_seconds(connection: Redis) -> float:
    cpu = connection.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def answer_some(connection: Redis, env: dict[str, str], queue: str, count: int) -> float:
    """Have a worker without a model answer rows; the best seconds of a pull after that."""
    command = [sys.executable, "-m", "support.fake_engine", "-m", "demo", "--max-jobs", str(count)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, env=env, check=True, **quiet)
    moves, seconds = Transitions(connection), []
    for _ in range(NUM_PULLS):
        begin = time.perf_counter()
        run = moves.pull_run(queue, "bench", PULL_JOBS, LEASE_SECONDS)
        seconds.append(time.perf_counter() - begin)
        assert len(run.jobs) == PULL_JOBS
        moves.give_back(queue, [job.lease for job in run.jobs])
    return min(seconds)


def measure_queue(arguments: argparse.Namespace) -> Figures:
    """Submit, answer some, then every command that somebody waits for."""
    num_jobs = 20_000 if arguments.quick else arguments.jobs
    with tempfile.TemporaryDirectory() as folder, running_server() as server:
        path = Path(folder) / "prompts.jsonl"
        write_prompts(path, num_jobs, 1_000)
        submitted = run_once(path, server, profile=False)
        connection = server.connect()
        env = environment(server, Path(folder))
        (batch,) = Client(connection).list_batches()
        middle = redis_keys.job_id(batch.batch_id, num_jobs // 2)
        pull_seconds = answer_some(connection, env, batch.queue, min(10_000, num_jobs // 2))
        (ended,) = connection.lrange(redis_keys.done(batch.batch_id), 0, 0)
        ended_id = redis_keys.job_id(batch.batch_id, int(ended))
        last = connection.lrange(redis_keys.queue(batch.queue), -NUM_TRIES, -1)
        commands: dict[str, list[tuple[str, ...]]] = {
            STARTING: [("--version",)] * NUM_TRIES,
            "status": [("status",)] * NUM_TRIES,
            "status BATCH": [("status", batch.batch_id)] * NUM_TRIES,
            "status JOB": [("status", middle)] * NUM_TRIES,
            "list": [("list",)] * NUM_TRIES,
            "workers": [("workers",)] * NUM_TRIES,
            "result ID": [("result", ended_id)] * NUM_TRIES,
            "cancel JOB (the last)": [("cancel", job_id.decode()) for job_id in last],
        }
        timed = {
            name: best(connection, env, command_seconds, tries) for name, tries in commands.items()
        }
        for option in ("", "--ordered", "--follow"):
            words = ("results", batch.batch_id, *option.split())
            name = f"results {option}".strip() + ", first line"
            timed[name] = best(connection, env, first_line_seconds, [words] * NUM_TRIES)
    return {
        "jobs": num_jobs,
        "submit_seconds": round(submitted["seconds"], 2),
        "submit_peak_mib": round(submitted["peak_bytes"] / MIB, 1),
        "redis_bytes_per_job": round(submitted["redis_bytes"] / num_jobs),
        "pull_128_seconds": round(pull_seconds, 4),
        "command_seconds": {name: round(value, 3) for name, (value, _) in timed.items()},
        "server_seconds": {name: round(value, 5) for name, (_, value) in timed.items()},
    }


def tell_queue(found: Figures) -> bool:
    """The table; whether no command takes too long."""
    print(f"{found['jobs']:,} jobs queued")
    print(f"{'submit':<32}{found['submit_seconds']:>10.2f} s")
    print(f"{'peak memory of submit':<32}{found['submit_peak_mib']:>10.1f} MiB")
    print(f"{'Redis memory':<32}{found['redis_bytes_per_job']:>10,} bytes a job")
    print(f"{'a pull of 128 jobs':<32}{found['pull_128_seconds'] * 1e3:>10.1f} ms")
    is_met = True
    for name, seconds in found["command_seconds"].items():
        is_good = seconds - found["command_seconds"][STARTING] <= MAX_SECONDS
        is_met &= is_good
        server = found["server_seconds"][name] * 1e3
        mark = "" if is_good else "  TOO LONG"
        print(f"{name:<32}{seconds:>10.2f} s{server:>10.1f} ms of the server{mark}")
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["workers", "queue", "all"], default="all")
    parser.add_argument("--jobs", type=int, default=1_000_000, help="queued at once")
    parser.add_argument("--real-jobs", type=int, default=400)
    parser.add_argument("--fake-jobs", type=int, default=4_800)
    parser.add_argument("--quick", action="store_true", help="20,000 jobs, a tenth of the batches")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    found: Figures = {}
    is_met = True
    if arguments.part != "queue":
        found["workers"] = measure_workers(arguments)
    if arguments.part != "workers":
        found["queue"] = measure_queue(arguments)
        is_met = tell_queue(found["queue"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

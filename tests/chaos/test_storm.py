"""Thousands of rows under random faults: each gets one result, the right one, and nothing is left.

The short forms are of the ordinary suite. ``make chaos`` runs the long ones; ``CHAOS_SEED`` is the
seed, ``CHAOS_FAULTS`` a log of faults to follow instead.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.faults import Fault, Weather, plan, read_log
from chaos.rows import Work
from chaos.storm import Crew, Report, Storm
from support import tiny_models
from support.tiny_worker import COMMAND_CLASS, FAMILY

IS_LONG = os.environ.get("BATCHKV_CHAOS", "") == "long"
SEED = int(os.environ.get("CHAOS_SEED", "1"))
NUM_WORKERS = 4


def faults_of(weather: Weather) -> list[Fault]:
    log = os.environ.get("CHAOS_FAULTS")
    return read_log(Path(log)) if log else plan(SEED, weather, NUM_WORKERS)


def weathered(storm: Storm, deadline_seconds: float, folder: Path) -> Report:
    """Its report; what fails says how to see it again."""
    try:
        report = storm.run(deadline_seconds)
    except BaseException:
        sys.stderr.write(
            f"\nseed {SEED}; the same again: make chaos ARGS='--seed {SEED}', or with the faults "
            f"as they came: ARGS='--faults {folder}/faults.jsonl'; workers' logs are there too\n"
        )
        raise
    sys.stdout.write(f"\nseed {SEED}: {report}\n")
    return report


def echoes(count: int, longest: int) -> Work:
    """Rows of 1 to ``longest`` steps, whose answer is a function of the prompt."""
    rng = random.Random(SEED)
    prompts = [f"slow:{rng.randint(1, longest)} row {line}" for line in range(1, count + 1)]
    return Work(prompts, [f"echo {prompt}" for prompt in prompts])


@pytest.mark.timeout(1200)
def test_kills_outages_and_sleep(tmp_path: Path) -> None:
    """Four workers on a fake engine: kill -9 of workers and of the server, sleep beyond the leases,
    RQ's own tools all the time."""
    weather = Weather(kills=5, freezes=1, server_kills=1, quiet_seconds=0.35)
    count, deadline = 300, 60.0
    if IS_LONG:
        weather = Weather(
            kills=110, freezes=25, server_kills=5, server_stops=2, infos=12, quiet_seconds=0.8
        )
        count, deadline = 10_000, 900.0
    crew = Crew(NUM_WORKERS, {"SLOTS": 4, "PREFETCH": 2}, {"step_seconds": 0.01})
    storm = Storm(tmp_path, echoes(count, 30), faults_of(weather), crew)
    report = weathered(storm, deadline, tmp_path)
    assert report.num_audits > 3
    assert report.num_failed <= count // 100


def numbers(count: int, longest: int) -> Work:
    """Rows for the tiny model, a third of them behind one of two prefixes of more than a block."""
    from worker.prefix.engines_on_store import random_prompt, run, running, tokens

    rng = random.Random(SEED)
    prefixes = [random_prompt(1, 300), random_prompt(2, 560)]
    rows = []
    for line in range(count):
        start = rng.choice(prefixes) if rng.random() < 0.33 else []
        rows.append([*start, *random_prompt(1000 + line, rng.randint(1, 40))])
    with running(tiny_models.build(FAMILY), None) as engine:
        ended = tokens(run(engine, rows, longest))
    answers = ["".join(f"{token} " for token in row) for row in ended]
    return Work([" ".join(map(str, row)) for row in rows], answers, longest)


@pytest.mark.skipif(not IS_LONG, reason="make chaos: it starts many real engines")
@pytest.mark.timeout(1200)
def test_a_real_model_gives_the_same_tokens(tmp_path: Path) -> None:
    """Real engines with a cache on disk that all share: whatever dies in the middle, the tokens are
    those of a run that nothing befell, and no half-written block is left."""
    weather = Weather(kills=24, freezes=5, server_kills=2, infos=3, quiet_seconds=1.6)
    count = 500
    settings: dict[str, object] = {"SLOTS": 4, "PREFETCH": 2, "KV_SCHEME": "float"}
    settings["CACHE"] = f"disk:{tmp_path}/blocks?max=64MB"
    crew = Crew(NUM_WORKERS, settings, {"step_seconds": 0.01}, COMMAND_CLASS, spares_starters=True)
    storm = Storm(tmp_path, numbers(count, 100), faults_of(weather), crew, chunk_rows=100)
    report = weathered(storm, 500.0, tmp_path)
    assert report.num_failed <= count // 50
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "batchkv_producer", "cache", "verify", "--json"],
        env={**os.environ, "BATCHKV_CACHE": str(settings["CACHE"])},
        capture_output=True,
        check=True,
    )
    (tier,) = json.loads(verified.stdout)["tiers"]
    assert tier["num_whole"] >= 2 and tier["num_damaged"] == 0

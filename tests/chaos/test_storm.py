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
from typing import Any

import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import Request, SamplingParams
from chaos.faults import Fault, Weather, plan, read_log
from chaos.rows import Work, said
from chaos.storm import Crew, Report, Storm
from support import tiny_models
from support.tiny_worker import CHAT_CLASS, CHAT_KIND, COMMAND_CLASS, FAMILY

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
    """Rows of 1 to ``longest`` steps, whose answer is a function of the prompt.

    Some have several choices, more than one worker has slots.
    """
    rng = random.Random(SEED)
    prompts = [f"slow:{rng.randint(1, longest)} row {line}" for line in range(1, count + 1)]
    params = [SamplingParams(n=6 if line % 9 == 0 else None) for line in range(count)]
    answers = [
        tuple(f"echo {prompt}" + (f" #{number}" if number else "") for number in range(one.n or 1))
        for prompt, one in zip(prompts, params, strict=True)
    ]
    return Work.of_prompts(prompts, answers, params)


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
    """Rows for the tiny model, a third of them behind one of two prefixes of more than a block.

    Every fifth row has six choices, which sample. Every seventh changes its logits by what it has
    generated.
    """
    from batchkv_worker import events
    from worker.prefix.engines_on_store import finish, random_prompt, running

    rng = random.Random(SEED)
    prefixes = [random_prompt(1, 300), random_prompt(2, 560)]
    prompts, params = [], []
    for line in range(count):
        start = rng.choice(prefixes) if rng.random() < 0.33 else []
        row = [*start, *random_prompt(1000 + line, rng.randint(1, 40))]
        prompts.append(" ".join(map(str, row)))
        one = SamplingParams(max_tokens=longest)
        if line % 5 == 0:  # few tokens and candidates: rounding must not decide between any
            one = SamplingParams(max_tokens=8, temperature=1.0, top_k=4, seed=line, n=6)
        elif line % 7 == 0:
            biased = tuple((token, 4.0) for token in range(6))
            one = SamplingParams(
                **{"max_tokens": longest, "temperature": 0, "frequency_penalty": 0.7},
                **{"repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (1, 2)},
                **{"logit_bias": biased, "bad_words": ("0 3", "4 5 4")},
            )
        params.append(one)
    with running(tiny_models.build(FAMILY), None) as engine:
        for line, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            request = Request("c", "completion", prompt=prompt, params=one)
            engine.add(events.Work(str(line), request))
        ended = finish(engine, count)
    answers = [(event.text, *(choice.text for choice in event.more)) for event in ended]
    return Work.of_prompts(prompts, answers, params)


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


TOOL_PARAMETERS: dict[str, Any] = {
    **{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": TOOL_PARAMETERS}}]
SCHEMA = {"type": "array", "items": {"enum": ["a", "b", 7]}, "minItems": 3, "maxItems": 9}


def chats(count: int) -> Work:
    """Chat rows of every kind: budgets, forms of the answer, calls that must be made, choices."""
    from batchkv_worker import events
    from batchkv_worker.engine.engine import Engine, EngineConfig
    from worker.prefix.engines_on_store import finish

    rng, requests = random.Random(SEED), list[Request]()
    forms = (
        None,
        Constraint("json_schema", SCHEMA),
        Constraint("regex", "[a-z]{20,30}"),
        Constraint("choice", ["one of these", "or that"]),
    )
    for line in range(1, count + 1):
        asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
        asked |= {"thinking_budget": rng.choice([None, 0, 3, 20])}
        more: dict[str, Any] = {"constraint": rng.choice(forms)}
        if line % 4 == 0:
            choice = rng.choice(["required", "function:count"])
            more = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        if line % 7 == 0:  # few candidates: rounding must not decide between any
            asked |= {"temperature": 1.0, "top_k": 4, "seed": line, "n": 3, "max_tokens": 40}
        content = f"How many are {rng.randrange(100)}? " * rng.randint(1, 20)
        messages = [{"role": "user", "content": content}]
        params = SamplingParams(**asked)
        requests.append(Request(f"c{line}", "chat", messages=messages, params=params, **more))
    sizes = {"slots": 6, "chunk_tokens": 512, "memory_bytes": 2**28}
    config = EngineConfig("float", path="fused", group_cost=64, **sizes)
    loaded = tiny_models.loaded_chat(tiny_models.build(FAMILY), CHAT_KIND)
    engine = Engine(loaded, tiny_models.with_measured(loaded.model, config))
    try:
        for index, request in enumerate(requests):
            engine.add(events.Work(str(index), request))
        ended = finish(engine, count)
    finally:
        engine.close()
    answers = [(said(event), *(said(choice) for choice in event.more)) for event in ended]
    assert sum(" calls count(" in answer for answer, *_ in answers) > count // 8
    return Work(requests, answers)


@pytest.mark.skipif(not IS_LONG, reason="make chaos: it starts many real engines")
@pytest.mark.timeout(1200)
def test_thoughts_forms_and_calls_survive(tmp_path: Path) -> None:
    """Whatever dies in the middle of a thought, a form or a call: the answers are those of a run
    that nothing befell."""
    weather = Weather(kills=16, freezes=3, server_kills=2, infos=2, quiet_seconds=1.6)
    count = 300
    settings: dict[str, object] = {"SLOTS": 4, "PREFETCH": 2, "KV_SCHEME": "float"}
    settings["CACHE"] = f"disk:{tmp_path}/blocks?max=64MB"
    crew = Crew(NUM_WORKERS, settings, {"step_seconds": 0.01}, CHAT_CLASS, spares_starters=True)
    storm = Storm(tmp_path, chats(count), faults_of(weather), crew, chunk_rows=100)
    report = weathered(storm, 500.0, tmp_path)
    assert report.num_failed <= count // 20

"""What grammars cost: a step's masks at a large vocabulary, and whole runs of the demo model.

    python tests/benchmarks/bench_grammar.py [--quick] [--json FILE]

``masks``    milliseconds of the host a step, for 32 rows with schemas at a vocabulary of 151,936:
             filling their masks, and taking their tokens; no model runs
``whole``    1,000 rows with 50 schemas beside 1,000 rows without: every whole answer is checked
             with a validator, and every row without is one of a run that has no grammar at all
``cost``     the time of 1,000 rows that may write any text by a grammar, over the same rows without
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

import jsonschema  # noqa: E402
import numpy as np  # noqa: E402
from llguidance import LLTokenizer, TokenizerWrapper  # noqa: E402

from batchkv_producer.wire.constraint import Constraint  # noqa: E402
from batchkv_producer.wire.job import Request, SamplingParams  # noqa: E402
from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.engine.grammar.compiling import Compiled, compiled_matcher  # noqa: E402
from batchkv_worker.engine.grammar.guide import GrammarGuide  # noqa: E402
from batchkv_worker.engine.grammar.masks import Masks  # noqa: E402
from batchkv_worker.engine.grammar.text import grammar_text  # noqa: E402
from batchkv_worker.events import Completed, Work  # noqa: E402
from batchkv_worker.model.loader import load  # noqa: E402
from batchkv_worker.sequence import Generation, Sequence  # noqa: E402

ROWS, VOCABULARY, SCHEMAS = 32, 151_936, 50
ANY_TEXT = Constraint("regex", "(?s:.*)")


def schema_of(number: int) -> dict[str, Any]:
    """One of many different schemas of records."""
    rng = random.Random(number)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 10 ** (1 + number % 4)},
        {"type": "string", "minLength": 1, "maxLength": 4 + number % 9},
        {"type": "boolean"},
        {"enum": [f"v{number}", "none", None]},
        {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
        {"anyOf": [{"type": "null"}, {"enum": [0.5, 1.25, -3e2]}]},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2}$"},
    ]
    names = [f"field_{number}_{place}" for place in range(2 + number % 4)]
    return {
        "type": "object",
        "properties": {name: rng.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


# -- masks


class _Words:
    """A tokenizer of syllables, numbers and marks, as large as those of today's models."""

    eos_token_id, bos_token_id = VOCABULARY - 1, None

    def __init__(self) -> None:
        rng = random.Random(0)
        marks = ['":', '",', '","', '"}', '": "', '":"', '{"', '[{"', "}]", "},{", "  ", "\n"]
        parts = [a + b + c for a in "bcdfghklmnprstvwz" for b in "aeiou" for c in " nrst"]
        found = {bytes([byte]): None for byte in range(256)}
        while len(found) < VOCABULARY - 1:
            word = "".join(rng.choice(parts).strip() for _ in range(rng.randint(1, 4)))
            form = rng.choice((" {}", " {}", "{}", "{}", '"{}', '{}"', "{}{}"))
            text = form.format(word, rng.choice(marks))
            found[text.encode() if rng.random() < 0.95 else str(rng.randrange(10**5)).encode()] = (
                None
            )
        self.tokens = [*found, b"<|end|>"]
        self.special_token_ids = [VOCABULARY - 1]

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@dataclass(frozen=True, slots=True)
class MaskCost:
    """Milliseconds of a step for all rows: the median, the 95th percentile, the longest."""

    fill: tuple[float, float, float]
    take: tuple[float, float, float]
    processor: tuple[float, float, float]  # of both, also on a machine that does other things


def mask_cost(num_steps: int) -> MaskCost:
    tokenizer = LLTokenizer(TokenizerWrapper(_Words()))
    made = []
    for number in range(ROWS):
        text = grammar_text(Constraint("json_schema", schema_of(number)))
        made.append(Compiled(text, tokenizer, (VOCABULARY - 1,), compiled_matcher(text, tokenizer)))
    rows = [
        Sequence(str(n), [0], Generation(10**6), guide=GrammarGuide(g)) for n, g in enumerate(made)
    ]
    masks, rng = Masks(), np.random.default_rng(0)
    fills, takes, spent = [], [], []
    for _ in range(num_steps):
        begin, processor = time.perf_counter(), time.process_time()
        found, faults = masks.fill(rows, VOCABULARY)
        fills.append(time.perf_counter() - begin)
        processor = time.process_time() - processor
        assert not faults
        chosen = [_token(mask, rng) for mask in found]
        begin, processor = time.perf_counter(), time.process_time() - processor
        for row, token in zip(rows, chosen, strict=True):
            assert row.guide is not None
            row.guide.take(token)
        takes.append(time.perf_counter() - begin)
        spent.append(time.process_time() - processor)
        for row, grammar in zip(rows, made, strict=True):
            if row.guide is not None and row.guide.is_over:
                row.guide = GrammarGuide(grammar)
    return MaskCost(*(_spread(times[ROWS:]) for times in (fills, takes, spent)))


def _token(mask: np.ndarray, rng: np.random.Generator) -> int:
    """A token of those allowed: a short one, so that texts grow as they do with a model."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    few = allowed[allowed < 256]
    return int(rng.choice(few if len(few) and rng.random() < 0.3 else allowed))


def _spread(seconds: list[float]) -> tuple[float, float, float]:
    ranked = sorted(seconds)
    found = statistics.median(ranked), ranked[len(ranked) * 19 // 20], ranked[-1]
    return tuple(round(1e3 * one, 3) for one in found)  # type: ignore[return-value]


# -- whole runs of the demo model


def _engine() -> Engine:
    config = EngineConfig(
        slots=ROWS, memory_bytes=2**29, path="fused", group_cost=0, prefix_cells=0
    )
    return Engine(load("demo"), config)


def _works(count: int, kind: str) -> Iterator[Work]:
    for number in range(count):
        constraint = {
            "schema": Constraint("json_schema", schema_of(number % SCHEMAS)),
            "any": ANY_TEXT,
        }.get(kind)
        params = SamplingParams(max_tokens=160 if kind == "schema" else 24, seed=number)
        message = {"role": "user", "content": f"Write a record of number {number}."}
        asked = Request(
            str(number), "chat", messages=[message], constraint=constraint, params=params
        )
        yield Work(f"{kind} {number}", asked)


def run(running: Engine, works: list[Work]) -> tuple[dict[str, Completed], float]:
    """How all rows ended, and the seconds that they took."""
    ended: dict[str, Completed] = {}
    begin = time.perf_counter()
    for work in works:
        running.add(work)
    while not running.is_idle:
        for event in running.step():
            assert isinstance(event, Completed), event
            ended[event.job_id] = event
    return ended, time.perf_counter() - begin


def whole(count: int) -> dict[str, float]:
    """Rows with schemas among rows without, and both kinds of rows alone."""
    running = _engine()
    guided, free = list(_works(count, "schema")), list(_works(count, "free"))
    mixed = [work for pair in zip(guided, free, strict=True) for work in pair]
    ended, seconds = run(running, mixed)
    num_whole = 0
    for work in guided:
        event, asked = ended[work.job_id], work.request.constraint
        if event.finish_reason == "stop":
            assert asked is not None
            value = json.loads(event.text)
            jsonschema.validate(value, asked.value, jsonschema.Draft202012Validator)
            num_whole += 1
    alone, free_seconds = run(running, free)
    assert all(alone[w.job_id].token_ids == ended[w.job_id].token_ids for w in free)
    running.close()
    return {
        "rows": 2 * count,
        "whole": num_whole,
        "cut": count - num_whole,
        "seconds": round(seconds, 1),
        "seconds_without": round(free_seconds, 1),
    }


def cost(count: int, repeats: int) -> dict[str, float]:
    """The time of a step with a grammar over one without: the same rows, and nearly any text."""
    running = _engine()
    run(running, list(_works(count, "free")))
    found: dict[str, list[float]] = {"free": [], "any": []}
    for _ in range(repeats):
        for kind, times in found.items():
            ended, seconds = run(running, list(_works(count, kind)))
            times.append(seconds / sum(len(event.token_ids) for event in ended.values()))
    running.close()
    free, guided = (min(times) for times in found.values())
    return {
        "us_a_token_without": round(1e6 * free, 1),
        "us_a_token_with": round(1e6 * guided, 1),
        "ratio": round(guided / free, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"masks": asdict(mask_cost(100 if args.quick else 2000))}
    print("masks, ms a step of 32 rows (median, 95 %, longest):", found["masks"], flush=True)
    found["whole"] = whole(100 if args.quick else 1000)
    print("whole:", found["whole"], flush=True)
    found["cost"] = cost(100 if args.quick else 1000, 2 if args.quick else 3)
    print("cost:", found["cost"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

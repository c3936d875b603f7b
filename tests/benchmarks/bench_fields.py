"""What fields that change logits cost a decode step: on the host, and in the whole sampling.

    python tests/benchmarks/bench_fields.py [--quick] [--json FILE]

32 rows of a vocabulary of 151,936, with 1,000 known tokens each. Their newest token is on the
device alone, as while a step is in flight. No model runs.

``host``    milliseconds of this thread for building the graph, the median of many
``whole``   milliseconds until the tokens are there
``added``   primitives of the graph beyond those of rows that ask for nothing
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

import mlx.core as mx  # noqa: E402

from batchkv_worker.engine.tokens.sampling import sample  # noqa: E402
from batchkv_worker.sequence import Generation, Sequence  # noqa: E402

ROWS, VOCABULARY, KNOWN = 32, 151_936, 1000
_LABEL = re.compile(r'\[label ="')
_RNG = random.Random(0)

PENALTIES: dict[str, Any] = {
    **{"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
}
BIASES: dict[str, Any] = {
    "logit_bias": tuple((token, 1.0) for token in range(300)),
    "bad_words": tuple(
        tuple(_RNG.randrange(VOCABULARY) for _ in range(length))
        for length in (1, 2, 3)
        for _ in range(30)
    ),
}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "all penalties": PENALTIES,
    "300 biases, 90 bad words": BIASES,
    "min_tokens": {"min_tokens": 10**6, "late_tokens": frozenset({1, 2})},
    "all of it": {**PENALTIES, **BIASES},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step with such rows costs."""

    host_ms: float
    whole_ms: float
    num_primitives: int


def rows_that_ask(asked: dict[str, Any]) -> list[Sequence]:
    made = []
    for index in range(ROWS):
        known = [_RNG.randrange(VOCABULARY) for _ in range(KNOWN)]
        generation = Generation(10**7, temperature=0.0, **asked)
        row = Sequence(str(index), known[: KNOWN // 2], generation)
        row.generated = known[KNOWN // 2 :]
        row.num_dispatched = len(row.generated) + 1
        made.append(row)
    return made


def cost_of(asked: dict[str, Any], count: int) -> Cost:
    logits = mx.random.normal((ROWS, VOCABULARY)).astype(mx.bfloat16)
    inputs = mx.array([_RNG.randrange(VOCABULARY) for _ in range(ROWS)])
    mx.eval(logits, inputs)
    made = rows_that_ask(asked)
    graph = io.StringIO()
    mx.export_to_dot(graph, sample(logits, inputs, [*made]).tokens)
    host, whole = [], []
    for _ in range(count):
        begin, cpu = time.perf_counter(), time.thread_time()
        tokens = sample(logits, inputs, [*made]).tokens
        host.append(time.thread_time() - cpu)
        mx.eval(tokens)
        whole.append(time.perf_counter() - begin)
        for row in made:
            row.generated.append(_RNG.randrange(VOCABULARY))
            row.num_dispatched += 1
    return Cost(
        round(1e3 * statistics.median(host), 3),
        round(1e3 * statistics.median(whole), 2),
        len(_LABEL.findall(graph.getvalue())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {name: cost_of(asked, 10 if args.quick else 100) for name, asked in ASKED.items()}
    plain = found["nothing"].num_primitives
    print(f"{'rows ask for':28}{'host ms':>10}{'whole ms':>10}{'added':>8}")
    for name, cost in found.items():
        added = cost.num_primitives - plain
        print(f"{name:28}{cost.host_ms:>10.3f}{cost.whole_ms:>10.2f}{added:>8}")
    if args.json:
        document = {name: asdict(cost) for name, cost in found.items()}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

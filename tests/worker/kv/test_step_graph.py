"""What a run asks of MLX: so many primitives, in so many evaluations, and no more."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.kv.backends.contract import Backend, Pacing
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.pacing import LayersAhead
from batchkv_worker.sequence import Generation, Sequence
from benchmarks.workloads import WORKLOADS, build_model
from support import tiny_models
from worker.kv.reference import x86

_PRIMITIVE = re.compile(r'\[label ="')


class Rounded(GenericBackend):
    """Shapes are rounded and the host is held back, as on CUDA."""

    def pacing(self, launches: Launches) -> Pacing:
        return LayersAhead(launches)


BACKENDS: dict[str, tuple[Callable[[], Backend], str, Any]] = {
    "x86": (x86, "float", "folded"),
    "generic": (GenericBackend, "affine8", "packed"),
    "rounded": (lambda: Rounded(columns_multiple=64, rows_multiple=8), "float", "fused"),
}
# Primitives, evaluations that are waited for, and those that are not.
ASKED = {
    ("x86", "equal"): (9477, 98, 90),
    ("x86", "mixed"): (10084, 110, 90),
    ("x86", "shared"): (14975, 106, 100),
    ("generic", "equal"): (11152, 30, 18),
    ("generic", "mixed"): (12208, 42, 18),
    ("generic", "shared"): (18026, 34, 24),
    ("rounded", "equal"): (10216, 30, 18),
    ("rounded", "mixed"): (10840, 42, 18),
    ("rounded", "shared"): (12012, 34, 26),
}


def arrays_in(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from arrays_in(item)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of evaluation was asked for, and primitives in all."""
    found: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*trees: Any) -> Any:
            graph = io.StringIO()
            if arrays := [*arrays_in(trees)]:
                mx.export_to_dot(graph, *arrays)
            found[name] += 1
            found["primitives"] += len(_PRIMITIVE.findall(graph.getvalue()))
            return real(*trees)

        return call

    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, counting(name, getattr(mx, name)))
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(("backend", "workload"), ASKED)
def test_a_run_asks_for_what_it_did(backend: str, workload: str, asked: Counter[str]) -> None:
    """A change of these numbers is a change of every step: it is meant, or it is a fault."""
    make, scheme, path = BACKENDS[backend]
    model = build_model("bench-3m", mx.float32)
    config = EngineConfig(
        scheme=scheme,
        slots=4,
        chunk_tokens=512,
        memory_bytes=2**30,
        path=path,
        group_cost=600,
        prefix_cells=512,
        backend=make(),
    )
    engine = Engine(tiny_models.loaded(model), config)
    work = WORKLOADS[workload](8, random.Random(7))
    for index, (prompt, count) in enumerate(zip(work.prompts, work.max_tokens, strict=True)):
        generation = Generation(min(count, 8), temperature=0.0)
        engine.submit_row(Sequence(str(index), prompt, generation))
    asked.clear()
    while not engine.is_idle:
        engine.step()
    found = asked["primitives"], asked["eval"], asked["async_eval"]
    engine.close()
    assert found == ASKED[backend, workload]

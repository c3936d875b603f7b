"""The graph of a step is used again for later steps: same numbers, in place, nothing kept."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any, cast

import mlx.core as mx
import pytest

from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.layers import step_graphs
from batchkv_worker.kv.layers.step_graphs import StepGraphs
from batchkv_worker.kv.slots.step_view import StepView
from batchkv_worker.kv.start.replaycheck import can_replay
from parity.families import VOCABULARY
from support import tiny_models
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.record_backends import WithRecords

PREFIX = random_prompt(1, 520)
ROWS = {str(i): (PREFIX if i > 1 else []) + random_prompt(i + 5, 3 + 11 * i) for i in range(6)}


def crowd_of(family: str, scheme: str, path: str, **changes: Any) -> Crowd:
    backend = WithRecords(columns_multiple=64, **changes)
    given: Any = {"path": path, "group_cost": 10_000, "prefix_cells": 1}
    return Crowd(family, scheme=scheme, backend=backend, **given)


def graphs_of(crowd: Crowd) -> StepGraphs:
    graphs = crowd.engine._slots.graphs
    assert graphs is not None
    return graphs


def answers(crowd: Crowd, count: int = 24) -> dict[str, list[int]]:
    """Of all rows; most of them share a prefix for some time."""
    for index, (job_id, prompt) in enumerate(ROWS.items()):
        crowd.add(job_id, prompt, count - index)
    has_shared = False
    while not crowd.engine.is_idle:
        crowd.step()
        has_shared |= bool(crowd.engine._slots.layouts.prefixes)
    assert has_shared
    return {job_id: crowd.tokens(job_id) for job_id in ROWS}


@pytest.mark.parametrize(("family", "path"), [("llama", "folded"), ("gemma3_text", "fused")])
def test_tokens_are_those_of_steps_that_are_built(family: str, path: str) -> None:
    """While rows join, end at different steps and take others' slots; with windows and prefixes."""
    wanted = answers(crowd_of(family, "float", path))
    crowd = crowd_of(family, "float", path, replays_steps=True)
    assert answers(crowd) == wanted
    assert graphs_of(crowd).num_replayed > 10


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is run again for each step: MLX compiles long for plain kernels on a CPU."""
    monkeypatch.setattr(step_graphs.mx, "compile", lambda function: function)


@pytest.mark.parametrize(("family", "scheme"), [("llama", "affine8"), ("falcon_h1", "k8v4")])
@pytest.mark.usefixtures("uncompiled")
def test_steps_over_records_follow_their_arguments(family: str, scheme: str) -> None:
    """Bounds, the column that is written and shared prefixes come from the arrays of the step."""
    wanted = answers(crowd_of(family, scheme, "kernel"))
    crowd = crowd_of(family, scheme, "kernel", replays_steps=True)
    assert answers(crowd) == wanted
    assert graphs_of(crowd).num_replayed > 10


def test_buffers_are_written_in_place() -> None:
    """A step from a graph takes no memory for copies of the buffers."""
    peaks = []
    for replays in (False, True):
        crowd = crowd_of("llama", "float", "folded", replays_steps=replays)
        for index in range(2):
            crowd.add(str(index), random_prompt(index, 1200 + index), 40)
        crowd.step(10)
        size = crowd.engine._slots.nbytes
        step = StepOfSlots(crowd)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(step.build())
        peaks.append(mx.get_peak_memory() - before)
        assert not replays or graphs_of(crowd).num_replayed
        crowd.engine.close()
    assert peaks[1] < peaks[0] + size / 4


class StepOfSlots:
    """A step of the slots alone, whose tokens nobody reads."""

    def __init__(self, crowd: Crowd) -> None:
        self._slots, self._model = crowd.engine._slots, crowd.model
        crowd.engine._read_in_flight()

    def build(self) -> list[mx.array]:
        view = self._slots.begin_step()
        logits = self._slots.forward(self._model, mx.ones((view.num_rows, 1), mx.int32))
        self._slots.end_step()
        return [logits, *self._slots.arrays]


def test_a_graph_holds_no_prefix() -> None:
    """What rows have left is freed, though the graph is kept."""
    crowd = crowd_of("llama", "float", "folded", replays_steps=True)
    for index, (job_id, prompt) in enumerate(ROWS.items()):
        crowd.add(job_id, prompt, 20 if index > 1 else 50)
    while not crowd.engine._slots.layouts.prefixes:
        crowd.step()
    crowd.step(3)
    layouts = crowd.engine._slots.layouts
    held = [weakref.ref(prefix) for prefix in {*layouts.prefixes.values()}]
    assert held and graphs_of(crowd).num_replayed
    while layouts.prefixes:
        assert graphs_of(crowd)._graphs
        crowd.step()
    crowd.engine._read_in_flight()
    gc.collect()
    assert all(one() is None for one in held)


def test_a_model_that_reads_a_number_is_built_anew(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be traced, so each step is built; its tokens are the same."""
    caplog.set_level(logging.INFO, "batchkv.engine")
    wanted = answers(crowd_of("llama", "float", "folded"), 12)
    crowd = crowd_of("llama", "float", "folded", replays_steps=True)
    model, forward = crowd.model, graphs_of(crowd).forward

    def reading(tokens: mx.array, cache: Any) -> Any:
        return model(tokens, cache=cache) + 0 * tokens[0, 0].item()

    graphs_of(crowd).forward = lambda _, *rest: forward(reading, *rest)  # type: ignore[method-assign]
    assert answers(crowd, 12) == wanted
    assert graphs_of(crowd).num_replayed == 0
    assert sum("cannot be traced" in line for line in caplog.messages) == 1


def test_a_model_that_counts_its_steps_is_found() -> None:
    """A graph would repeat the number of the step that was traced."""
    plan = crowd_of("llama", "float", "folded").engine.plan
    steps = [0]

    def counting(tokens: mx.array, cache: Any) -> Any:
        steps[0] = 0 if tokens.shape[1] > 1 else steps[0] + 1
        return model(tokens, cache=cache) + 100.0 * steps[0] * (mx.arange(VOCABULARY) == 3)

    model = tiny_models.build("llama")
    paths.install_hook(model)
    what = plan.backend, plan.tree, plan.kinds, plan.traits, mx.float32
    assert can_replay(what[0], model, *what[1:])
    assert not can_replay(what[0], counting, *what[1:])


def test_the_four_shapes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that comes again is not built again; dropped, all are."""
    shape = [""]
    monkeypatch.setattr(step_graphs, "signature", lambda *_, **__: shape[0])
    monkeypatch.setattr(step_graphs, "arguments", lambda _: [])
    monkeypatch.setattr(step_graphs, "steps_left", lambda _: 100)
    monkeypatch.setattr(step_graphs, "traced", lambda view, _: view)
    graphs, built = StepGraphs([], []), list[str]()

    def model(tokens: mx.array, cache: Any) -> mx.array:
        built.append(shape[0])
        return tokens

    def steps(shapes: str) -> str:
        """Two steps of each shape, or one that is kept; which of them the model built."""
        built.clear()
        for one in shapes:
            shape[0] = one
            for _ in range(2):
                graphs.forward(model, mx.zeros((1, 1), mx.int32), cast("StepView", object()))
        return "".join(built)

    assert steps("abcd") == "aabbccdd"  # the second is the trace
    assert steps("badc") == ""
    assert steps("e") == "ee" and steps("adce") == "" and steps("b") == "bb"
    graphs.drop()
    assert steps("b") == "bb"

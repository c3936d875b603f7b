"""A row's phase, the only methods that change it, and rows that repeat others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import batchkv_worker
from batchkv_worker.sequence import Generation, Sequence, Status
from worker.kv.crowd import Crowd, random_prompt

# Fields of a row that only its own methods write.
PHASE = {
    *("status", "slot", "finish_reason", "replay_of", "parked", "num_shared", "num_dispatched"),
    *("num_resumed", "num_preempted", "num_failures", "num_overtaken", "first_cached"),
}
# Of a group in prefill, likewise.
GROUP = {"position", "split_points"}


def test_a_row_passes_its_phases_in_order() -> None:
    """From the queue to the end: waiting, prefill, decode, last token, ended."""
    crowd = Crowd("llama", chunk_tokens=256)
    row = Sequence("a", random_prompt(1, 600), Generation(4, temperature=0.0))
    seen = [row.status]
    crowd.engine.submit_row(row)
    while not crowd.engine.is_idle:
        crowd.engine._run_prefill() if row.status is Status.WAITING else crowd.engine.step()
        if row.status is not seen[-1]:
            seen.append(row.status)
    # All chunks of a lone prompt are computed in one call, so prefill is over when it returns.
    assert seen == [Status.WAITING, Status.DECODE, Status.LAST_TOKEN, Status.ENDED]
    assert row.finish_reason == "length" and row.slot is None


def test_a_row_in_prefill_says_so() -> None:
    """While rows decode, one chunk is computed a step."""
    crowd = Crowd("llama", chunk_tokens=256)
    crowd.add("first", random_prompt(0, 9), 40)
    crowd.step(2)
    row = Sequence("a", random_prompt(1, 600), Generation(4, temperature=0.0))
    crowd.engine.submit_row(row)
    crowd.step()
    assert row.status is Status.PREFILL
    crowd.engine.cancel("a")
    assert row.status is Status.ENDED and row.finish_reason == "canceled"
    crowd.drain()
    assert set(crowd.ended) == {"first"}


def test_no_phase_is_left_out() -> None:
    """A row that waits cannot decode, and one that has ended cannot wait."""
    row = Sequence("a", [1, 2, 3], Generation(4))
    with pytest.raises(AssertionError, match="DECODE cannot follow WAITING"):
        row.enter_slot(0)
    row.start_prefill(frozenset())
    row.enter_slot(0)
    row.end("stop")
    with pytest.raises(AssertionError, match="PREEMPTED cannot follow ENDED"):
        row.preempt()


def test_a_preempted_row_keeps_what_was_read() -> None:
    """Its generated tokens count as prompt while it waits, and as its answer in the next slot."""
    row = Sequence("a", [1, 2, 3], Generation(9))
    row.start_prefill(frozenset())
    row.enter_slot(2)
    for _ in range(3):
        row.start_step()
    row.generated = [7, 8]  # the third is lost
    row.recompute(was_alone=True)
    assert (row.status, row.slot, row.num_failures) == (Status.PREEMPTED, None, 1)
    assert (row.num_dispatched, row.num_prefill, row.is_begun) == (2, 4, True)
    row.start_prefill(frozenset())
    row.preempt()
    assert (row.num_preempted, row.num_dispatched) == (1, 2)


def test_only_the_row_writes_its_phase() -> None:
    """No other module assigns the fields of a row's phase, nor those of its group."""
    root = Path(batchkv_worker.__file__).parent
    found = [
        f"{path.relative_to(root)}:{target.lineno} {target.attr}"
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for whole in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(whole)
        if isinstance(target, ast.Attribute) and target.attr in PHASE | GROUP
        if not (isinstance(target.value, ast.Name) and target.value.id == "self")
    ]
    assert found == []


def test_a_replay_has_an_id_of_its_own() -> None:
    """Cancelling the job that it repeats, which has ended, does not stop it."""
    crowd = Crowd("llama", audit=1.0, memory_bytes=2**30)
    prompt = random_prompt(3, 600)
    crowd.run("a", prompt, 2)
    crowd.add("b", prompt, 12)
    while "b" not in crowd.ended:
        crowd.step()
    engine = crowd.engine
    (replay,) = [*engine._scheduler.waiting, *engine._rows.values()]
    assert replay.replay_of is not None and replay.replay_of.job_id == "b" != replay.job_id
    engine.cancel("b")
    assert engine.recall(["b"], 1) == []
    crowd.drain()
    assert (engine._ends.audit.num_audited, engine._ends.audit.num_differing) == (1, 0)
    assert set(crowd.ended) == {"a", "b"}

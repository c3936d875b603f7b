"""Steps with and without guided rows: their graphs, end tokens, recovery, and replays."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.decode_step import OpenStep, Step, inputs
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.grammar.compiling import Compiled, Trial, compiled_matcher
from batchkv_worker.engine.grammar.guide import GrammarGuide
from batchkv_worker.engine.grammar.masks import Masks
from batchkv_worker.engine.grammar.text import GrammarFault, grammar_text
from batchkv_worker.engine.grammar.tokens import TokenTable, token_table
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.tokens import outputs
from batchkv_worker.engine.tokens.guide import AllOf, GuideFault, new_masks
from batchkv_worker.engine.tokens.sampling import Sampled, _invert, uniform
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.sequence import Generation, Sequence
from worker.engine.grammar.guided_rows import (
    NUM_TOKENS,
    VOCABULARY,
    engine,
    loaded_model,
    run,
    tokenizer,
    work,
)

LATER = RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")


# -- the graph of a step without guided rows


def graph(arrays: list[mx.array]) -> str:
    """The operations between evaluated arrays and these, in the order of the graph."""
    out, numbers = io.StringIO(), dict[str, int]()
    mx.export_to_dot(out, *arrays)
    return re.sub(
        r"\d{6,}", lambda name: str(numbers.setdefault(name[0], len(numbers))), out.getvalue()
    )


def as_ever(running: Engine, temperature: float) -> Sampled:
    """A step as it was built before there were guides, for rows without any field."""
    view = running._slots.begin_step()
    rows = [running._rows.get(slot) for slot in range(view.num_rows)]
    tokens = inputs(rows, running._in_flight)
    cache = running._slots.model_cache
    logits = running.loaded.model(tokens.reshape(-1, 1), cache=cache)[:, -1]
    if temperature == 0:
        chosen = mx.argmax(logits, axis=-1)
    else:
        drawn = [0.0 if r is None else uniform(r.generation.seed, r.num_dispatched) for r in rows]
        heats = [1.0 if r is None else r.generation.temperature for r in rows]
        points, temperatures = mx.array([[x] for x in drawn]), mx.array([[x] for x in heats])
        chosen = _invert(logits.astype(mx.float32) / temperatures, points)
    running._slots.end_step()
    return Sampled(chosen)


def prepared(temperature: float) -> Engine:
    """An engine with three rows in flight."""
    running = engine(backend=GenericBackend())
    for number in range(3):
        running.add(
            work(f"{number}", text="A" * number + "B", temperature=temperature, seed=number)
        )
    for _ in range(4):
        running.step()
    return running


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_step_without_guides_has_the_same_graph_as_ever(temperature: float) -> None:
    """Operation for operation, also in an engine whose other rows had a grammar."""
    plain, used = prepared(temperature), prepared(temperature)
    used.add(work("guided", "choice", ["yes"]))
    assert not used._grammars.is_ready(next(iter(used._scheduler.waiting)))
    expected = graph(as_ever(plain, temperature).arrays)
    assert len(expected) > 2000
    step = used._build_step()
    assert isinstance(step, Step) and graph(step.arrays) == expected
    guided = prepared(temperature)
    row = next(iter(guided._rows.values()))
    row.guide = guide_of("choice", ["yes"])
    assert isinstance(guided._build_step(), OpenStep)
    for one in (plain, used, guided):
        one.close()


# -- the guide alone


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return token_table(loaded_model())


@pytest.fixture(scope="module")
def trial(table: TokenTable) -> Iterator[Trial]:
    made = Trial(table)
    yield made
    made.end()


_TOKENIZERS: dict[int, Any] = {}


def guide_of(kind: Any, value: Any) -> GrammarGuide:
    """A guide that was compiled here, without a trial."""
    table = token_table(loaded_model())
    built = _TOKENIZERS.setdefault(0, table.build())
    text = grammar_text(Constraint(kind, value))
    return GrammarGuide(Compiled(text, built, table.ends, compiled_matcher(text, built)))


def allowed(guide: GrammarGuide) -> set[int]:
    (mask,) = new_masks(1, VOCABULARY)
    guide.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_an_end_token_is_allowed_exactly_where_the_grammar_may_end() -> None:
    """After each character of a text; no id without a token is ever allowed."""
    (end,) = tokenizer().eos_token_ids
    guide = guide_of("regex", "[ab]{2,3}([cd][ef])?")
    may_end = []
    for char in ["", *"abace"]:
        if char:
            (token,) = tokenizer().encode(char)
            assert token in allowed(guide)
            guide.take(token)
        found = allowed(guide)
        assert max(found) < NUM_TOKENS
        may_end.append(end in found)
        assert guide.is_over == (found == {end})
    assert may_end == [False, False, True, True, False, True]
    guide.take(end)
    assert guide.is_over and allowed(guide) == {end}


def test_a_guide_starts_again_from_tokens() -> None:
    """After ``restart`` it allows what a guide allows that took the tokens one by one."""
    first, second = guide_of("regex", "[ab]{2}[cd]{2}"), guide_of("regex", "[ab]{2}[cd]{2}")
    tokens = tokenizer().encode("a") + tokenizer().encode("b")
    for token in tokens:
        first.take(token)
    second.take(tokenizer().encode("a")[0])
    second.restart(tokens)
    assert allowed(second) == allowed(first) != allowed(first.fresh())  # type: ignore[arg-type]


def test_a_token_that_a_grammar_forbids_is_a_fault() -> None:
    """A guide that took one names the place."""
    guide = guide_of("regex", "abc")
    with pytest.raises(GuideFault, match="after 1 tokens"):
        guide.take(tokenizer().encode("x")[0])


def test_a_row_late_in_a_batch_has_its_grammar_compiled_again() -> None:
    """The matchers of a grammar share what they learn, up to a limit: then it is compiled anew."""
    guide = guide_of("regex", "(ab){3}")
    tokens = tokenizer().encode("a") + tokenizer().encode("b")
    for token in tokens:
        guide.take(token)
    expected = allowed(guide)
    guide._grammar.num_used = 1000
    guide._matcher.consume_token(tokens[1])  # an error that no token of the row has caused
    assert guide._matcher.is_error()
    assert allowed(guide) == expected
    assert guide._grammar.num_used == 1


def test_masks_are_the_same_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a slow step, grammars are filled together; other guides, and faults, as ever."""
    monkeypatch.setattr("batchkv_worker.engine.grammar.masks.SLOW_SECONDS", 0)
    rows: list[Any] = [None, Sequence("free", [0], Generation(9))]
    for number, (kind, value) in enumerate(
        [("regex", "[ab]+"), ("choice", ["x", "y"]), ("regex", "[0-9]{3}"), ("regex", "q+")]
    ):
        guide: Any = guide_of(kind, value)
        rows.append(Sequence(str(number), [0], Generation(9), guide=guide))
    rows[-1].guide._matcher.consume_token(0)  # it cannot go on
    rows[-2].guide = AllOf([rows[-2].guide])
    together, alone = Masks(num_threads=2), Masks(num_threads=0)
    for _ in range(3):
        expected, faults = alone.fill(rows, VOCABULARY)
        found, same_faults = together.fill(rows, VOCABULARY)
        assert (found[:-1] == expected[:-1]).all()
        assert [row.job_id for row, _ in faults] == [row.job_id for row, _ in same_faults] == ["3"]
    assert together._executor is not None and alone._executor is None
    assert (expected[0] == expected[1]).all() and (expected[2] != expected[3]).any()


# -- the process that tries grammars


def test_a_trial_is_ended_and_started_again(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer in time is ended, and so is one that cannot read the tokenizer."""
    assert "ab" in trial.text_of(Constraint("regex", "ab"))
    first = trial._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr("batchkv_worker.engine.grammar.compiling.WAIT_SECONDS", 0.1)
    with pytest.raises(GrammarFault, match="takes more than 1 s"):
        trial.text_of(Constraint("regex", "cd"))
    monkeypatch.undo()
    assert first.returncode is not None
    assert "ef" in trial.text_of(Constraint("regex", "ef"))
    broken = Trial(TokenTable("{}", NUM_TOKENS, (4,)))
    with pytest.raises(GrammarFault, match="cannot read this model's tokenizer"):
        broken.text_of(Constraint("regex", "ab"))


def test_a_panic_of_the_compiler_is_a_short_reason(trial: Trial) -> None:
    """llguidance adds the stack of its own code, which says nothing to the reader of an error."""
    lazy = 'start: a "Z"\na[lazy]: /(?s:.*)/'
    with pytest.raises(GrammarFault, match="assertion failed") as refused:
        trial.text_of(Constraint("grammar", lazy))
    assert "<" not in str(refused.value)


def test_a_trial_that_is_killed_refuses_no_grammar(trial: Trial) -> None:
    """A system short of memory may kill it. The grammar is tried once more, and then refused."""
    assert "ab" in trial.text_of(Constraint("regex", "ab"))
    assert trial._process is not None
    trial._process.kill()
    assert "cd" in trial.text_of(Constraint("regex", "cd"))
    with pytest.MonkeyPatch.context() as patch:
        started: list[int] = []
        start = Trial._start

        def start_and_kill(self: Trial) -> None:
            start(self)
            assert self._process is not None
            started.append(self._process.pid)
            self._process.kill()

        patch.setattr(Trial, "_start", start_and_kill)
        trial.kill()
        with pytest.raises(GrammarFault, match="or too much memory"):
            trial.text_of(Constraint("regex", "ef"))
    assert len(started) == 1


def test_a_trial_ends_with_its_parent(trial: Trial) -> None:
    """When nobody can ask any more, the process ends by itself."""
    trial.text_of(Constraint("regex", "ab"))
    process = trial._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    trial.end()


# -- recovery and replays


def test_rows_go_on_after_the_device_failed() -> None:
    """Memory runs out as a step with guided rows is read, and while a prompt is computed."""
    wanted = [work(f"{n}", "regex", "[a-z]{30}", text="A" * 9, seed=n) for n in range(4)]
    calm, running = engine(), engine()
    expected = run(calm, wanted)
    read_back, chunk, made = outputs.read_back, Prefill._compute_chunk, [0, 0]

    def failing(sampled: Any) -> Any:
        made[0] += 1
        if made[0] in (6, 11):
            raise LATER
        return read_back(sampled)

    def failing_chunk(self: Prefill, group: Any) -> None:
        made[1] += 1
        if made[1] == 2:
            raise LATER
        chunk(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "read_back", failing)
        patch.setattr(Prefill, "_compute_chunk", failing_chunk)
        found = run(running, wanted)
    assert running._recovery.num_out_of_memory == 3
    for name, event in expected.items():
        assert found[name].token_ids == event.token_ids
    calm.close()
    running.close()


def test_a_replay_of_the_audit_follows_the_grammar_again() -> None:
    """A row on cached blocks is computed again without them, and has the same tokens."""
    running = engine(audit=1.0)
    text = "one two three four five six seven eight nine ten " * 30
    for name in ("first", "second"):
        run(running, [work(name, "regex", "[a-z]{20}", text=text, seed=7)])
    audit = running._ends.audit
    assert (audit.num_audited, audit.num_differing) == (1, 0)
    running.close()

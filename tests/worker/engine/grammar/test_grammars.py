"""Rows with schemas, regexes, choices and grammars through the engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.grammar import grammars as grammars_module
from batchkv_worker.engine.grammar.compiling import Compiler
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS
from batchkv_worker.events import Completed, Rejected
from support import tiny_models
from worker.engine.grammar.guided_rows import (
    NUM_TOKENS,
    VOCABULARY,
    completed,
    enders,
    engine,
    loaded_model,
    matches,
    run,
    work,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED: dict[str, Constraint] = {
    "schema": Constraint("json_schema", PERSON),
    "object": Constraint("json_object"),
    "regex": Constraint("regex", "[A-Z][a-z]{1,3}-[0-9]{2}( and (so|on)){0,2}"),
    "choice": Constraint("choice", ["yes", "no", "perhaps", 'with "quotes"', "ya"]),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    """One engine for many tests: its process and its grammars are used again."""
    made = engine()
    yield made
    made.close()


def rows(**params: Any) -> list[Any]:
    made = [
        work(f"{name} {seed}", one.kind, one.value, **{"seed": seed, **params})
        for seed in range(3)
        for name, one in ASKED.items()
    ]
    return [*made, *(work(f"free {seed}", seed=seed, **params) for seed in range(3))]


def constraint_of(name: str) -> Constraint | None:
    return ASKED.get(name.split()[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whole_answers_match(running: Engine, temperature: float) -> None:
    """A row that ends by "stop" has a whole answer that matches. JSON has no optional blanks."""
    ended = run(running, rows(temperature=temperature, logit_bias=enders()))
    num_whole = 0
    for name, event in ended.items():
        constraint = constraint_of(name)
        if constraint is not None and completed(event).finish_reason == "stop":
            assert matches(constraint, event.text), (name, event.text)
            num_whole += 1
    assert num_whole >= 9, [(name, event.text) for name, event in ended.items()]


def test_an_answer_that_is_cut_says_so(running: Engine) -> None:
    """``max_tokens`` cuts an answer as any other: "length", and the beginning of a match."""
    ended = run(running, [work("cut", "regex", "(ab){50}", max_tokens=5)])
    event = completed(ended["cut"])
    assert event.finish_reason == "length"
    assert ("ab" * 50).startswith(event.text) and event.text


def test_a_stop_string_ends_an_answer_as_elsewhere(running: Engine) -> None:
    """Its match is then not whole."""
    ended = run(running, [work("stop", "regex", "abcdefgh", stop=("de",))])
    assert (ended["stop"].text, ended["stop"].finish_reason) == ("abc", "stop")


def test_grammars_are_read_in_both_dialects(running: Engine) -> None:
    """Lark and GBNF."""
    ended = run(
        running,
        [
            work("lark", "grammar", 'start: "a" b{2}\nb: "b" | "c"'),
            work("gbnf", "grammar", 'root ::= "x" [0-9] tail\ntail ::= "y" | "z"'),
        ],
    )
    assert ended["lark"].text in {f"a{x}{y}" for x in "bc" for y in "bc"}
    assert ended["gbnf"].text in {f"x{n}{end}" for n in range(10) for end in "yz"}


def test_texts_that_spell_special_tokens_are_written_as_texts(running: Engine) -> None:
    """A special token ends no such answer and is not in it, in any kind of constraint."""
    schema = {
        **{"type": "object", "additionalProperties": False, "required": ["<|user|>"]},
        "properties": {"<|user|>": {"const": "<|end|>"}},
    }
    wanted = {
        "choice": ("choice", ["a <|user|> b"], "a <|user|> b"),
        "end": ("choice", ["<|end|>"], "<|end|>"),
        "regex": ("regex", r"x<\|end\|>y", "x<|end|>y"),
        "schema": ("json_schema", schema, '{"<|user|>":"<|end|>"}'),
        "grammar": ("grammar", 'start: "x" b\nb: "<|pad|>"', "x<|pad|>"),
    }
    ended = run(
        running,
        [work(name, kind, value) for name, (kind, value, _) in wanted.items()],  # type: ignore[arg-type]
    )
    for name, (_, _, text) in wanted.items():
        assert isinstance(ended[name], Completed), ended[name]
        assert (ended[name].text, ended[name].finish_reason) == (text, "stop"), name


def test_an_ambiguous_grammar_ends_its_row_before_it_takes_long(running: Engine) -> None:
    """Each token makes all that came before it ambiguous. A mask looks at so many items only."""
    ambiguous = 'start: e\ne: e e | /[a-z]/ | e "+" e | ""'
    asked = work("ambiguous", "grammar", ambiguous, max_tokens=150, ignore_eos=True)
    event = run(running, [asked])["ambiguous"]
    assert isinstance(event, Rejected) and "its grammar cannot go on" in event.message


def test_rows_are_the_same_alone_and_among_others(running: Engine) -> None:
    """With a seed, rows with and without a grammar give the tokens that they give alone."""
    wanted = rows(temperature=0.8, presence_penalty=0.5, top_k=40, max_tokens=24)
    wanted[0] = work("schema 0", "json_schema", PERSON, temperature=0.0)
    together = run(running, wanted, gap=2)
    for one in (wanted[0], wanted[5], wanted[-1]):
        (alone,) = run(running, [one]).values()
        assert alone.token_ids == together[one.job_id].token_ids, one.job_id
    # Rows without a grammar are also those of an engine that never had one.
    other = engine(slots=2)
    free = run(other, wanted[-3:])
    assert other._grammars._compiler is None
    for name, event in free.items():
        assert event.token_ids == together[name].token_ids


def test_preempted_rows_go_on() -> None:
    """Rows that leave their slots for a while give the tokens of rows that never leave."""
    calm = engine(slots=4)
    costs = calm.plan.costs
    memory_bytes = 1300 * (costs.per_token + costs.largest) + 4 * costs.per_row
    tight = engine(slots=4, memory_bytes=memory_bytes, prefix_bytes=0)
    for _ in range(FEWEST_OUTPUTS):
        tight._scheduler.output_lengths.add(8)
    text = "one two three four five six seven eight nine ten " * 20
    wanted = [
        work(f"{n}", "regex", "[a-z]{900}", text=text, max_tokens=70, seed=n) for n in range(4)
    ]
    expected = run(calm, wanted)
    found = run(tight, wanted)
    assert tight._decode_rows.num_preempted > 0
    for name, event in expected.items():
        assert found[name].token_ids == event.token_ids
    calm.close()
    tight.close()


def test_other_fields_work_beside_a_grammar(running: Engine) -> None:
    """``min_tokens``, ``ignore_eos``, ``logit_bias`` and ``logprobs`` bend no match."""
    barred = [(token, -100.0) for token in range(300)]
    ended = run(
        running,
        [
            work("late", "regex", "a{1,40}", min_tokens=12, logprobs=2),
            work("over", "regex", "abc", min_tokens=30, max_tokens=40),
            work("on", "regex", "[ab]{1,3}", ignore_eos=True, max_tokens=30),
            work("barred", "choice", ["yes", "no"], logit_bias=tuple(barred)),
            work("padding", "choice", ["yes", "no"], logit_bias=((VOCABULARY - 1, 100.0),)),
        ],
    )
    late = completed(ended["late"])
    assert len(late.token_ids) > 12 and set(late.text) == {"a"}
    assert late.logprobs is not None and all(one.logprob > -1e9 for one in late.logprobs)
    assert json.loads(json.dumps([one.top for one in late.logprobs], allow_nan=False))
    assert (ended["over"].text, ended["over"].finish_reason) == ("abc", "stop")
    assert ended["on"].finish_reason == "stop" and set(ended["on"].text) <= {"a", "b"}
    for name in ("barred", "padding"):
        assert ended[name].text in ("yes", "no")
        assert max(ended[name].token_ids) < NUM_TOKENS


def test_every_choice_of_a_row_matches(running: Engine) -> None:
    """Each of ``n`` answers follows the grammar from its beginning."""
    (event,) = run(running, [work("n", "json_schema", PERSON, n=4, logit_bias=enders())]).values()
    texts = [one.text for one in (event, *event.more) if one.finish_reason == "stop"]
    assert len(event.more) == 3 and texts
    assert all(matches(ASKED["schema"], text) for text in texts)


ITSELF = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
DEEP = json.loads('{"items":' * 150 + "{}" + "}" * 150)
ENDLESS = {
    "allOf": [{"type": "string", "pattern": f".*a{n}.*b{n}.*c{n}"} for n in range(30)],
}
HUGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"{name}{n}": {"type": "null"}}} for name in "ab"]}
        for n in range(14)
    ]
}
REFUSED: dict[str, tuple[Constraint, str]] = {
    "unknown": (Constraint("json_schema", {"not": {"type": "string"}}), 'Unimplemented keys: ["'),
    "web": (Constraint("json_schema", {"$ref": "http://127.0.0.1:PORT/a"}), "does not fetch"),
    "file": (Constraint("json_schema", {"$ref": "file:///etc/passwd"}), "does not fetch"),
    "nothing": (Constraint("json_schema", {"enum": []}), "Unsatisfiable"),
    "itself": (Constraint("json_schema", ITSELF), "No"),
    "options": (Constraint("json_schema", {"x-guidance": {"lenient": True}}), "x-guidance"),
    "surrogate": (Constraint("json_schema", {"const": "\ud800"}), "hex escape"),
    "deep": (Constraint("json_schema", DEEP), "recursion"),
    "look": (Constraint("regex", "(?=a)b"), "look-around"),
    "regex": (Constraint("regex", "(" * 30_000 + ")" * 30_000), "regex"),
    "lark": (Constraint("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    "gbnf": (Constraint("grammar", 'root ::= "a'), "GBNF"),
    "import": (Constraint("grammar", "%import .secret.X\nstart: X"), "secret"),
    "huge": (Constraint("json_schema", HUGE), "too large"),
    "endless": (Constraint("json_schema", ENDLESS), "takes more than 1 s"),
}


def test_what_cannot_be_compiled_is_refused_by_name(running: Engine) -> None:
    """Hostile and unsupported grammars end their own rows; rows beside them match as ever.

    Nothing is fetched: the address that a schema names gets no connection.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = str(server.getsockname()[1])
        wanted = [
            work(name, one.kind, json.loads(json.dumps(one.value).replace("PORT", port)))
            for name, (one, _) in REFUSED.items()
        ]
        ended = run(running, [*wanted, work("good", "choice", ["yes"]), work("free")])
        with pytest.raises(BlockingIOError):
            server.accept()
    for name, (_, why) in REFUSED.items():
        event = ended[name]
        assert isinstance(event, Rejected), (name, event)
        assert event.message.startswith(
            "the form of the answer (schema, regex or grammar) cannot be enforced: "
        )
        assert event.code == ErrorCode.INVALID_REQUEST
        assert why in event.message and len(event.message) < 300, (name, event.message)
    assert ended["good"].text == "yes" and isinstance(ended["free"], Completed)
    # What was refused is not compiled again: the second row is refused at once.
    running.add(work("again", "json_schema", ENDLESS))
    (again,) = running.step()
    assert isinstance(again, Rejected) and again.message == ended["endless"].message


def test_a_grammar_that_becomes_too_complex_ends_its_row(running: Engine) -> None:
    """Objects that must hold themselves compile, and have no end: the row ends with the reason."""
    endless = {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}},
               "required": ["a"]}}, "$ref": "#/$defs/a"}  # fmt: skip
    free = work("free", max_tokens=30)
    ended = run(running, [work("endless", "json_schema", endless), free])
    assert isinstance(ended["endless"], Rejected)
    assert "its grammar cannot go on after 1 tokens" in ended["endless"].message
    (alone,) = run(running, [free]).values()
    assert ended["free"].token_ids == alone.token_ids


class Panic(BaseException):
    """As what native code raises when it panics."""


@pytest.mark.parametrize("fault", [Panic("index out of bounds"), ValueError("wrong")])
def test_a_fault_of_a_guide_ends_its_row_alone(running: Engine, fault: BaseException) -> None:
    """Whatever it raises, as it fills a mask or takes a token. Rows beside it go on."""
    names = ("unsafe_compute_mask_ptr", "consume_token")
    for name in names:
        running.add(work(name, "regex", "[ab]{20}"))
    running.add(work("good", "regex", "[ab]{20}"))
    while len(running._rows) < 3:
        assert not running.step()
    by_name = {row.job_id: row for row in running._rows.values()}
    for name in names:
        guide: Any = by_name[name].guide
        guide._matcher = Raising(guide._matcher, name, fault)
    ended = run(running, [])
    for name in names:
        assert isinstance(ended[name], Rejected) and "its grammar failed" in ended[name].message
    assert matches(Constraint("regex", "[ab]{20}"), ended["good"].text)


class Raising:
    """A matcher of which one method raises."""

    def __init__(self, matcher: Any, name: str, fault: BaseException) -> None:
        self._matcher, self._name, self._fault = matcher, name, fault

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise self._fault

        return fail if name == self._name else getattr(self._matcher, name)


def test_rows_of_one_grammar_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows that wait for it; the last ones are kept, and older ones are compiled again."""
    asked: list[str] = []
    ask = Compiler.ask

    def counted(self: Compiler, key: str, constraint: Constraint) -> None:
        asked.append(constraint.value)
        ask(self, key, constraint)

    monkeypatch.setattr(Compiler, "ask", counted)
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    running = engine()
    run(running, [work(f"{n}", "regex", "ab?") for n in range(5)])
    run(running, [work("6", "regex", "ab?"), work("7", "regex", "b"), work("8", "regex", "c")])
    run(running, [work("9", "regex", "ab?")])
    assert asked == ["ab?", "b", "c", "ab?"]
    running.close()


def test_rows_without_a_grammar_do_not_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a grammar compiles, other rows are computed; its row can be cancelled or recalled."""
    release = threading.Event()
    outcome = Compiler._outcome
    monkeypatch.setattr(
        Compiler, "_outcome", lambda self, asked: (release.wait(60), outcome(self, asked))[1]
    )
    running = engine(slots=2)
    for name in ("first", "second", "third"):
        running.add(work(name, "choice", ["yes"]))
    running.add(work("free", max_tokens=4))
    ended = []
    while not ended:
        ended = running.step()
    assert [event.job_id for event in ended] == ["free"]  # type: ignore[union-attr]
    assert not running.is_idle and running.report().startswith("3 rows wait")
    running.cancel("first")
    assert running.recall(["second"], 1) == ["second"]
    release.set()
    assert [name for name in run(running, [])] == ["third"]
    running.close()


def test_a_row_that_does_not_fit_is_refused_once() -> None:
    """It is too long for the memory, and its grammar is wrong: one event names the first."""
    wrong = work("both", "regex", "(?=x)y", max_tokens=4000)
    small = engine(memory_bytes=20_000, prefix_bytes=0)
    ended = []
    small.add(wrong)
    while not small.is_idle or small._grammars._waiting:
        ended += small.step()
    assert len(ended) == 1 and "do not fit" in ended[0].message  # type: ignore[union-attr]
    small.close()


def test_an_engine_closes_while_it_compiles() -> None:
    """Neither the thread nor its process is left, whatever the process does."""
    running = engine()
    running.add(work("slow", "json_schema", ENDLESS))
    running.step()
    compiler = running._grammars._compiler
    assert compiler is not None
    running.close()
    assert not compiler._thread.is_alive() and compiler._trial._process is None


def test_a_model_that_cannot_follow_grammars_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tokenizer, and a worker without llguidance, refuse the row; other rows are served."""
    slow = engine()
    slow._grammars._loaded = tiny_models.loaded(loaded_model().model, vocabulary=VOCABULARY)
    ended = run(slow, [work("asked", "choice", ["yes"]), work("free")])
    assert "slow tokenizer" in ended["asked"].message and isinstance(ended["free"], Completed)
    monkeypatch.setattr(grammars_module, "why_not", lambda: "llguidance cannot be loaded: x")
    ended = run(slow, [work("asked", "choice", ["yes"])])
    assert "cannot follow a grammar: llguidance cannot be loaded: x" in ended["asked"].message


def test_a_killed_trial_is_started_again(running: Engine) -> None:
    """The system may kill the process when memory is short. That is no fault of any grammar."""
    run(running, [work("before", "regex", "x1")])
    compiler = running._grammars._compiler
    assert compiler is not None and compiler._trial._process is not None
    compiler._trial._process.kill()
    compiler._trial._process.wait()
    ended = run(running, [work("killed", "regex", "x2"), work("after", "regex", "x3")])
    assert (ended["killed"].text, ended["after"].text) == ("x2", "x3")


def test_a_trial_that_cannot_start_is_no_fault_of_the_grammar(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row ends with the engine's error, and the next row with the same grammar is served."""
    run(running, [work("before", "regex", "y1")])
    compiler = running._grammars._compiler
    assert compiler is not None
    compiler._trial.end()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("batchkv_worker.engine.grammar.compiling.subprocess.Popen", fail)
    ended = run(running, [work("first", "regex", "y2")])
    assert isinstance(ended["first"], Rejected) and "cannot be started" in ended["first"].message
    assert ended["first"].code == ErrorCode.ENGINE_ERROR
    monkeypatch.undo()
    assert run(running, [work("second", "regex", "y2")])["second"].text == "y2"


def test_no_row_waits_for_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row ends with the engine's error, and the next row starts another thread."""
    running = engine()
    monkeypatch.setattr(Compiler, "_main", lambda self: None)
    ended = run(running, [work("first", "regex", "ab"), work("free")])
    assert isinstance(ended["first"], Rejected) and isinstance(ended["free"], Completed)
    assert ended["first"].code == ErrorCode.ENGINE_ERROR
    monkeypatch.undo()
    assert run(running, [work("second", "regex", "ab")])["second"].text == "ab"
    running.close()

"""Every keyword of JSON Schema that can be enforced: by values, and through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.grammar.compiling import compiled_matcher
from batchkv_worker.engine.grammar.text import GrammarFault, grammar_text
from batchkv_worker.engine.grammar.tokens import token_table
from benchmarks import bench_grammar
from worker.engine.grammar.guided_rows import (
    completed,
    enders,
    engine,
    loaded_model,
    matches,
    run,
    tokenizer,
    validator,
    work,
)
from worker.engine.grammar.schemas import FORMATS, SCHEMAS, UNSUPPORTED, VALUES

# A grammar may forbid what is valid, never the other way round: keys come in the order of the
# schema, and a whole number is not written as 1e20.
FEWEST_ACCEPTED = 0.9


@pytest.fixture(scope="module")
def built() -> Any:
    return token_table(loaded_model()).build()


@pytest.mark.parametrize("keyword", SCHEMAS)
def test_values_are_accepted_as_a_validator_does(keyword: str, built: Any) -> None:
    """No value that is invalid is ever accepted, and those that are valid are."""
    valid = accepted = 0
    for schema in SCHEMAS[keyword]:
        matcher = compiled_matcher(grammar_text(Constraint("json_schema", schema)), built)
        judge = validator(schema)
        for value in VALUES:
            passes, is_valid = is_accepted(matcher, value), judge.is_valid(value)
            assert is_valid or not passes, (schema, value)
            valid, accepted = valid + is_valid, accepted + passes
    assert valid and accepted >= FEWEST_ACCEPTED * valid, (valid, accepted)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_the_validator_does_not_know(name: str, built: Any) -> None:
    """Of all texts, those that have the form are accepted."""
    text = grammar_text(Constraint("json_schema", {"type": "string", "format": name}))
    matcher = compiled_matcher(text, built)
    found = [value for value in VALUES if is_accepted(matcher, value)]
    assert {*FORMATS[name]} <= {*found} and "a b" not in found and "" not in found


def is_accepted(matcher: Any, value: Any) -> bool:
    """Whether a grammar accepts the whole value, as it is written without optional blanks."""
    tokens = tokenizer().encode(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and bool(copy.is_accepting())


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_cannot_be_enforced_is_refused(keyword: str, built: Any) -> None:
    """Alone, and deep within a schema. The reason names it."""
    inner = UNSUPPORTED[keyword]
    for schema in (inner, {"type": "array", "items": {"anyOf": [{"type": "null"}, inner]}}):
        with pytest.raises(GrammarFault) as caught:
            compiled_matcher(grammar_text(Constraint("json_schema", schema)), built)
        assert keyword.lstrip("$").lower() in str(caught.value).lower()


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    made = engine(slots=16)
    yield made
    made.close()


def test_all_schemas_beside_rows_without(running: Engine) -> None:
    """Each schema with random weights, greedy and drawn: every whole answer is valid.

    Rows without a schema have the tokens that they have among themselves. ``bench_grammar`` has the
    long form, with the included model.
    """
    changes: dict[str, Any] = {"logit_bias": enders(), "max_tokens": 40}
    schemas = [schema for schemas in SCHEMAS.values() for schema in schemas]
    schemas += [bench_grammar.schema_of(number) for number in range(10)]
    wanted = [
        work(f"{number} {heat}", "json_schema", schema, temperature=heat, seed=number, **changes)
        for number, schema in enumerate(schemas)
        for heat in ((0.0, 1.0) if number % 2 else (1.0,))
    ]
    free = [work(f"free {number}", seed=number, max_tokens=16) for number in range(16)]
    ended = run(running, [*wanted[:20], *free, *wanted[20:]])
    num_whole = 0
    for one in wanted:
        event = completed(ended[one.job_id])
        constraint = one.request.constraint
        assert constraint is not None
        if event.finish_reason == "stop":
            assert matches(constraint, event.text), (one.job_id, constraint.value, event.text)
            num_whole += 1
    assert num_whole > 0.9 * len(wanted), (num_whole, len(wanted))
    for name, event in run(running, free).items():
        assert event.token_ids == ended[name].token_ids

"""What a row asks of its answer's text: OpenAI's ``response_format``, and vLLM's own fields."""

from __future__ import annotations

import json
from typing import Any

from batchkv_producer.intake.checks import check_depth, invalid, shown, unsupported
from batchkv_producer.wire.constraint import MAX_CONSTRAINT_BYTES, Constraint, Kind

# Fields of a row that ask for a constraint. A row has one of them at most.
GUIDED: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_ASKING = frozenset({"response_format", "structured_outputs", *GUIDED})
# Keys of ``structured_outputs`` that name a constraint.
_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
# Values of its other keys that change nothing here. Answers have no optional whitespace anyway.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False, True),
    "disable_fallback": (False, True),
    "disable_additional_properties": (False,),
}


def constraint_of(body: dict[str, Any]) -> Constraint | None:
    """The constraint that a body asks for. Raises RowFault for a wrong one, and for several."""
    if body.keys().isdisjoint(_ASKING):  # almost every row
        return None
    found = {
        "response_format": _response_format(body.get("response_format")),
        "structured_outputs": _structured_outputs(body.get("structured_outputs")),
        **{name: _given(name, kind, body.get(name)) for name, kind in GUIDED.items()},
    }
    asked = {name: each for name, each in found.items() if each is not None}
    if len(asked) > 1:
        raise invalid(f"{' and '.join(asked)} exclude each other: give one of them")
    return next(iter(asked.values()), None)


def format_of(constraint: Constraint) -> dict[str, Any]:
    """The fields of a body that ask for a constraint."""
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if constraint.kind == "json_schema":
        schema = {"name": "answer", "schema": constraint.value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {constraint.kind: constraint.value}}


def _response_format(value: Any) -> Constraint | None:
    if value is None:
        return None
    where = "response_format"
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object, got {shown(value)}")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object")
    if kind != "json_schema":
        known = "text, json_object or json_schema"
        raise unsupported(f"{where}.type {shown(kind)} is not supported: use {known}")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise invalid(f"{where}.json_schema must be an object with a schema")
    if not isinstance(inner.get("strict"), bool | None):
        raise invalid(f"{where}.json_schema.strict must be true or false")
    return _checked(f"{where}.json_schema.schema", Constraint("json_schema", inner["schema"]))


def _structured_outputs(value: Any) -> Constraint | None:
    if value is None:
        return None
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object, got {shown(value)}")
    asked = []
    for name, item in value.items():
        place = f"{where}.{name[:80]}"
        if item is None:
            continue
        if name in _KINDS:
            asked.append(_given(place, _KINDS[name], item))
        elif name == "json_object":
            if not isinstance(item, bool):
                raise invalid(f"{place} must be true or false, got {shown(item)}")
            asked += [Constraint("json_object")] if item else []
        elif not any(item is neutral for neutral in _OPTIONS.get(name, ())):
            raise unsupported(f"{place} {shown(item)} is not supported: leave it out")
    if len(asked) != 1:
        raise invalid(f"{where} must have exactly one of json, regex, choice, grammar, json_object")
    return asked[0]


def _given(where: str, kind: Kind, value: Any) -> Constraint | None:
    if value is None:
        return None
    if kind == "json_schema" and isinstance(value, str):
        value = _parsed(where, value)
    return _checked(where, Constraint(kind, value))


def _parsed(where: str, text: str) -> Any:
    if len(text) > MAX_CONSTRAINT_BYTES:
        raise invalid(f"{where} has {len(text)} characters; at most {MAX_CONSTRAINT_BYTES} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(f"{where} is a text that is not JSON") from None


def _checked(where: str, constraint: Constraint) -> Constraint:
    check_depth(where, constraint.value)
    if fault := constraint.fault():
        raise invalid(f"{where}: {fault}")
    return constraint

"""What the text of a row's answer has to match: a JSON schema, a regex, a list or a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from batchkv_producer.errors import WireError

MAX_CONSTRAINT_BYTES = 64 * 2**10  # of the value as JSON without blanks

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The kind, and its value.

    ===============  ==============================================================
    ``json_schema``  the schema: an object, or true (any JSON)
    ``json_object``  None
    ``regex``        the regular expression, which the whole answer has to match
    ``choice``       the possible answers: a list of different texts
    ``grammar``      a context-free grammar, as a text
    ===============  ==============================================================
    """

    kind: Kind
    value: Any = None

    def fault(self) -> str:
        """Why it is invalid, in a few words. "" for a valid one."""
        if self.kind not in KINDS:
            return "its kind is unknown"
        if fault := _FAULTS[self.kind](self.value):
            return fault
        try:
            text = _JSON.encode(self.value)
        except (ValueError, TypeError, RecursionError):
            return "it cannot be written as JSON"
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_CONSTRAINT_BYTES:
            return f"it has {size} bytes as JSON; at most {MAX_CONSTRAINT_BYTES} are accepted"
        return ""

    def packed(self) -> dict[str, Any]:
        """The constraint in a job's payload."""
        found: dict[str, Any] = {"kind": self.kind}
        return found if self.value is None else {**found, "value": self.value}


def unpacked_constraint(packed: dict[str, Any]) -> Constraint:
    """Inverse of ``Constraint.packed``; raises WireError on anything else."""
    kind = packed.get("kind")
    if not packed.keys() <= {"kind", "value"} or kind not in KINDS:
        raise WireError("job payload: the constraint's kind is unknown")
    constraint = Constraint(cast("Kind", kind), packed.get("value"))
    if fault := constraint.fault():
        raise WireError(f"job payload: the constraint is invalid: {fault}")
    return constraint


def _schema_fault(value: Any) -> str:
    return "" if isinstance(value, dict) or value is True else "a schema must be an object"


def _object_fault(value: Any) -> str:
    return "" if value is None else "json_object has no value"


def _text_fault(value: Any) -> str:
    return "" if isinstance(value, str) and value else "it must be a text that is not empty"


def _choice_fault(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "choices must be a list of texts that is not empty"
    if not all(isinstance(item, str) and item for item in value):
        return "each choice must be a text that is not empty"
    return "" if len(set(value)) == len(value) else "a choice is there twice"


_FAULTS = {
    "json_schema": _schema_fault,
    "json_object": _object_fault,
    "regex": _text_fault,
    "choice": _choice_fault,
    "grammar": _text_fault,
}

"""Schemas with every keyword that can be enforced, and values to try with each of them."""

from __future__ import annotations

from typing import Any

SHORT = {"type": "string", "maxLength": 3}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _of(*properties: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: DIGIT for name in properties}, **more}


# By the keyword that they are about.
SCHEMAS: dict[str, list[dict[str, Any]]] = {
    "type": [
        *({"type": kind} for kind in ("integer", "number", "boolean", "null")),
        {"type": ["boolean", "null"]},
        {"type": ["integer", "boolean"]},
        {"type": ["null", "array"], "maxItems": 1, "items": DIGIT},
    ],
    "const": [{"const": value} for value in (5, -1.5, "a", "ä\n\"", None, True, [], [1, "a"], {})]
    + [{"const": {"a": 1}}, {"const": ""}, {"const": 0}],
    "enum": [
        {"enum": ["red", "green", "blue"]},
        {"enum": [1, "1", None, True, [1], {"a": 1}]},
        {"enum": ["a", "ab", "abc"]},
        {"type": "string", "enum": ["a", 5, "b"]},
        {"enum": [0, 1, 2], "minimum": 1},
    ],
    "minimum": [
        {"type": "integer", "minimum": 3},
        {"type": "integer", "minimum": -3, "maximum": 3},
        {"type": "integer", "maximum": -5},
        {"type": "integer", "minimum": 97, "maximum": 1005},
        {"type": "number", "minimum": 0.5, "maximum": 2.25},
        {"type": "number", "minimum": -1.5, "maximum": -0.5},
        {"type": "integer", "minimum": 0.5, "maximum": 3.5},
        {"type": "number", "minimum": 100},
    ],
    "exclusiveMinimum": [
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": -2, "maximum": 2},
    ],
    "multipleOf": [
        {"type": "integer", "multipleOf": 5},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 50},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3},
    ],
    "maxLength": [
        SHORT,
        {"type": "string", "minLength": 1, "maxLength": 1},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "maxLength": 0},
    ],
    "pattern": [
        {"type": "string", "pattern": "^[0-9]{3}$"},
        {"type": "string", "pattern": "^a|b$", "maxLength": 3},
        {"type": "string", "pattern": "[xyz]", "maxLength": 4},
        {"type": "string", "pattern": "^(ab)+$", "maxLength": 6},
        {"type": "string", "pattern": "^\\d{1,2}:\\d{2}$"},
        {"type": "string", "pattern": "^[^\"]{2}$"},
        {"type": "string", "pattern": "^\\w+$", "maxLength": 4},
        {"type": "string", "pattern": "^(yes|no)$"},
    ],
    "format": [{"type": "string", "format": form} for form in ("date", "ipv4", "uuid")],
    "items": [
        {"type": "array", "items": DIGIT, "maxItems": 3},
        {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
        {"type": "array", "items": False},
        {"type": "array", "maxItems": 0},
        {"type": "array", "minItems": 2, "maxItems": 2, "items": {"enum": ["a", "b"]}},
    ],
    "prefixItems": [
        {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False},
        {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [SHORT], "items": DIGIT, "maxItems": 3},
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1,
         "maxItems": 2},
    ],
    "properties": [
        _of("a", additionalProperties=False),
        _of("a", "b", additionalProperties=False),
        _of("a", "b", additionalProperties=False, required=["a"]),
        _of("a", "b", "c", additionalProperties=False, required=["c"]),
        _of("a", "b", additionalProperties=False, required=["b", "a"]),
        {"type": "object", "properties": {"a": SHORT, "b": True}, "additionalProperties": False},
        {"type": "object", "properties": {"a": False, "b": DIGIT}, "additionalProperties": False},
        {"type": "object", "properties": {"ä \n": DIGIT}, "additionalProperties": False},
        {"type": "object", "properties": {"a": _of("b", additionalProperties=False)},
         "required": ["a"], "additionalProperties": False},
    ],
    "additionalProperties": [
        {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
        _of("a", additionalProperties=SHORT, required=["a"], maxProperties=2),
        {"type": "object", "additionalProperties": False},
    ],
    "patternProperties": [
        {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False,
         "maxProperties": 2},
        {"type": "object", "properties": {"a": SHORT}, "patternProperties": {"^b$": DIGIT},
         "additionalProperties": False},
    ],
    "minProperties": [
        {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 1},
        {"type": "object", "maxProperties": 0},
    ],
    "anyOf": [
        {"anyOf": [DIGIT, SHORT]},
        {"anyOf": [{"type": "null"}, _of("a", additionalProperties=False)]},
        {"anyOf": [{"const": 1}, {"const": "b"}, {"type": "boolean"}]},
        {"type": "integer", "anyOf": [{"maximum": -7}, {"minimum": 7}], "minimum": -9,
         "maximum": 9},
    ],
    "oneOf": [
        {"oneOf": [DIGIT, SHORT]},
        {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
        {"oneOf": [
            {**_of("b", required=["a"], additionalProperties=False),
             "properties": {"a": {"const": "x"}, "b": DIGIT}},
            {**_of("c", required=["a"], additionalProperties=False),
             "properties": {"a": {"const": "y"}, "c": SHORT}},
        ]},
    ],
    "allOf": [
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
        {"allOf": [{"type": "string"}, {"minLength": 2}], "maxLength": 3},
        {"type": "object", "allOf": [{"properties": {"a": DIGIT}, "required": ["a"]},
         {"properties": {"b": SHORT}, "required": ["b"]}], "maxProperties": 2},
        {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    ],
    "$ref": [
        {"$defs": {"d": DIGIT}, "$ref": "#/$defs/d"},
        {"$defs": {"d": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2},
        {"definitions": {"s": SHORT}, "type": "object",
         "properties": {"a": {"$ref": "#/definitions/s"}}, "additionalProperties": False},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
         "additionalProperties": False},
        {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
         "$ref": "#/$defs/tree"},
        {"$id": "http://example.com/own", "$defs": {"d": DIGIT}, "$ref": "#/$defs/d"},
        {"$defs": {"a~b/c": DIGIT}, "$ref": "#/$defs/a~0b~1c"},
        {"$defs": {"d": {"$anchor": "here", **DIGIT}}, "$ref": "#/$defs/d", "maximum": 5},
    ],
    "annotations": [
        {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", **DIGIT},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **SHORT},
        {"deprecated": True, "readOnly": True, "writeOnly": False, "type": "boolean"},
        {"unknown": 5, "type": "null"},
    ],
}  # fmt: skip

# Formats that the validator does not know, and all of VALUES that have them.
FORMATS = {
    "time": ["10:20:30Z"],
    "date-time": ["2024-02-29T10:20:30Z"],
    "duration": ["P1D"],
    "email": ["a@example.org"],
    "hostname": ["a", "b", "ab", "abc", "abab", "1", "123", "red", "yes", "no", "xyz", "127.0.0.1"],
    "ipv6": ["::1"],
}

# Each is refused, because it cannot be enforced. The error names it.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "format": {"type": "string", "format": "regex"},
}

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 5, 7, 9, 10, 35, 97, 100, 1005, 1006, -1, -2, -3, -5),
    *(-7, -9, 0.5, 1.5, 2.25, 2.5, -0.5, -1.5, 1e+20, 0.1, "", "a", "b", "ab", "abc", "abab"),
    *("1", "123", "12:30", "1:05", "red", "yes", "no", "ä\n\"", "xyz", "a b", "2024-02-29"),
    *("10:20:30Z", "127.0.0.1", "2024-02-29T10:20:30Z", "P1D"),
    *("123e4567-e89b-12d3-a456-426614174000", "1.2.3", "2024-13-01", "a@example.org", "::1"),
    *("-", [], [1], [1, 2], [1, "a"], ["a"], ["a", "b"], ["a", 1], [[1]], [[], [1, 2]]),
    *([[], []], [1, 2, 3], [1, 2, 3, 4], [[[]]], {}, {"a": 1}, {"a": "a"}, {"a": 1, "b": 2}),
    *({"b": 2}, {"c": 3}, {"x1": 1}, {"a": 1, "b": "b"}, {"a": "x", "b": 1}),
    *({"a": "y", "c": "c"}, {"a": {"b": 1}}, {"a": None}, {"a": 1, "b": 2, "c": 3}),
    *({"next": None}, {"next": {"next": None}}, {"ä \n": 1}, {"a": 1, "z": "z"}),
]  # fmt: skip

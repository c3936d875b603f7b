"""The grammar of an answer that has to be a tool call, in the style of the model itself.

The arguments follow the function's schema. A model whose style is not known, and arguments that its
style cannot write, are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import FUNCTION, ErrorCode, Request
from batchkv_worker.engine.answers.answer_format import AnswerFormat
from batchkv_worker.engine.answers.call_styles import STYLES, Arguments, CallStyle
from batchkv_worker.engine.tokens.text_limits import RowRefused

MAX_KEPT = 64
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
# What a text that is written as it is cannot be held to.
_TEXT_RULES = frozenset({"pattern", "format", "minLength", "maxLength", "const"})
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_PLACES = re.compile(r"(INDEX|NAME|KEY)")


class ForcedCalls:
    """The calls that rows of one model have to make. Rows with the same tools share a grammar."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._kept: dict[str, Constraint] = {}

    def constraint(self, request: Request) -> Constraint:
        """What the answer of a row has to match; raises RowRefused. Any thread may ask."""
        tools, choice = request.tools or [], request.tool_choice or ""
        is_single = request.parallel_tool_calls is False
        key = json.dumps([tools, choice, is_single])
        found = self._kept.get(key)
        if found is None:
            found = forced_call(tools, choice, self._form, is_single=is_single)
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found


def forced_call(
    tools: Sequence[dict[str, Any]],
    choice: str,
    form: AnswerFormat,
    *,
    is_single: bool,
) -> Constraint:
    """What the answer has to match; raises RowRefused.

    ``choice`` is "required" or names a function. ``is_single``: no second call may follow.
    """
    functions = [tool["function"] for tool in tools]
    if choice.startswith(FUNCTION):
        wanted = choice.removeprefix(FUNCTION)
        functions = [one for one in functions if one["name"] == wanted][:1]
        if not functions:
            raise _refused(f"tool_choice names {wanted!r}, which is not one of the row's tools")
        is_single = True
    writer = _Writer(_style(form), form.added)
    constraint = Constraint("grammar", writer.grammar(functions, is_single))
    if fault := constraint.fault():
        raise _refused(f"tool_choice: the grammar of the tools is too large: {fault}")
    return constraint


def _style(form: AnswerFormat) -> CallStyle:
    name = form.parser_name
    if name == "mistral" and "[ARGS]" not in form.added:
        name = "mistral_list"
    if name not in STYLES:
        raise _refused(
            "tool_choice: this model's way to write tool calls cannot be forced; use auto"
        )
    return STYLES[name]


class _Writer:
    """Writes a grammar in the dialect of Lark that llguidance reads."""

    def __init__(self, style: CallStyle, added: Mapping[str, int]) -> None:
        self._style, self._ids = style, added
        self._rules: list[str] = []
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def grammar(self, functions: Iterable[dict[str, Any]], is_single: bool) -> str:
        style = self._style
        calls = [self._call(function) for function in functions]
        more = "" if is_single or style.is_single else f"({self._text(style.between)} call){{0,31}}"
        start = f"start: {self._text(style.begin)} call {more} {self._text(style.finish)}"
        return "\n".join([start, f"call: {' | '.join(calls)}", *self._rules]) + "\n"

    def _call(self, function: dict[str, Any]) -> str:
        name = function["name"]
        if not self._style.names.fullmatch(name):
            raise _refused(f"tool_choice: a call of {name!r} cannot be forced because of its name")
        before = self._text(self._style.before, name)
        arguments = self._arguments(name, function.get("parameters") or NO_PARAMETERS)
        return self._rule(f"{before} {arguments} {self._text(self._style.after)}")

    def _arguments(self, name: str, schema: Any) -> str:
        style = self._style.arguments
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise _no_object(name)
        if style is None:
            return self._json({"type": "object", **schema})
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _no_object(name)
        if not all(key in [*properties] for key in required):
            raise _no_object(name)
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        items = [
            (self._argument(f"{name}.{key}", key, value, shared, style), key in required)
            for key, value in properties.items()
        ]
        return _sequence(items, self._text(style.between))

    def _argument(
        self, where: str, key: str, schema: Any, shared: dict[str, Any], style: Arguments
    ) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if not style.names.fullmatch(key) or kind not in _TYPES:
            raise _refused(
                f"tool_choice: {where} cannot be forced in this model's way to write calls: "
                "it needs a plain name and one type"
            )
        if kind in ("array", "object") and not style.nests:
            raise _refused(
                f"tool_choice: {where} cannot be forced in this model's way to write calls: "
                f"it cannot have values of type {kind}"
            )
        before, after = self._text(style.before, key), style.after
        if kind != "string" or style.texts_are_json:
            value = self._json({**schema, **shared})
            return self._rule(f"{before} {value} {self._text(after)}")
        text = self._plain_text(where, schema, style.text_after + after)
        return self._rule(f"{before} {self._text(style.text_before)} {text}")

    def _plain_text(self, where: str, schema: dict[str, Any], after: str) -> str:
        """A text as it is, and what ends it."""
        if "enum" in schema:
            values = schema["enum"]
            is_list = isinstance(values, list) and bool(values)
            if not is_list or not all(isinstance(one, str) for one in values):
                raise _refused(f"tool_choice: the enum of {where} is not a list of texts")
            return f"({' | '.join(map(json.dumps, values))}) {self._text(after)}"
        if rules := sorted(_TEXT_RULES & schema.keys()):
            raise _refused(
                f"tool_choice: {where} cannot be forced in this model's way to write calls: "
                f"{rules[0]} does not apply to texts there"
            )
        first = next(iter(self._pieces(after)))
        if first in self._ids:  # a token that no text has
            return f"/(?s:.*)/ {self._text(after)}"
        end, _, rest = after.rpartition(">")
        name = f"text{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(end + '>')}]: /(?s:.*)/")
        return f"{name} {self._text(rest)}"

    def _json(self, schema: dict[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")

    def _rule(self, body: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _text(self, text: str, name: str = "") -> str:
        """The text as elements of a grammar, with the name in its place.

        The tokenizer's added tokens are no text to a grammar. It has them by their number.
        """
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else _literal(piece, name)
            for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> Iterator[str]:
        pieces = self._added.split(text) if self._ids else [text]
        return (piece for piece in pieces if piece)


def _literal(text: str, name: str) -> str:
    """A text between added tokens."""
    written = {"INDEX": "/[0-9]{1,2}/", "NAME": json.dumps(name), "KEY": json.dumps(name)}
    parts = (part for part in _PLACES.split(text) if part)
    return " ".join(written.get(part) or json.dumps(part) for part in parts)


def _sequence(items: list[tuple[str, bool]], between: str) -> str:
    """These rules in order, where those that are not required may be left out."""
    needed = [rule for rule, is_required in items if is_required]
    others = [rule for rule, is_required in items if not is_required]
    if not between:
        return " ".join(rule if is_required else f"{rule}?" for rule, is_required in items)
    if needed or not others:
        return f" {between} ".join(needed) + "".join(f" ({between} {rule})?" for rule in others)
    # Each may be the first one that is there.
    firsts = (
        others[place] + "".join(f" ({between} {rule})?" for rule in others[place + 1 :])
        for place in range(len(others))
    )
    return f"({' | '.join(firsts)})?"


def _no_object(name: str) -> RowRefused:
    return _refused(f"tool_choice: the parameters of {name!r} are not those of an object")


def _refused(message: str) -> RowRefused:
    return RowRefused(ErrorCode.UNSUPPORTED_PARAMETER, message)

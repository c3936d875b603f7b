"""A constraint in llguidance's own language. Raises GrammarFault for what cannot be one.

Schemas that refer to another place are refused by llguidance: it never fetches anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from batchkv_producer.wire.constraint import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_REASON_CHARS = 200

# Answers in JSON are written as OpenAI writes them, without optional blanks. A schema cannot change
# these with its own ``x-guidance``, because they are set after it.
_JSON: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "lenient": False,  # a keyword that cannot be enforced is refused
    "coerce_one_of": False,
}
_OPTIONS = "x-guidance"
_OWN_DIRECTIVE = "%llguidance"
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class GrammarFault(Exception):
    """A grammar is refused; the message is llguidance's reason, or ours, in one short line."""


class TrialFault(GrammarFault):
    """No grammar can be tried now, for no reason of this one."""


def grammar_text(constraint: Constraint) -> str:
    """What llguidance compiles; the compiler may still refuse it."""
    from llguidance import LLMatcher, grammar_from

    value = constraint.value
    try:
        if constraint.kind == "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=_JSON))
        if constraint.kind == "json_schema":
            schema = {} if value is True else value
            if _OPTIONS in schema:
                raise GrammarFault(f"the key {_OPTIONS} is not supported")
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON))
        if constraint.kind == "choice":
            return str(LLMatcher.grammar_from_lark(_choices(value)))
        if constraint.kind == "regex":
            return str(LLMatcher.grammar_from_regex(value))
        return str(grammar_from("grammar", value))
    except (ValueError, RecursionError) as fault:
        raise GrammarFault(reason(str(fault) or "it is too deep")) from fault


def spells_any(constraint: Constraint, markers: Iterable[str]) -> bool:
    """Whether a constraint has one of these texts in it, as it is or with escapes."""
    text = json.dumps(constraint.value, ensure_ascii=False).replace("\\", "")
    return any(marker in text for marker in markers)


def unforced(text: str) -> str:
    """The same grammar, for a text that spells a special token of the model.

    llguidance writes a text that must come with the tokens that the tokenizer makes of it. Of the
    text of a special token it makes that token, which a text never has. Without this, the model
    chooses among all tokens of the text.
    """
    if text.startswith("{"):  # a schema, or a regular expression
        (grammar,) = json.loads(text)["grammars"]
        text = grammar.get("lark_grammar") or f"start: %json {json.dumps(grammar['json_schema'])}"
    return text if _OWN_DIRECTIVE in text else _UNFORCED + text


def _choices(values: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(value) for value in values)


def reason(text: str) -> str:
    """llguidance's reason in one short line, without its marks, its picture and its stack."""
    plain = text.replace("<non-verbose/>", "").partition("<backtrace>")[0]
    lines = [line.strip() for line in plain.splitlines()]
    words = " ".join(line for line in lines if line and line.strip("^ |") and "| " not in line[:8])
    short = words[:MAX_REASON_CHARS]
    return short if short == words else f"{short}..."

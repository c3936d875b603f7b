"""How models write tool calls, as data: what is around the name, and how arguments are written.

Each entry has the name of mlx-lm's parser of that style (or "harmony"). An answer that has to call
is ``begin``, one or more calls with ``between`` them, and ``finish``. NAME stands for the
function's name, KEY for an argument's, and INDEX for the number of a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORD = re.compile(r"[A-Za-z0-9_]{1,64}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments that are written one by one, each between ``before`` and ``after``.

    A text is written as it is, between ``text_before`` and ``text_after`` in addition;
    ``texts_are_json`` writes it as JSON. Any other value is JSON. ``nests``: whether arrays and
    objects can be written.
    """

    before: str
    after: str
    between: str = ""
    text_before: str = ""
    text_after: str = ""
    texts_are_json: bool = False
    nests: bool = True
    names: re.Pattern[str] = _PLAIN


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How one kind of model writes its calls. ``arguments`` None: they are one JSON object."""

    before: str
    after: str
    begin: str = ""
    finish: str = ""
    between: str = ""
    arguments: Arguments | None = None
    is_single: bool = False  # an answer can have one call only
    names: re.Pattern[str] = _PLAIN

    @property
    def text(self) -> str:
        """All that is around names and values, so that a marker can be looked for."""
        found = [self.begin, self.before, self.after, self.between, self.finish]
        if (style := self.arguments) is not None:
            found += [style.before, style.text_before, style.text_after, style.after, style.between]
        return " ".join(found)


_TAGS = Arguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")

STYLES: dict[str, CallStyle] = {
    "json_tools": CallStyle(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    "mistral": CallStyle("[TOOL_CALLS]NAME[ARGS]", ""),
    "mistral_list": CallStyle(
        '{"name": "NAME", "arguments": ', "}", begin="[TOOL_CALLS][", finish="]", between=", "
    ),
    "kimi_k2": CallStyle(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        finish="<|tool_calls_section_end|>",
    ),
    "kimi_k3": CallStyle(
        '<|open|>call tool="NAME" index="INDEX"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
        begin="<|open|>tools<|sep|>",
        finish="<|close|>tools<|sep|>",
    ),
    "harmony": CallStyle(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", is_single=True
    ),
    "glm47": CallStyle("<tool_call>NAME\n", "</tool_call>", between="\n", arguments=_TAGS),
    "laguna": CallStyle("<tool_call>NAME\n", "</tool_call>", between="\n", arguments=_TAGS),
    "longcat": CallStyle(
        "<longcat_tool_call>NAME\n",
        "</longcat_tool_call>",
        between="\n",
        arguments=Arguments(
            "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"
        ),
    ),
    "qwen3_coder": CallStyle(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        between="\n",
        arguments=Arguments("<parameter=KEY>\n", "\n</parameter>\n"),
    ),
    "minimax_m2": CallStyle(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        begin="<minimax:tool_call>\n",
        finish="</minimax:tool_call>",
        arguments=Arguments('<parameter name="KEY">', "</parameter>\n"),
    ),
    "minicpm5": CallStyle(
        '<function name="NAME">',
        "</function>",
        between="\n",
        arguments=Arguments('<param name="KEY">', "</param>"),
    ),
    "pythonic": CallStyle(
        "NAME(",
        ")",
        begin="<|tool_call_start|>[",
        finish="]<|tool_call_end|>",
        between=", ",
        arguments=Arguments("KEY=", "", ", ", texts_are_json=True, names=_IDENTIFIER),
        names=re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"),
    ),
    "function_gemma": CallStyle(
        "<start_function_call>call:NAME{",
        "}<end_function_call>",
        arguments=Arguments("KEY:", "", ",", "<escape>", "<escape>", nests=False, names=_WORD),
        names=_WORD,
    ),
    "gemma4": CallStyle(
        "<|tool_call>call:NAME{",
        "}<tool_call|>",
        arguments=Arguments("KEY:", "", ",", '<|"|>', '<|"|>', nests=False, names=_WORD),
        names=re.compile(r"[A-Za-z0-9_-]{1,64}"),
    ),
}

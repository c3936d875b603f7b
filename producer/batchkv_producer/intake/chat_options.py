"""What only a chat row may ask for: how it uses its tools, and how much it thinks."""

from __future__ import annotations

from typing import Any

from batchkv_producer.intake.checks import invalid, shown, unsupported
from batchkv_producer.intake.messages import check_template_variables
from batchkv_producer.wire.job import FUNCTION, MAX_FUNCTION_CHARS, NO_EFFORT

EFFORTS = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
THINKING = "enable_thinking"  # the template's variable, which may also stand in the body itself

_WORDS = ("auto", "none", "required")


def tool_choice_of(value: Any, tools: list[dict[str, Any]] | None) -> str | None:
    """The ``tool_choice`` of a request; None lets the model choose. Raises RowFault."""
    if value is None or value == "auto":
        return None
    if isinstance(value, str):
        if value not in _WORDS:
            known = ", ".join(_WORDS)
            raise invalid(f"tool_choice must be one of {known}, or name a function")
        if tools is None:
            if value == "none":
                return None
            raise invalid(f"tool_choice {value} needs tools")
        return value
    return FUNCTION + _named(value, tools or [])


def _named(value: Any, tools: list[dict[str, Any]]) -> str:
    if not isinstance(value, dict):
        raise invalid(f"tool_choice must be a word or an object, got {shown(value)}")
    if value.get("type", "function") != "function":
        kind = shown(value["type"])
        raise unsupported(f"tool_choice.type {kind} is not supported: name one function")
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_FUNCTION_CHARS:
        raise invalid("tool_choice.function must be an object with a name")
    if name not in {tool["function"]["name"] for tool in tools}:
        raise invalid(f"tool_choice names the function {shown(name)}, which tools does not have")
    return name


def parallel_of(value: Any) -> bool | None:
    """``parallel_tool_calls``: False, or None, which allows several calls. Raises RowFault."""
    if not isinstance(value, bool | None):
        raise invalid(f"parallel_tool_calls must be true or false, got {shown(value)}")
    return None if value else value


def effort_of(value: Any) -> str | None:
    """The ``reasoning_effort``, one of a few words. Raises RowFault."""
    if value is not None and value not in EFFORTS:
        raise invalid(f"reasoning_effort must be one of {', '.join(EFFORTS)}; got {shown(value)}")
    return None if value is None else str(value)


def variables_of(body: dict[str, Any]) -> dict[str, Any]:
    """The template's variables, with ``enable_thinking`` of the body itself. Raises RowFault."""
    given, thinking = body.get("chat_template_kwargs"), body.get(THINKING)
    variables = {} if given is None else check_template_variables(given)
    if thinking is None:
        return variables
    if not isinstance(thinking, bool):
        raise invalid(f"{THINKING} must be true or false, got {shown(thinking)}")
    if variables.setdefault(THINKING, thinking) is not thinking:
        raise invalid(f"{THINKING} and chat_template_kwargs.{THINKING} differ")
    return variables

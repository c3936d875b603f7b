"""The parts of a chat row that go to the chat template: messages, tools, template variables."""

from __future__ import annotations

from typing import Any

from batchkv_producer.intake.checks import check_depth, invalid, is_text, shown, unsupported

MAX_TOOLS = 128
MAX_NAME_CHARS = 256
MAX_VARIABLE_CHARS = 1024

# OpenAI renamed the system role for its newer models; templates know the old name.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_KEYS = frozenset({"name", "tool_call_id", "reasoning_content"})
_PLAIN_KEYS = frozenset({"role", "content"})
_EMPTY_KEYS = frozenset({"annotations"})  # lists that OpenAI's answers have, mostly empty
_OTHER_NAMES = {"reasoning": "reasoning_content"}  # vLLM's newer name; templates know the old one

# Variables that published chat templates read. Rows may not set the template itself, nor anything
# that the worker passes to it (tools, documents, add_generation_prompt ...).
TEMPLATE_VARIABLES = frozenset(
    {
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "reasoning_effort",
        "reasoning",
        "preserve_thinking",
        "keep_past_thinking",
        "date_string",
        "tools_in_user_message",
        "model_identity",
    }
)


def check_messages(value: Any) -> list[dict[str, Any]]:
    """The messages for the template: text parts joined, nulls dropped."""
    if not isinstance(value, list):
        raise invalid(f"messages must be a list, got {shown(value)}")
    if not value:
        raise invalid("messages is empty")
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid(f"{where} must be an object, got {shown(item)}")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise invalid(f"{where}.role must be one of {known}; got {shown(role)}")
    message: dict[str, Any] = {"role": ROLES[role], "content": _content(where, item)}
    if item.keys() != _PLAIN_KEYS:
        _add_extras(where, item, message)
    return message


def _content(where: str, item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if content is None and item.get("role") == "assistant" and item.get("tool_calls"):
        return ""
    if "content" not in item:
        raise invalid(f"{where}.content is missing")
    raise invalid(f"{where}.content must be a string or a list of text parts, got {shown(content)}")


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{where} must be an object, got {shown(part)}")
    if part.get("type") != "text":
        raise unsupported(f"{where}: only text parts are supported, got {shown(part.get('type'))}")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{where}.text must be a string, got {shown(part.get('text'))}")
    return str(part["text"])


def _add_extras(where: str, item: dict[str, Any], message: dict[str, Any]) -> None:
    for given, value in item.items():
        name = _OTHER_NAMES.get(given, given)
        if value is None or name in _PLAIN_KEYS or (name in _EMPTY_KEYS and value == []):
            continue
        if name in _TEXT_KEYS:
            if not isinstance(value, str):
                raise invalid(f"{where}.{name} must be a string, got {shown(value)}")
        elif name == "tool_calls":
            _check_tool_calls(f"{where}.tool_calls", value)
        else:
            raise unsupported(f"{where}.{name[:MAX_NAME_CHARS]} is not supported")
        message[name] = value


def _check_tool_calls(where: str, value: Any) -> None:
    if not isinstance(value, list):
        raise invalid(f"{where} must be a list, got {shown(value)}")
    for index, call in enumerate(value):
        _check_function(f"{where}[{index}]", call)
    check_depth(where, value)


def check_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools for the template, or None if the list is empty."""
    if not isinstance(value, list):
        raise invalid(f"tools must be a list, got {shown(value)}")
    if len(value) > MAX_TOOLS:
        raise invalid(f"tools has {len(value)} entries; at most {MAX_TOOLS} are accepted")
    for index, tool in enumerate(value):
        _check_function(f"tools[{index}]", tool)
    check_depth("tools", value)
    return value or None


def _check_function(where: str, item: Any) -> None:
    """Check a tool, or a call of one: both have a type and a function with a name."""
    if not isinstance(item, dict):
        raise invalid(f"{where} must be an object, got {shown(item)}")
    if item.get("type", "function") != "function":
        raise unsupported(f"{where}: only functions are supported, got {shown(item['type'])}")
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function must be an object with a name")


def check_template_variables(value: Any) -> dict[str, Any]:
    """The template variables that a row may set: names from a fixed list, plain values."""
    if not isinstance(value, dict):
        raise invalid(f"chat_template_kwargs must be an object, got {shown(value)}")
    variables = {name: item for name, item in value.items() if item is not None}
    for name, item in variables.items():
        where = f"chat_template_kwargs.{name[:MAX_NAME_CHARS]}"
        if name not in TEMPLATE_VARIABLES:
            raise unsupported(f"{where} is not a template variable that a row may set")
        if not isinstance(item, (bool, int, float)) and not is_text(item, MAX_VARIABLE_CHARS):
            raise invalid(f"{where} must be a short string, a number or a boolean")
    return variables

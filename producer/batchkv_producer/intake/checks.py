"""Small checks of JSON values, used by everything that reads a row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from batchkv_producer.wire.job import MAX_CUSTOM_ID_CHARS as MAX_CUSTOM_ID_CHARS
from batchkv_producer.wire.job import ErrorCode

MAX_SHOWN = 60
MAX_LOGICAL = 2**16  # a higher upper bound only protects storage, so messages leave it out
MAX_DEPTH = 32  # nesting of values that are passed to the chat template unchanged
MAX_MODEL_CHARS = 1024
MAX_STOPS = 16
MAX_STOP_BYTES = 1024


class RowFault(ValueError):
    """This row is wrong. ``formats`` catches it and makes a ``RowError`` value of it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> RowFault:
    """A field of the row has an invalid value."""
    return RowFault(ErrorCode.INVALID_REQUEST, message)


def unsupported(message: str) -> RowFault:
    """The row uses a feature that batchkv does not support."""
    return RowFault(ErrorCode.UNSUPPORTED_PARAMETER, message)


def shown(value: Any) -> str:
    """A JSON value for a message: short, and on one line."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def is_text(value: Any, max_chars: int) -> bool:
    """True for a string of at most this many characters."""
    return isinstance(value, str) and len(value) <= max_chars


@dataclass(frozen=True, slots=True)
class NumberRule:
    """A number's kind and range. ``low`` is allowed unless ``is_low_excluded``."""

    low: float
    high: float
    is_whole: bool = False
    is_low_excluded: bool = False

    def admits(self, value: Any) -> bool:
        """True when the value has the right type (a boolean is no number) and lies in range."""
        kinds = int if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        if self.is_low_excluded and value == self.low:
            return False
        return self.low <= value <= self.high

    def check(self, name: str, value: Any) -> Any:
        """The value, with -0.0 as 0.0. Raises RowFault if the rule does not admit it."""
        if not self.admits(value):
            raise invalid(self.complaint(name, value))
        return value + 0  # both readers of a line must return the same value, and 0.0 == -0.0

    def complaint(self, name: str, value: Any) -> str:
        """The sentence that says why ``admits`` returned False."""
        kind = "a whole number" if self.is_whole else "a number"
        low = f"{'>' if self.is_low_excluded else '>='} {self.low}"
        is_too_large = isinstance(value, (int, float)) and value > self.high
        if self.is_whole and self.high > MAX_LOGICAL and not is_too_large:
            return f"{name} must be {kind} {low}, got {shown(value)}"
        return f"{name} must be {kind} {low} and <= {self.high}, got {shown(value)}"


def model_name(text: str) -> str:
    """A model's name without blanks around it. ValueError for a name that no worker serves."""
    name = text.strip()
    if not name:
        raise ValueError("is blank")
    if len(name) > MAX_MODEL_CHARS:
        raise ValueError(f"has {len(name)} characters; at most {MAX_MODEL_CHARS} are accepted")
    if not name.isprintable():
        raise ValueError("has a character that cannot be printed")
    return name


def is_model_name(text: str) -> bool:
    """True for a valid model name without blanks around it."""
    try:
        return model_name(text) == text
    except ValueError:
        return False


def check_stop(value: Any) -> tuple[str, ...]:
    """The stop strings in a string or a list of strings. RowFault if one is invalid."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid("stop must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop has {len(stops)} strings; at most {MAX_STOPS} are accepted")
    for item in stops:
        if not 0 < len(item.encode("utf-8", "replace")) <= MAX_STOP_BYTES:
            raise invalid(f"stop: each string must have 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def check_depth(name: str, value: Any) -> None:
    """Raise RowFault if lists and objects nest deeper than ``MAX_DEPTH``."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise invalid(f"{name} nests deeper than {MAX_DEPTH} levels")


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()

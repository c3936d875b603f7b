"""Reads the answers of a gateway: JSON into the frozen dataclasses of this package.

A field that this version does not know is left out. A field that is missing has its default.
Anything else that does not fit raises WireError, so a wrong server is named as such.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from batchkv_producer.errors import WireError

T = TypeVar("T")


def decoded(kind: type[T], value: Any) -> T:
    """A value of JSON as a dataclass. Raises WireError."""
    found: T = _decoded(kind, value, kind.__name__)
    return found


def decoded_list(kind: type[T], value: Any) -> list[T]:
    """A list of JSON as dataclasses. Raises WireError."""
    if not isinstance(value, list):
        raise _unfit(kind.__name__, value)
    return [decoded(kind, each) for each in value]


def part(answer: Any, name: str, kind: type[T]) -> T:
    """A field of an answer. Raises WireError if it is missing or of another type."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise _unfit(name, value)
    return value


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return _decoded(inner, value, where)
    if origin is Literal:
        return _checked(value, where, lambda: value in get_args(kind))
    if origin in (tuple, frozenset, set):
        _checked(value, where, lambda: isinstance(value, list))
        return origin(_items(origin, get_args(kind), value, where))
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, where)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(value, where, lambda: is_number))
    return _checked(value, where, lambda: type(value) is kind)


def _items(origin: Any, kinds: tuple[Any, ...], value: list[Any], where: str) -> list[Any]:
    if origin is tuple and kinds[-1] is not Ellipsis:
        _checked(value, where, lambda: len(value) == len(kinds))
        return [_decoded(kind, each, where) for kind, each in zip(kinds, value, strict=True)]
    return [_decoded(kinds[0], each, where) for each in value]


def _object(kind: type, value: Any, where: str) -> Any:
    _checked(value, where, lambda: isinstance(value, dict))
    found = {}
    for name, (inner, is_needed) in _fields_of(kind).items():
        if name in value:
            found[name] = _decoded(inner, value[name], f"{where}.{name}")
        elif is_needed:
            raise _unfit(f"{where}.{name}", None)
    return kind(**found)


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> type of each field, and whether it has no default."""
    hints = get_type_hints(kind)
    return {
        each.name: (hints[each.name], each.default is each.default_factory is MISSING)
        for each in fields(kind)
    }


def _checked(value: T, where: str, is_right: Callable[[], bool]) -> T:
    if not is_right():
        raise _unfit(where, value)
    return value


def _unfit(where: str, value: Any) -> WireError:
    return WireError(f"the gateway's answer cannot be read: {where} is {str(value)[:80]!r}")

"""Rules for the values of fields: each checks a value and returns what a job stores of it.

A value that changes nothing is stored as "not given", which is None or an empty tuple. So a row
that says it is the same row as one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from batchkv_producer.intake.checks import (
    MAX_STOP_BYTES,
    NumberRule,
    check_stop,
    invalid,
    shown,
)
from batchkv_producer.wire.job import MAX_TOKEN_ID

MAX_LISTED_TOKENS = 1024  # in ``stop_token_ids``, and in ``logit_bias``
MAX_BIAS = 100
MAX_BAD_WORDS = 256

_BIAS = NumberRule(-MAX_BIAS, MAX_BIAS)
_TOKEN = NumberRule(0, MAX_TOKEN_ID, is_whole=True)


class Rule(Protocol):
    """What a field's values may be."""

    def check(self, name: str, value: Any) -> Any:
        """What is stored of a value. Raises RowFault for one that is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Replacing:
    """A number, one value of which has another meaning: ``value`` is stored as ``stored``."""

    rule: NumberRule
    value: float
    stored: int | None = None
    is_real: bool = False  # 1 and 1.0 are stored alike

    def check(self, name: str, value: Any) -> Any:
        """See ``Rule``."""
        found = self.rule.check(name, value)
        if found == self.value:
            return self.stored
        return float(found) if self.is_real else found


@dataclass(frozen=True, slots=True)
class SwitchRule:
    """True or false. Only the one that changes something is stored."""

    stored: bool

    def check(self, name: str, value: Any) -> bool | None:
        """See ``Rule``."""
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false, got {shown(value)}")
        return value if value is self.stored else None


class StopRule:
    """A text, or a list of texts."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        """See ``Rule``."""
        return check_stop(value)


class TokensRule:
    """A list of token ids. Their order does not matter."""

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        """See ``Rule``."""
        if not isinstance(value, list):
            raise invalid(f"{name} must be a list of token ids, got {shown(value)}")
        _check_count(name, len(value), MAX_LISTED_TOKENS, "token ids")
        return tuple(sorted({_TOKEN.check(f"{name}: each token id", item) for item in value}))


class BiasRule:
    """An object: token id, as a text, to a number. A bias of 0 changes nothing."""

    def check(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """See ``Rule``."""
        if not isinstance(value, dict):
            raise invalid(f"{name} must be an object of token ids, got {shown(value)}")
        _check_count(name, len(value), MAX_LISTED_TOKENS, "token ids")
        pairs = [
            (_token_of(name, key), float(_BIAS.check(f"{name}: each bias", bias)))
            for key, bias in value.items()
        ]
        return tuple(sorted(pair for pair in pairs if pair[1]))


class WordsRule:
    """A list of texts. Their order does not matter."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        """See ``Rule``."""
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise invalid(f"{name} must be a list of texts, got {shown(value)}")
        _check_count(name, len(value), MAX_BAD_WORDS, "texts")
        for item in value:
            if not item.strip() or len(item.encode("utf-8", "replace")) > MAX_STOP_BYTES:
                raise invalid(
                    f"{name}: each text must have 1 to {MAX_STOP_BYTES} bytes, not blanks"
                )
        return tuple(sorted(set(value)))


def _token_of(name: str, key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
        raise invalid(f"{name}: each key must be a token id like 50256, got {shown(key)}")
    token: int = _TOKEN.check(f"{name}: each token id", int(key))
    return token


def _check_count(name: str, count: int, most: int, kind: str) -> None:
    if count > most:
        raise invalid(f"{name} has {count} {kind}; at most {most} are accepted")

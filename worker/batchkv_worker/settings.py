"""Every setting of a worker: read once, checked once, never changed.

A flag of ``batchkv worker`` overrides its variable. A value that cannot be is a ``SettingsError``
that names the variable or the flag, the value, and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from batchkv_cache_store import opening
from batchkv_cache_store.sizes import parse_size
from batchkv_producer.intake.checks import model_name
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.queue.dispatch import WAVES_AHEAD

PREFIX = "BATCHKV_"
Admission = Literal["worst", "optimistic"]  # how much of a row's answer memory is kept for
DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_TOKENS = 256  # prefill chunks end on block boundaries
# Variables that other parts read, and that a worker's environment may well hold.
FOREIGN = frozenset(
    f"BATCHKV_{name}" for name in ("HOME", "DATA", "REDIS_URL", "REDIS_URL_FILE", "REDIS_CA_FILE")
)
# Read by ``opening``: what may hold a password is no flag, or can be given in a file.
CACHE_VARIABLES = frozenset(
    f"{name}{ending}"
    for name in ("BATCHKV_CACHE", "BATCHKV_CACHE_SECRET", "BATCHKV_CACHE_SALT")
    for ending in ("", "_FILE")
)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker was told. ``memory_bytes`` None means: derived from the device."""

    model: str
    kv_scheme: str = "affine8"
    slots: int = 32
    prefetch: int | None = None  # as many as ``rows_ahead`` says
    memory_bytes: int | None = None
    admission: Admission = "optimistic"
    prefill_chunk: int | None = None  # measured at start
    dtype: str = "auto"
    wired_limit: bool = False
    lease_seconds: int = 60
    heartbeat_seconds: float = 15.0
    maintenance_seconds: float = 30.0
    engine_timeout_seconds: float = 600.0
    load_timeout_seconds: float = 7200.0
    drain_seconds: float = 30.0
    cache: str | None = field(default=None, repr=False)
    cache_secret: bytes | None = field(default=None, repr=False)
    cache_salt: bytes = field(default=b"", repr=False)
    cache_write: str = "shared"
    cache_lease_seconds: float = 30.0
    cache_audit: float = 0.0
    kv_adopt_float: bool = False
    trace: str | None = None  # a file for where the time goes

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: Any) -> Self:
        """Read the variables; ``overrides`` are the flags, None where not given.

        Raises SettingsError. Unknown variables are not an error: see ``unknown_variables``.
        """
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            given = overrides.pop(setting.field, None)
            source = setting.flag
            if given is None:
                given, source = environ.get(setting.variable) or None, setting.variable
            if given is not None:
                values[setting.field] = setting.read(str(given), source)
        values |= _cache_values(environ, overrides.pop("cache", None))
        if overrides:
            raise TypeError(f"no such setting: {', '.join(overrides)}")
        if "model" not in values:
            raise SettingsError(
                "no model: give -m MODEL or set BATCHKV_MODEL (a name, a folder, or 'demo')"
            )
        settings = cls(**values)
        settings._check_lease()
        settings._check_cache(values.keys())
        return settings

    @property
    def rows_ahead(self) -> int:
        """Rows that wait in the engine beside those in its slots."""
        return WAVES_AHEAD * self.slots if self.prefetch is None else self.prefetch

    def _check_cache(self, said: Set[str]) -> None:
        """What needs a cache, or a kind of tier, is refused without."""
        specs = opening.parse_tiers(self.cache) if self.cache else ()
        if "cache_lease_seconds" in said and opening.lease_url(specs) is None:
            raise SettingsError(
                "BATCHKV_CACHE_LEASE_SECONDS: leases between workers need a Redis tier in "
                "BATCHKV_CACHE"
            )
        if "cache_write" in said and not specs:
            raise SettingsError("BATCHKV_CACHE_WRITE: there is no cache to write to")
        if self.kv_adopt_float and not specs:
            raise SettingsError("BATCHKV_KV_ADOPT_FLOAT: there is no cache to take blocks from")
        if self.kv_adopt_float and self.kv_scheme == "float":
            raise SettingsError("BATCHKV_KV_ADOPT_FLOAT: this worker's own blocks are float")

    def _check_lease(self) -> None:
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise SettingsError(
                f"BATCHKV_HEARTBEAT_SECONDS={self.heartbeat_seconds:g} is more than half of "
                f"BATCHKV_LEASE_SECONDS={self.lease_seconds}: one late heartbeat loses the jobs"
            )


def _cache_values(environ: Mapping[str, str], given: str | None) -> dict[str, Any]:
    """The store's tiers, secret and salt; ``given`` is the flag."""
    source = "BATCHKV_CACHE" if given is None else "--cache"
    try:
        text = given if given is not None else opening.read_cache(environ)
        secret, salt = opening.read_secret(environ), opening.read_salt(environ)
        if not text or text.strip() == "off":
            return {}
        opening.parse_tiers(text)
    except ValueError as fault:
        raise SettingsError(f"{source}: {fault}") from fault
    return {"cache": text, "cache_secret": secret, "cache_salt": salt}


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table below: how a text becomes the value of a field."""

    field: str
    variable: str
    flag: str
    parse: Callable[[str], Any]
    allowed: str

    def read(self, text: str, source: str) -> Any:
        """The value; ``source`` is the variable or the flag that the error names."""
        try:
            return self.parse(text.strip())
        except ValueError as fault:
            separator = "=" if source == self.variable else " "
            wrong = str(fault) if isinstance(fault, _Explained) else f"expected {self.allowed}"
            raise SettingsError(f"{source}{separator}{text}: {wrong}") from fault


class _Explained(ValueError):
    """Its text says what is wrong and what is known."""


def _nonempty(text: str) -> str:
    if not text or len(text) > 1024 or not text.isprintable():
        raise ValueError(text)
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _whole(low: int, high: int, multiple: int = 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high or value % multiple:
            raise ValueError(text)
        return value

    return parse


def _chunk(text: str) -> int | None:
    return None if text == "auto" else _whole(BLOCK_TOKENS, 65_536, BLOCK_TOKENS)(text)


def _rows(text: str) -> int | None:
    return None if text == "auto" else _whole(0, 4096)(text)


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # also false for nan
            raise ValueError(text)
        return value

    return parse


def _scheme(text: str) -> str:
    try:
        return str(SchemeSpec.parse(text))
    except ValueError as fault:
        raise _Explained(str(fault)) from fault


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


_DAY = 86_400

SETTINGS = (
    Setting("model", "BATCHKV_MODEL", "--model", model_name, "a model's name or folder"),
    Setting("kv_scheme", "BATCHKV_KV_SCHEME", "--kv-scheme", _scheme,
            "a KV scheme, like affine8 or affine4,last=float"),
    Setting("slots", "BATCHKV_SLOTS", "--slots", _whole(1, 4096), "a whole number, 1 to 4096"),
    Setting("prefetch", "BATCHKV_PREFETCH", "--prefetch", _rows,
            "auto, or a whole number, 0 to 4096"),
    Setting("memory_bytes", "BATCHKV_MEMORY", "--memory", parse_size,
            "a size of at least 1MiB, like 4GB or 512MiB"),
    Setting("admission", "BATCHKV_ADMISSION", "--admission", _one_of(*get_args(Admission)),
            f"one of {', '.join(get_args(Admission))}"),
    Setting("prefill_chunk", "BATCHKV_PREFILL_CHUNK", "--prefill-chunk",
            _chunk, f"auto, or a multiple of {BLOCK_TOKENS} tokens, {BLOCK_TOKENS} to 65536"),
    Setting("dtype", "BATCHKV_DTYPE", "--dtype", _one_of(*DTYPES), f"one of {', '.join(DTYPES)}"),
    Setting("wired_limit", "BATCHKV_WIRED_LIMIT", "--wired-limit", _switch, "on or off"),
    Setting("lease_seconds", "BATCHKV_LEASE_SECONDS", "--lease-seconds", _whole(1, _DAY),
            "whole seconds, 1 to 86400"),
    Setting("heartbeat_seconds", "BATCHKV_HEARTBEAT_SECONDS", "--heartbeat-seconds",
            _seconds(0.1, _DAY), "seconds, 0.1 to 86400"),
    Setting("maintenance_seconds", "BATCHKV_MAINTENANCE_SECONDS", "--maintenance-seconds",
            _seconds(0.1, _DAY), "seconds, 0.1 to 86400"),
    Setting("engine_timeout_seconds", "BATCHKV_ENGINE_TIMEOUT", "--engine-timeout",
            _seconds(0.1, 7 * _DAY), "seconds, 0.1 to 604800"),
    Setting("load_timeout_seconds", "BATCHKV_LOAD_TIMEOUT", "--load-timeout",
            _seconds(0.1, 7 * _DAY), "seconds, 0.1 to 604800"),
    Setting("drain_seconds", "BATCHKV_DRAIN_SECONDS", "--drain-seconds", _seconds(0, _DAY),
            "seconds, 0 to 86400"),
    Setting("cache_write", "BATCHKV_CACHE_WRITE", "--cache-write", _one_of("shared", "all"),
            "shared or all"),
    Setting("cache_lease_seconds", "BATCHKV_CACHE_LEASE_SECONDS", "--cache-lease-seconds",
            _seconds(1, 3600), "seconds, 1 to 3600"),
    Setting("cache_audit", "BATCHKV_CACHE_AUDIT", "--cache-audit", _seconds(0, 1),
            "a share of the hits, 0 to 1"),
    Setting("trace", "BATCHKV_TRACE", "--trace", _nonempty, "a file to write"),
    Setting("kv_adopt_float", "BATCHKV_KV_ADOPT_FLOAT", "--kv-adopt-float", _switch, "on or off"),
)  # fmt: skip


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each BATCHKV_* variable that nobody reads, with the closest one that exists."""
    known = {setting.variable for setting in SETTINGS} | FOREIGN | CACHE_VARIABLES
    warnings = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        tails = [other.removeprefix(PREFIX) for other in known]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), tails, n=1, cutoff=0.75)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
        warnings.append(f"{name} is not a setting of batchkv and does nothing{hint}")
    return warnings

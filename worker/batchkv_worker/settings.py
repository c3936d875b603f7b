"""All settings of a worker: read once, checked once, never changed.

``batchkv_producer.settings_table`` has the list of settings. A flag of ``batchkv worker`` overrides
its variable. An invalid value raises ``SettingsError`` with the variable or the flag, the value and
the allowed values.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from batchkv_cache_store import opening
from batchkv_cache_store.sizes import parse_size
from batchkv_producer.errors import BatchkvError
from batchkv_producer.intake.checks import model_name
from batchkv_producer.settings_table import BY_NAME, TABLE, VARIABLES, Setting, ValueType
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import (
    Adapter,
    parse_adapters,
    served_name,
    split_here,
    with_adapter,
)
from batchkv_producer.wire.batch_options import seconds_of
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.schemes.spec import SchemeSpec

PREFIX = "BATCHKV_"
WAVES_AHEAD = 2  # default of the rows that wait in the engine, for each slot
SETTINGS = tuple(setting for setting in TABLE if setting.is_plain)
Admission = Literal["worst", "optimistic"]  # ``settings_table.ADMISSIONS``
Weights = Literal["auto", "packed", "unpacked"]  # ``settings_table.WEIGHTS``


class _Explained(ValueError):
    """An error whose text already names the fault and the known values."""


def _scheme(_: Setting, text: str) -> str:
    try:
        return str(SchemeSpec.parse(text))
    except ValueError as fault:
        raise _Explained(str(fault)) from fault


def _whole(setting: Setting, text: str) -> int | None:
    if text == setting.default == "auto":
        return None
    value = int(text)
    if not setting.low <= value <= setting.high or value % setting.step:
        raise ValueError(text)
    return value


def _number(setting: Setting, text: str) -> float:
    value = float(text)
    if not setting.low <= value <= setting.high:  # also false for nan
        raise ValueError(text)
    return value


def _duration(setting: Setting, text: str) -> int:
    seconds = seconds_of(text)
    if not setting.low <= seconds <= setting.high:
        raise ValueError(text)
    return seconds


def _choice(setting: Setting, text: str) -> str:
    if text not in setting.choices:
        raise ValueError(text)
    return text


def _switch(_: Setting, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _adapters(_: Setting, text: str) -> tuple[Adapter, ...]:
    try:
        return parse_adapters(text)
    except BatchkvError as fault:
        raise _Explained(str(fault)) from fault


def _file(_: Setting, text: str) -> str:
    if not text or len(text) > 1024 or not text.isprintable():
        raise ValueError(text)
    return text


_READERS: dict[ValueType, Callable[[Setting, str], Any]] = {
    ValueType.MODEL: lambda _, text: model_name(text),
    ValueType.SCHEME: _scheme,
    ValueType.SIZE: lambda _, text: parse_size(text),
    ValueType.WHOLE: _whole,
    ValueType.NUMBER: _number,
    ValueType.CHOICE: _choice,
    ValueType.SWITCH: _switch,
    ValueType.DURATION: _duration,
    ValueType.FILE: _file,
    ValueType.ADAPTERS: _adapters,
}


def parsed(name: str, text: str) -> Any:
    """Parse the text of a setting; ValueError says what is wrong with it."""
    setting = BY_NAME[name]
    try:
        return _READERS[setting.value_type](setting, text.strip())
    except _Explained:
        raise
    except ValueError as fault:
        raise ValueError(f"expected {setting.allowed()}") from fault


def _value(setting: Setting, text: str, source: str) -> Any:
    """Parse the text; ``source`` is the variable or the flag, for the error."""
    try:
        return parsed(setting.name, text)
    except ValueError as fault:
        separator = "=" if source == setting.variable else " "
        raise SettingsError(f"{source}{separator}{text}: {fault}") from fault


def _default(name: str) -> Any:
    """The table's default as a value; None if it has none."""
    text = BY_NAME[name].default
    return parsed(name, text) if text else None


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker. ``memory_bytes`` None: derived from the device."""

    model: str
    adapters: tuple[Adapter, ...] = ()  # served besides the model alone, each under its name
    kv_scheme: str = _default("kv_scheme")
    slots: int | None = _default("slots")  # None: as many as suit the device
    prefetch: int | None = _default("prefetch")  # None: as many as ``rows_ahead`` says
    memory_bytes: int | None = _default("memory_bytes")
    admission: Admission = _default("admission")  # noqa: RUF009  (a str, never changed)
    prefill_chunk: int | None = _default("prefill_chunk")  # None: measured at start
    lane_chunk: int = _default("lane_chunk")
    dtype: str = _default("dtype")
    weights: Weights = _default("weights")  # noqa: RUF009  (a str, never changed)
    wired_limit: bool = _default("wired_limit")
    lease_seconds: int = _default("lease_seconds")
    heartbeat_seconds: float = _default("heartbeat_seconds")
    maintenance_seconds: float = _default("maintenance_seconds")
    engine_timeout_seconds: float = _default("engine_timeout_seconds")
    load_timeout_seconds: float = _default("load_timeout_seconds")
    drain_seconds: float = _default("drain_seconds")
    stay_seconds: float = _default("stay_seconds")  # of a model, if there are several
    polite: bool = _default("polite")
    cache: str | None = field(default=None, repr=False)
    cache_secret: bytes | None = field(default=None, repr=False)
    cache_salt: bytes = field(default=b"", repr=False)
    cache_write: str = _default("cache_write")
    cache_lease_seconds: float = _default("cache_lease_seconds")
    cache_audit: float = _default("cache_audit")
    kv_adopt_float: bool = _default("kv_adopt_float")
    reuse_seconds: int = _default("reuse_seconds")
    reuse_answers: int = _default("reuse_answers")
    reuse_bytes: int = _default("reuse_bytes")
    trace: str | None = _default("trace")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: Any) -> Self:
        """Read the variables; ``overrides`` are the flags, None if not given.

        Raises SettingsError. Unknown variables are not an error: see ``unknown_variables``.
        """
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            given = overrides.pop(setting.name, None)
            source = setting.flag
            if setting.is_repeated:
                given = ",".join(given or ()) or None
            if given is None:
                given, source = environ.get(setting.variable) or None, setting.variable
            if given is not None:
                values[setting.name] = _value(setting, str(given), source)
        values |= _cache_values(environ, overrides.pop("cache", None))
        if overrides:
            raise TypeError(f"no such setting: {', '.join(overrides)}")
        if "model" not in values:
            raise SettingsError(
                "no model: give -m MODEL or set BATCHKV_MODEL (a name, a folder, or 'demo')"
            )
        settings = cls(**values)
        settings._check_adapters()
        settings._check_lease()
        settings._check_cache(values.keys())
        return settings

    def rows_ahead(self, slots: int) -> int:
        """The rows that wait in an engine of so many ``slots``, besides those in slots."""
        return WAVES_AHEAD * slots if self.prefetch is None else self.prefetch

    def check_device(self, kind: str) -> None:
        """Raise SettingsError for what this kind of device (``cpu``, ``metal``, ``cuda``) lacks."""
        if self.weights == "unpacked" and kind != "cuda":
            raise SettingsError(
                "--weights unpacked: only NVIDIA GPUs multiply unpacked weights faster. Leave out "
                "the flag, and BATCHKV_WEIGHTS"
            )

    def served_name(self, adapter: str = "") -> str:
        """The name of the model with one of the adapters, or alone. It names a queue."""
        return served_name(self.model, adapter)

    @property
    def queues(self) -> dict[str, str]:
        """Queue -> name of the adapter; the model alone, "", comes first."""
        names = ("", *(adapter.name for adapter in self.adapters))
        return {redis_keys.queue_name(self.served_name(name)): name for name in names}

    def _check_adapters(self) -> None:
        base, name = split_here(self.model)
        if name:
            raise SettingsError(
                f"-m {self.model}: a worker serves {base} with that adapter under "
                f"-m {base} {BY_NAME['adapters'].flag} {name}=FOLDER"
            )
        for adapter in self.adapters:
            try:
                with_adapter(self.model, adapter.name)
            except BatchkvError as fault:
                raise SettingsError(f"{BY_NAME['adapters'].flag} {adapter}: {fault}") from fault

    def _check_cache(self, said: Set[str]) -> None:
        """Refuse settings that need a cache, or a kind of tier, if there is none."""
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


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each unknown BATCHKV_* variable, with the closest one that exists."""
    warnings = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        tails = [other.removeprefix(PREFIX) for other in VARIABLES]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), tails, n=1, cutoff=0.75)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
        warnings.append(f"{name} is not a setting of batchkv and does nothing{hint}")
    return warnings

"""Stores measurements of this machine, so that a later start measures nothing and chooses alike.

A file has the results of one set of facts: device, versions, model, scheme, slots, dtype. Files are
in ``measured/`` in the home folder (``BATCHKV_HOME``). Of two workers that start at once, the first
to measure something decides for both. If a file cannot be read, all is measured again. A folder
that cannot be written stores nothing. Neither fails a start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchkv_worker.kept_files import remove_oldest, write_whole

log = logging.getLogger("batchkv.engine")

FOLDER = "measured"
LOCK = "lock"
VERSION = 2  # raised whenever results of an earlier version must not be used
MAX_FILES = 200  # the oldest are removed
MAX_BYTES = 2**22  # of a file
MAX_TRIES = 2  # of something that may end the process
LOCK_SECONDS = 60.0  # how long a worker waits for another one that measures
POLL_SECONDS = 0.05

# Names of results that other modules read, too.
FUSED_LINEARS, FUSED_AGREE = "fused linear layers", "fused linear layers agree"
ROTARY_LAYERS = "rotary kernel in replayed steps"
ROTARY_AGREES = "rotary kernel over fused layers agrees"
ROTARY_VALUES = "values are of fused layers"
ROTARY_CHUNKS = "rotary kernel in chunks"
ROTARY_CHUNKS_AGREE = "rotary kernel in chunks agrees"
RESIDUAL_STEPS, RESIDUAL_CHUNKS = "residual kernel in replayed steps", "residual kernel in chunks"
RESIDUAL_AGREES = "residual kernel agrees"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Codec(Generic[Value]):
    """How a result becomes JSON and is read again.

    ``from_json`` raises ValueError, TypeError or LookupError for anything that is no such result.
    """

    to_json: Callable[[Value], Any]
    from_json: Callable[[Any], Value]


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _yes_or_no(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value


WHOLE: Codec[int] = Codec(int, _whole)
YES_OR_NO: Codec[bool] = Codec(bool, _yes_or_no)
TEXT: Codec[str] = Codec(str, _text)


class Measurements:
    """Results by name, of one set of facts. Without a file nothing is stored: each is measured.

    ``is_anew``: the file's results of earlier starts are not used, but replaced one by one.
    """

    def __init__(
        self, file: Path | None = None, facts: Mapping[str, Any] | None = None, *,
        is_anew: bool = False,
    ) -> None:  # fmt: skip
        self.file, self.facts = file, {"version": VERSION, **(facts or {})}
        self._is_anew = is_anew
        self._values: dict[str, Any] = {}  # the results that this process uses
        self._kept: dict[str, Any] = {}  # the same as JSON
        self._tries: list[str] = []  # begun, and not at their end
        self._is_locked = False
        self._is_warned = False
        self._logged: set[str] = set()
        self.has_measured = False  # a result that was not stored

    @classmethod
    def in_home(
        cls, home: Path, facts: Mapping[str, Any], *, is_anew: bool = False
    ) -> Measurements:
        """The measurements of ``facts``, a JSON text that is different for each set of results."""
        text = json.dumps({"version": VERSION, **facts}, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cls(home / FOLDER / f"{name}.json", facts, is_anew=is_anew)

    @property
    def home(self) -> Path | None:
        """The home folder; None where nothing is stored."""
        return self.file and self.file.parent.parent

    def of(self, name: str, measure: Callable[[], Value], codec: Codec[Value]) -> Value:
        """The result of that name; ``measure`` gives it where none is kept."""
        if self.file is None:
            return measure()
        if name in self._values:
            value: Value = self._values[name]
            return value
        if not self._is_known(name, codec):
            with self._locked(self.file.parent):
                if not self._is_known(name, codec):  # no other process measured it meanwhile
                    value = measure()
                    self.has_measured = True
                    if not self._is_known(name, codec):  # nor did one that has not the lock
                        self._values[name] = value
                        self._keep(name, codec.to_json(value))
        value = self._values[name]
        return value

    def log_once(self, message: str, *arguments: object) -> None:
        """Log what a result means. Later engines of this process do not repeat it."""
        text = message % arguments
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

    def begin_try(self, name: str) -> bool:
        """Note that something begins that may end the process, until ``end_tries``.

        False where ``MAX_TRIES`` earlier ones did not come to their end: do not try it again.
        """
        if self.file is None:
            return True
        known = 0 if self._is_anew else self._read().get(name, 0)
        count = known if type(known) is int else 0
        if count >= MAX_TRIES:
            return False
        self._tries.append(name)
        self._keep(name, count + 1)
        return True

    def end_tries(self) -> None:
        """All that was begun has come to its end."""
        while self._tries:
            self._keep(self._tries.pop(), 0)

    def results(self) -> dict[str, Any]:
        """All results that this process has used or measured, as JSON."""
        return dict(self._kept)

    def _is_known(self, name: str, codec: Codec[Any]) -> bool:
        """Whether the file has such a result, which then is this process's own."""
        assert self.file is not None
        results = {} if self._is_anew else self._read()
        if name not in results:
            return False
        try:
            self._values[name] = codec.from_json(results[name])
        except (ValueError, TypeError, LookupError) as fault:
            self._warn("%s: %r is no result: measured again (%s)", self.file, name, fault)
            return False
        self._kept[name] = results[name]
        return True

    def _read(self) -> dict[str, Any]:
        """The results in the file now."""
        assert self.file is not None
        try:
            return _parse(self.file, self.facts)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as fault:
            self._warn("%s cannot be read: measured again (%s)", self.file, fault)
            return {}

    def _keep(self, name: str, value: Any) -> None:
        """Add a result to the file."""
        assert self.file is not None
        self._kept[name] = value
        try:
            is_new = not self.file.exists()
            results = {**self._read(), **self._kept}
            write_whole(self.file, _file_text(self.facts, results).encode())
            if is_new:
                # Their models, schemes or versions are hardly used any more.
                remove_oldest(self.file.parent.glob("*.json"), MAX_FILES)
        except OSError as fault:
            self._warn("%s cannot be written: the next start measures again (%s)", self.file, fault)

    def _warn(self, text: str, *what: object) -> None:
        """Once: one fault of the disk shows in many places."""
        if not self._is_warned:
            self._is_warned = True
            log.warning(text, *what)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """One process at a time measures, while this one waits no longer than LOCK_SECONDS."""
        if self._is_locked:  # by a measurement of which this is a part
            yield
            return
        stream = _open_lock(folder)
        self._is_locked = True
        try:
            if stream is not None:
                _wait_for(stream)
            yield
        finally:
            self._is_locked = False
            if stream is not None:
                os.close(stream)  # which unlocks


def broken_files(home: Path) -> list[Path]:
    """Stored measurements that cannot be read, and unfinished files of an interrupted start."""
    found = []
    for file in sorted((home / FOLDER).glob("*.json")):
        try:
            _parse(file, None)
        except FileNotFoundError:  # removed meanwhile
            continue
        except (OSError, ValueError, RecursionError):
            found.append(file)
    return [*found, *sorted((home / FOLDER).glob(".*.tmp"))]


def _parse(file: Path, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The results in a file; ValueError when it has none, or those of other facts."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has over {MAX_BYTES} bytes")
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise ValueError("it has no results")
    if not isinstance(content.get("facts"), dict):
        raise ValueError("it does not name its facts")
    if facts is not None and content["facts"] != json.loads(json.dumps(facts)):
        raise ValueError("its facts are other ones")
    results: dict[str, Any] = content["results"]
    return results


def _file_text(facts: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """JSON with a line for each fact and each result, for people to read."""
    parts = []
    for name, values in (("facts", facts), ("results", results)):
        lines = (f"  {json.dumps(key)}: {json.dumps(values[key])}" for key in sorted(values))
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _open_lock(folder: Path) -> int | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # the write of the results logs the reason


def _wait_for(stream: int) -> None:
    """Lock as soon as the lock is free; go on without it if that takes too long."""
    end = time.monotonic() + LOCK_SECONDS
    is_said = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:  # a folder on a network may know no locks
            return
        if time.monotonic() > end:
            log.warning("another worker has been measuring for %.0f s: not waiting", LOCK_SECONDS)
            return
        if not is_said:
            is_said = True
            log.info("waiting for another worker on this machine, which measures")
        time.sleep(POLL_SECONDS)

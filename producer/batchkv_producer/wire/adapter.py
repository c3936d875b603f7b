"""Adapters by their names: how a model with an adapter is called, and where its files are.

A batch names an adapter, never a folder. A worker's own table says in which folder the files of
that name are. A model with an adapter is called ``MODEL@NAME``: in the batch, in the name of the
queue and in results. Repositories of Hugging Face have no ``@`` in their names, folders may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.errors import UsageError

MAX_FOLDER_CHARS = 1024
MAX_ADAPTERS = 64  # of one worker, which keeps all of them in memory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NEXT = re.compile(r",(?=[A-Za-z0-9][A-Za-z0-9._-]{0,63}=)")  # a folder may have a comma


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by its name. ``folder`` has its files on this machine; "" is not known."""

    name: str
    folder: str = ""

    def __post_init__(self) -> None:
        if not is_adapter_name(self.name):
            raise UsageError(
                f"the adapter's name {self.name[:80]!r} must have 1 to 64 letters, digits, dots, "
                "dashes and underscores, and begin with a letter or a digit"
            )
        if len(self.folder) > MAX_FOLDER_CHARS or not self.folder.isprintable():
            raise UsageError(
                f"the folder of adapter {self.name} must have at most {MAX_FOLDER_CHARS} "
                "characters that can be printed"
            )

    def __str__(self) -> str:
        return f"{self.name}={self.folder}" if self.folder else self.name

    @property
    def path(self) -> Path:
        """The folder as a path. Raises UsageError for ``~name`` of an unknown user."""
        try:
            return Path(self.folder).expanduser()
        except RuntimeError as fault:
            raise UsageError(f"the folder of adapter {self}: {fault}") from fault


def is_adapter_name(text: str) -> bool:
    """True for a valid name of an adapter."""
    return _NAME.fullmatch(text) is not None


def parse_adapter(text: str) -> Adapter:
    """``NAME`` or ``NAME=FOLDER``. Raises UsageError."""
    name, sign, folder = text.strip().partition("=")
    if sign and not folder.strip():
        raise UsageError(f"adapter {name.strip()[:80]} has no folder after the =")
    return Adapter(name.strip(), folder.strip())


def parse_adapters(text: str) -> tuple[Adapter, ...]:
    """``NAME=FOLDER,NAME=FOLDER``, each name once, each with its folder. Raises UsageError."""
    return checked_adapters(parse_adapter(item) for item in _NEXT.split(text) if item.strip())


def checked_adapters(adapters: Iterator[Adapter]) -> tuple[Adapter, ...]:
    """The adapters of one worker. Raises UsageError."""
    found = {}
    for adapter in adapters:
        if not adapter.folder:
            raise UsageError(f"adapter {adapter.name} needs its folder: NAME=FOLDER")
        if adapter.name in found:
            raise UsageError(f"adapter {adapter.name} is named twice")
        found[adapter.name] = adapter
    if len(found) > MAX_ADAPTERS:
        raise UsageError(f"there are {len(found)} adapters; a worker serves at most {MAX_ADAPTERS}")
    return tuple(found.values())


def served_name(model: str, adapter: str) -> str:
    """The name of a model with an adapter; ``adapter`` "" is none. It names the queue."""
    return f"{model}@{adapter}" if adapter else model


def split_name(served: str) -> tuple[str, str]:
    """A served name as (model, adapter). The adapter is "" if the name cannot have one."""
    model, _, adapter = served.rpartition("@")
    if not model.rstrip("/") or not is_adapter_name(adapter):
        return served, ""
    return model, adapter


def split_here(served: str) -> tuple[str, str]:
    """The same on this machine: a folder of that name is a model without an adapter."""
    return (served, "") if _is_folder(served) else split_name(served)


def with_adapter(model: str, adapter: str) -> str:
    """The served name of ``model`` with ``adapter``. Raises UsageError if it means something else.

    "" for ``adapter`` leaves the name as it is.
    """
    if not adapter:
        return model
    if (named := split_here(model)[1]) and named != adapter:
        raise UsageError(f"{model} names adapter {named} already: name one, {named} or {adapter}")
    served = model if named else served_name(model, adapter)
    if _is_folder(served):
        raise UsageError(
            f"adapter {adapter} of {model} would be called {served}, and a folder has that name: "
            "give the adapter another name"
        )
    return served


def _is_folder(name: str) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (RuntimeError, OSError, ValueError):  # an unknown ~user; a name too long or with a NUL
        return False

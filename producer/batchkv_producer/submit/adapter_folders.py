"""The folders of adapters on this machine: those that the user names, and BATCHKV_ADAPTERS.

They matter here for two things only: the fingerprint of a batch's adapter, and the workers that
``run`` and ``ask`` start. No folder is sent to the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.wire.adapter import Adapter, parse_adapters

_GIVEN: ContextVar[Adapter | None] = ContextVar("adapter", default=None)


@contextmanager
def given(adapter: Adapter | None) -> Iterator[None]:
    """Inside, the folder of this adapter is known, if it has one."""
    token = _GIVEN.set(adapter)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def folder_of(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """The folder of an adapter on this machine, or "". Raises UsageError for a wrong variable."""
    adapter = _GIVEN.get()
    if adapter is not None and adapter.name == name and adapter.folder:
        return adapter.folder
    known = parse_adapters(environ.get(BY_NAME["adapters"].variable, ""))
    return next((each.folder for each in known if each.name == name), "")

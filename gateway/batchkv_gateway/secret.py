"""The secret that signs webhooks, as Standard Webhooks writes it: ``whsec_`` and base64.

It comes from the variable ``BATCHKV_WEBHOOK_SECRET``, or from the file that
``BATCHKV_WEBHOOK_SECRET_FILE`` names. It is never a flag, because all users of a machine can see
its command lines.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from batchkv_producer.errors import UsageError

VARIABLE = "BATCHKV_WEBHOOK_SECRET"
PREFIX = "whsec_"
MIN_BYTES, MAX_BYTES = 24, 64
_MAX_FILE_BYTES = 1024
_EXAMPLE = f"make one with `echo {PREFIX}$(openssl rand -base64 32)`"


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The secret's bytes; empty if it is not set. Raises UsageError for a wrong one."""
    text, path = environ.get(VARIABLE, "").strip(), environ.get(f"{VARIABLE}_FILE", "").strip()
    if text and path:
        raise UsageError(f"{VARIABLE} and {VARIABLE}_FILE are both set: keep one")
    if path:
        return _decoded(_closed_file(path), f"{VARIABLE}_FILE")
    return _decoded(text, VARIABLE) if text else b""


def _decoded(text: str, name: str) -> bytes:
    try:
        found = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if not text.startswith(PREFIX) or not MIN_BYTES <= len(found) <= MAX_BYTES:
        raise UsageError(
            f"{name} must be {PREFIX} and {MIN_BYTES} to {MAX_BYTES} bytes in base64: {_EXAMPLE}"
        )
    return found


def _closed_file(path: str) -> str:
    """The text of a file that others can neither read nor write."""
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_FILE_BYTES)
    except OSError as fault:
        raise UsageError(f"{VARIABLE}_FILE names {path}: {fault.strerror}") from fault
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(
            f"{VARIABLE}_FILE names {path}, and others may open it: `chmod 600` closes it"
        )
    return content.decode("ascii", "replace").strip()

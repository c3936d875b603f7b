"""Names of stored blocks: ``<64 hex digits of the key>.<kind>``, the same in every tier.

A key already stands for namespace, tenant and all tokens up to the block's end, so a name needs
nothing more. Names are checked on the way into a tier and on the way out: one that is not of this
form is a foreign object, and nobody deletes those.
"""

from __future__ import annotations

import re

from batchkv_cache_store.header import Kind

_NAME = re.compile(r"[0-9a-f]{64}\.(kv|window|state)")


def block_name(key: bytes, kind: Kind) -> str:
    """The name of the block with this 32-byte key; ValueError for another length."""
    return checked(f"{key.hex()}.{kind}")


def is_block_name(text: str) -> bool:
    """Is this the name of a block?"""
    return _NAME.fullmatch(text) is not None


def checked(name: str) -> str:
    """The name itself; ValueError when it is none."""
    if not is_block_name(name):
        raise ValueError(f"not the name of a block: {name!r}")
    return name

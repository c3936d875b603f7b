"""Names of a tier's objects: ``<64 hex digits>.<kind>``, the same in every tier.

``<key>.kv``, ``.window`` and ``.state`` are blocks. The key is a hash of namespace, tenant and all
tokens up to the block's end, so a name needs no other part. ``<namespace>.manifest`` is no block.
It describes its namespace in plain JSON (``manifests``).

Names are checked on the way into a tier and on the way out. An object with another name is foreign,
and batchkv never deletes it.
"""

from __future__ import annotations

import re

from batchkv_cache_store.blocks.header import Kind

MANIFEST = "manifest"

_BLOCK = re.compile(r"[0-9a-f]{64}\.(kv|window|state)")
_MANIFEST = re.compile(rf"[0-9a-f]{{64}}\.{MANIFEST}")


def block_name(key: bytes, kind: Kind) -> str:
    """The name of the block with this 32-byte key; ValueError for another length."""
    return checked(f"{key.hex()}.{kind}")


def manifest_name(namespace: bytes) -> str:
    """The name of the manifest with this 32-byte digest; ValueError for another length."""
    return checked(f"{namespace.hex()}.{MANIFEST}")


def is_block_name(text: str) -> bool:
    """Whether this is the name of a block."""
    return _BLOCK.fullmatch(text) is not None


def is_manifest_name(text: str) -> bool:
    """Whether this is the name of a manifest."""
    return _MANIFEST.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether this is the name of a block or a manifest."""
    return is_block_name(text) or is_manifest_name(text)


def digest_of(name: str) -> bytes:
    """The 32 bytes in a name: a block's key, or a namespace."""
    return bytes.fromhex(name.partition(".")[0])


def kind_of(name: str) -> str:
    """The kind in a name: a kind of block, or ``manifest``."""
    return name.partition(".")[2]


def checked(name: str) -> str:
    """The name itself; ValueError if it is not of the right form."""
    if not is_name(name):
        raise ValueError(f"not the name of a block or a manifest: {name!r}")
    return name

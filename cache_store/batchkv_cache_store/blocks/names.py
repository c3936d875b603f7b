"""Names of what a tier holds: ``<64 hex digits>.<kind>``, the same in every tier.

``<key>.kv``, ``.window`` and ``.state`` are blocks. A key already stands for namespace, tenant and
all tokens up to the block's end, so a name needs nothing more. ``<namespace>.manifest`` is no
block: it says in plain JSON what its namespace is of (``manifests``).

Names are checked on the way into a tier and on the way out: one that is not of this form is a
foreign object, and nobody deletes those.
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
    """The name of the manifest whose 32-byte digest this is; ValueError for another length."""
    return checked(f"{namespace.hex()}.{MANIFEST}")


def is_block_name(text: str) -> bool:
    """Is this the name of a block?"""
    return _BLOCK.fullmatch(text) is not None


def is_manifest_name(text: str) -> bool:
    """Is this the name of a manifest?"""
    return _MANIFEST.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Is this the name of anything that is ours?"""
    return is_block_name(text) or is_manifest_name(text)


def digest_of(name: str) -> bytes:
    """The 32 bytes that a name stands for: a block's key, or a namespace."""
    return bytes.fromhex(name.partition(".")[0])


def kind_of(name: str) -> str:
    """A kind of block, or ``manifest``."""
    return name.partition(".")[2]


def checked(name: str) -> str:
    """The name itself; ValueError when it is none."""
    if not is_name(name):
        raise ValueError(f"not the name of a block or a manifest: {name!r}")
    return name

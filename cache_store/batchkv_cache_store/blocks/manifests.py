"""Manifests in a tier describe a namespace (model, scheme, dtype ...) for people.

The object ``<namespace>.manifest`` is the canonical JSON text of ``keys.namespace``. Its SHA-256 is
its name, so it needs no seal. Its writer can still choose any content.
"""

from __future__ import annotations

import json

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.keys import Manifest, manifest_text, namespace

MAX_MANIFEST_BYTES = 64 * 1024


def encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    """(digest of the namespace, bytes to store); ValueError for more than 64 KiB."""
    text = manifest_text(manifest)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(text):,} bytes; at most {MAX_MANIFEST_BYTES:,}")
    return namespace(manifest), text


def decode_manifest(data: Buffer, digest: bytes) -> Manifest | None:
    """The manifest with this digest; None if these bytes are not exactly it."""
    text = bytes(data[: MAX_MANIFEST_BYTES + 1])
    if len(text) > MAX_MANIFEST_BYTES:
        return None
    try:
        manifest = json.loads(text)
        is_right = _is_manifest(manifest) and encode_manifest(manifest) == (digest, text)
    except (ValueError, RecursionError):
        return None
    return manifest if is_right else None


def _is_manifest(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(field, str | int)
        or (isinstance(field, list) and all(isinstance(item, str) for item in field))
        for field in value.values()
    )

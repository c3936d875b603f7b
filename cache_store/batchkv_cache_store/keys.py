"""Keys of cached prefix blocks. Blocks with equal keys are exchangeable.

A *namespace* is the SHA-256 of a canonical manifest. The manifest contains everything that changes
the bits of a block (weights, RoPE, KV scheme, dtype, block size ...), and nothing that two machines
may choose differently. In a namespace, the blocks of one prompt form a chain::

    k0  = HMAC-SHA256(tenant salt, namespace)
    k_i = SHA-256(k_{i-1} || tokens of block i as little-endian u32 || length of extra || extra)

So a key names the block's tokens *and* all tokens before them. Keys are 32 bytes and equal on every
machine, process and Python version. The default salt is empty. Tenants that must not learn from
each other's cache hits need salts of their own. A row may have a salt, too (``own_root``). It is
not secret: whoever submits over the gateway cannot choose it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from array import array
from collections.abc import Sequence

KEY_BYTES = 32
BLOCK_TOKENS = 256

Manifest = dict[str, "str | int | list[str]"]


def manifest_text(manifest: Manifest) -> bytes:
    """The canonical form of a manifest: JSON in ASCII, fields sorted by name."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")


def namespace(manifest: Manifest) -> bytes:
    """Digest of a manifest, independent of the order of its fields."""
    return hashlib.sha256(manifest_text(manifest)).digest()


def root_key(namespace_digest: bytes, salt: bytes = b"") -> bytes:
    """The key before the first block of a chain, for one tenant's salt."""
    return hmac.new(salt, namespace_digest, hashlib.sha256).digest()


def own_root(root: bytes, salt: str | None) -> bytes:
    """The root of the chains of rows with this salt. Other rows have no block in common with them.

    Rows without a salt have the root itself.
    """
    if salt is None:
        return root
    return next_key(root, (), b"salt " + salt.encode("utf-8", "surrogatepass"))


def next_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """Key of the block that holds ``tokens`` after the prefix named by ``parent``.

    ``extra``: anything else that the block depends on (for example an image's digest). Raises
    ValueError for token ids that do not fit into a u32.
    """
    return _key(parent, _packed(tokens), struct.pack("<I", len(extra)) + extra)


def _key(parent: bytes, packed: bytes, extra: bytes) -> bytes:
    return hashlib.sha256(parent + packed + extra).digest()


def _packed(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian u32."""
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError) as fault:
        raise ValueError(f"token ids must be whole numbers in [0, 2**32): {fault}") from fault
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        words.byteswap()
    return words.tobytes()


def chain(root: bytes, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Keys of all full blocks of ``tokens``, first to last; a partial last block has no key."""
    keys: list[bytes] = []
    parent, nothing = root, struct.pack("<I", 0)
    num_bytes = 4 * block_tokens
    packed = _packed(tokens[: len(tokens) // block_tokens * block_tokens])
    for start in range(0, len(packed), num_bytes):
        parent = _key(parent, packed[start : start + num_bytes], nothing)
        keys.append(parent)
    return keys

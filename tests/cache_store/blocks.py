"""Small blocks for tests: of any key, any tokens, any size."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from batchkv_cache_store.blocks.block import Block, Expected, Kind, Tensor, encode, join
from batchkv_cache_store.blocks.seal import Sealer
from batchkv_cache_store.keys import namespace, next_key, root_key

NAMESPACE = namespace({"format": 1, "model": "test"})
ROOT = root_key(NAMESPACE)
TOKENS = 4  # of one block here
PLAIN = Sealer()


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as a block's header holds them."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def make_block(
    tokens: Sequence[int] = (1, 2, 3, 70_000),
    parent: bytes = ROOT,
    kind: Kind = Kind.KV,
    index: int = 0,
    num_bytes: int = 24,
) -> Block:
    """A block with two tensors of ``num_bytes`` (a multiple of 4) and 3 bytes."""
    data = bytes(index_ % 251 for index_ in range(num_bytes))
    return Block(
        namespace=NAMESPACE,
        key=next_key(parent, tokens),
        parent=parent,
        index=index,
        kind=kind,
        tokens=packed(tokens),
        tensors=(
            Tensor(0, "keys.codes", "uint32", (1, num_bytes // 4), data),
            Tensor(-1, "stack", "uint8", (3,), b"\xff\x00\x7f"),
        ),
        writer="mac.local",
        time_ms=1_700_000_000_000,
    )


def expected(block: Block) -> Expected:
    """The expectation of a caller who wants this block."""
    return Expected(block.namespace, block.key, block.kind, block.tokens)


def encoded(block: Block, sealer: Sealer = PLAIN) -> bytes:
    """The block as a tier stores it."""
    return join(encode(block, sealer))


def chain_of(prompt: Sequence[int], kind: Kind = Kind.KV, num_bytes: int = 24) -> list[Block]:
    """Blocks of four tokens each for a prompt."""
    blocks: list[Block] = []
    parent = ROOT
    for start in range(0, len(prompt) - TOKENS + 1, TOKENS):
        tokens = prompt[start : start + TOKENS]
        block = make_block(tokens, parent, kind, len(blocks), num_bytes)
        blocks.append(block)
        parent = block.key
    return blocks

"""Partial blocks: the tokens that prompts have in common after their last common block.

A block has 256 tokens, so prompts with 600 tokens in common share two blocks. The other 88 would be
computed for each of them. But the keys and values of a token do not depend on the tokens after it:
what is known of a block that begins with the same tokens serves, up to where the prompts differ.

A prompt has a *partial key* for every PARTIAL_TOKENS tokens. Like a block's key it names all tokens
up to there. Partial blocks never leave this worker, so their keys are in no namespace and no store.
A partial block is cut out of a block in memory that begins with it. A prompt's last tokens fill no
block. They are stored as a partial block of their own if a row that waits begins with them.

Finer keys would find a few tokens more, and take the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchkv_cache_store.keys import BLOCK_TOKENS, chain, next_key

PARTIAL_TOKENS = 16
PER_BLOCK = BLOCK_TOKENS // PARTIAL_TOKENS
MOST = PER_BLOCK - 1  # partial keys within a block; the one at its end is never needed


def partial_keys(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """A key for every PARTIAL_TOKENS of these tokens; ``root`` is that of their blocks."""
    return chain(next_key(root, (), b"partial"), tokens, PARTIAL_TOKENS)


def within(keys: Sequence[bytes], block: int) -> Sequence[bytes]:
    """Of a prompt's partial keys those within its block of this number, MOST at most."""
    first = block * PER_BLOCK
    return keys[first : first + MOST]


class PartialBlocks:
    """Which blocks in memory begin with a partial block. The caller holds the blocks.

    All of them are known, because any may go first: whoever knows 240 tokens also knows 16.
    """

    def __init__(self) -> None:
        self._sources: dict[bytes, dict[bytes, None]] = {}  # keys of blocks by partial key
        self._keys: dict[bytes, Sequence[bytes]] = {}  # partial keys by the block's key

    def __len__(self) -> int:
        """The number of partial blocks that are known."""
        return len(self._sources)

    def add(self, block: bytes, keys: Sequence[bytes]) -> None:
        """A block came that begins with these partial blocks, the shortest first."""
        if keys and block not in self._keys:
            self._keys[block] = keys
            for key in keys:
                self._sources.setdefault(key, {})[block] = None

    def drop(self, block: bytes) -> None:
        """A block has gone."""
        for key in self._keys.pop(block, ()):
            blocks = self._sources[key]
            del blocks[block]
            if not blocks:
                del self._sources[key]

    def clear(self) -> None:
        """All blocks have gone."""
        self._sources.clear()
        self._keys.clear()

    def source(self, key: bytes) -> bytes | None:
        """The key of a block that begins with this partial block; None: none does."""
        return next(iter(self._sources.get(key, ())), None)

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many tokens of a block are known, by its partial keys; a multiple of 16."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._sources:
                return count * PARTIAL_TOKENS
        return 0

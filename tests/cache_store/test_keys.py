"""Block keys: equal on all machines, different for everything that changes a block."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from batchkv_cache_store.keys import BLOCK_TOKENS, chain, namespace, next_key, root_key

MANIFEST = {"format": 1, "weights": "ab" * 32, "scheme": ["affine8/g64"] * 2, "block": 256}


def test_golden_vectors() -> None:
    """The keys of a known prompt are those recorded here; they may never change in a format."""
    root = root_key(namespace(dict(MANIFEST)))
    keys = chain(root, list(range(512)))
    assert namespace(dict(MANIFEST)).hex() == GOLDEN_NAMESPACE
    assert [key.hex() for key in keys] == GOLDEN_KEYS


GOLDEN_NAMESPACE = "467abf534bc6f9d13353962a56841349e3a793659228a04974c77843a558ad59"
GOLDEN_KEYS = [
    "42eae4d80d016839cb6773f0b69afd81f619be55a615ffdb4147d039385f4dc1",
    "a74d341b1a26475fe3ae4aab1b284f817a91e0c7a6d5dda195f4cb2f0a1a062c",
]


def test_equal_in_another_process() -> None:
    """A process with another hash seed computes the same keys."""
    code = (
        "from batchkv_cache_store.keys import *;"
        "print(chain(root_key(namespace({'a': 'b', 'c': 1})), list(range(256)))[0].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@pytest.mark.parametrize("field", list(MANIFEST))
def test_every_manifest_field_counts(field: str) -> None:
    """Changing any one field changes the namespace, and with it every key."""
    changed = {**MANIFEST, field: "other"}
    assert namespace(changed) != namespace(dict(MANIFEST))


def test_salt_separates_tenants() -> None:
    """Tenants with different salts share no key."""
    digest = namespace(dict(MANIFEST))
    tokens = list(range(600))
    assert not set(chain(root_key(digest, b"a"), tokens)) & set(chain(root_key(digest), tokens))


def test_a_token_changes_its_block_and_all_after_it() -> None:
    """Keys before the changed token are the same; all from its block on differ."""
    root = root_key(b"n")
    tokens = list(range(5 * BLOCK_TOKENS))
    other = list(tokens)
    other[2 * BLOCK_TOKENS + 7] += 1
    same = [a == b for a, b in zip(chain(root, tokens), chain(root, other), strict=True)]
    assert same == [True, True, False, False, False]


def test_only_full_blocks_have_keys() -> None:
    """A partial block at the end has no key; 0 to 255 tokens have none at all."""
    root = root_key(b"n")
    assert [len(chain(root, [1] * n)) for n in (0, 255, 256, 511, 512)] == [0, 0, 1, 1, 2]


def test_extra_is_length_prefixed() -> None:
    """Tokens and extra are separated: moving bytes between them changes the key."""
    parent = root_key(b"n")
    assert next_key(parent, [1, 2]) != next_key(parent, [1], b"\x02\x00\x00\x00")
    assert next_key(parent, [1], b"") != next_key(parent, [1], b"\x00")


def test_wide_token_ids_are_kept_apart() -> None:
    """Ids are four bytes: 65 and 65 + 256 and 65 + 65536 are different tokens; more is refused."""
    parent = root_key(b"n")
    assert len({next_key(parent, [65 + shift]) for shift in (0, 256, 65536)}) == 3
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="token ids"):
            next_key(parent, [bad])


def test_random_prompts_do_not_collide() -> None:
    """Keys of many random blocks are all different."""
    rng = random.Random(3)
    parent = root_key(b"n")
    keys = {next_key(parent, [rng.randrange(50_000) for _ in range(8)]) for _ in range(5000)}
    assert len(keys) == 5000

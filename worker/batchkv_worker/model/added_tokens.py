"""The tokens that a tokenizer has beside its vocabulary: markers, and tokens without a text."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Facts (``content``, ``special``) by token. Empty for a tokenizer that does not list them."""
    with suppress(Exception):  # some kinds have the attribute, and raise when it is read
        return dict(tokenizer.added_tokens_decoder)
    return {}

"""A request's canonical text, which producer and worker compare to find common prefixes."""

from __future__ import annotations

import base64
import json

from batchkv_producer.wire.job import Request

# A prompt of token ids has this head, and then four characters for each token. So two of them share
# as many characters as they share tokens, and nothing with a text.
_TOKENS_HEAD = "\x1etokens\x1f"
_ID_BYTES = 3  # base64 writes them as four characters
TOKEN_CHARS = 4


def canonical_text(request: Request) -> str:
    """The request's text in the order in which a template renders it."""
    if request.prompt_tokens is not None:
        raw = b"".join(token.to_bytes(_ID_BYTES, "big") for token in request.prompt_tokens)
        return _TOKENS_HEAD + base64.b64encode(raw).decode("ascii")
    if request.prompt is not None:
        # A style alone changes neither text nor order, because a template's head is the same for
        # all.
        before = (
            () if request.system is None else ("\x1esystem\x1f", request.system, "\x1euser\x1f")
        )
        return "".join((*before, request.prompt))
    parts = [] if request.tools is None else [json.dumps(request.tools, ensure_ascii=False)]
    for message in request.messages or ():
        parts += ("\x1e", message["role"], "\x1f", message["content"])
        if "tool_calls" in message:
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "".join(parts)


def num_shared_tokens(shared_bytes: int) -> int:
    """Tokens in the first bytes of the canonical text of a prompt of token ids."""
    return max(0, shared_bytes - len(_TOKENS_HEAD)) // TOKEN_CHARS

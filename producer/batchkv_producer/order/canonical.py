"""A request's canonical text, which producer and worker compare to find common prefixes."""

from __future__ import annotations

import json

from batchkv_producer.wire.job import Request


def canonical_text(request: Request) -> str:
    """The request's text in the order in which a template renders it."""
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

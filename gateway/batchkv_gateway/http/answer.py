"""Answers in JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def json_answer(value: dict[str, Any]) -> Response:
    """An answer in ASCII, which any text can be written in, also half of a surrogate pair."""
    text = json.dumps(value, separators=(",", ":"))
    return Response(text.encode("ascii"), media_type="application/json")

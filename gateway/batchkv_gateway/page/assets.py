"""The page's files, which are part of the package. They are read once, when the gateway starts."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing is loaded from elsewhere, nothing in the document itself runs, and no text becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # may be kept, and is asked for again by its ETag
}


def _contents() -> dict[str, bytes]:
    """The path below ``assets`` -> the content of each file."""
    root = resources.files("batchkv_gateway.page") / "assets"
    found = {}
    for folder in ("", "views"):
        for file in (root / folder if folder else root).iterdir():
            if file.is_file() and file.name.rpartition(".")[2] in MEDIA_TYPES:
                found[f"{folder}/{file.name}" if folder else file.name] = file.read_bytes()
    return found


class Assets:
    """The handlers of ``/`` and of the files below ``/page/``."""

    def __init__(self) -> None:
        self._contents = _contents()
        self._tags = {
            name: f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            for name, content in self._contents.items()
        }

    def routes(self) -> list[Route]:
        """One route for each file."""
        names = sorted(self._contents.keys() - {INDEX})
        paths = {"/": INDEX, **{f"/page/{name}": name for name in names}}
        return [Route(path, self._handler(name), methods=["GET"]) for path, name in paths.items()]

    def _handler(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            headers = {**HEADERS, "etag": self._tags[name]}
            known = request.headers.get("if-none-match", "")
            if self._tags[name] in (each.strip() for each in known.split(",")):
                return Response(status_code=304, headers=headers)
            kind = MEDIA_TYPES[name.rpartition(".")[2]]
            return Response(self._contents[name], headers=headers, media_type=kind)

        return answer

"""Opens the page in this machine's browser, for `serve --open`, signed in if the gateway has keys.

A ticket in the command line of a browser could be read by other users of the machine. So the
browser opens a file that only its user can read, and this file leads to the page. The ticket is
behind the #, which no server and no log sees.
"""

from __future__ import annotations

import os
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path

from batchkv_gateway.keys.sessions import TICKET_SECONDS, Sessions
from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.cli.shared import say

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>batchkv</title>
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={url}">
<p><a href="{url}">Go to the page</a></p>
"""


def open_page(
    url: str,
    keys: KeyStore,
    sessions: Sessions,
    folder: Path,
    browse: Callable[[str], bool] = webbrowser.open,
) -> None:
    """Open the page, and return at once. If there is no browser, it says so on standard error."""

    def run() -> None:
        for old in folder.glob("open-*.html"):
            _delete(old)  # of a gateway that was stopped within the minute
        if not keys.has_any():
            is_open = browse(url)
        else:
            file = _leading_file(f"{url}#ticket={sessions.make_ticket()}", folder)
            timer = threading.Timer(TICKET_SECONDS, _delete, [file])
            timer.daemon = True
            timer.start()
            is_open = browse(file.as_uri())
        if not is_open:
            say(f"no browser could be started: open {url}")

    threading.Thread(target=run, name="open-page", daemon=True).start()


def _leading_file(url: str, folder: Path) -> Path:
    """A file that leads a browser to the page. Only its owner can read it."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="open-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_PAGE.format(url=escape(url, quote=True)))
    return Path(name)


def _delete(file: Path) -> None:
    with suppress(OSError):
        file.unlink()

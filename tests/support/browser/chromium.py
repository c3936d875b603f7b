"""Debian's Chromium without a window, driven over a pipe by its own protocol (DevTools).

No package is needed. Commands and events are JSON objects that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """The browser of this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab. ``problems`` are the errors and warnings of its console, and failed requests."""

    def __init__(self, write: Callable[[bytes], None], read: Callable[[], bytes]) -> None:
        self._write, self._read = write, read
        self._last_id, self._session = 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        command: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        self._write(json.dumps(command).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            message = json.loads(self._read())
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message["error"])
                found: dict[str, Any] = message["result"]
                return found
            self._hear(message)
        raise TimeoutError(f"the browser does not answer {method}")

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said = details.get("exception", {}).get("description", details.get("text"))
                self.problems.append(f"exception: {said}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                said = " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
                self.problems.append(f"console.{params['type']}: {said}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Promises are awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if self.run(f"(() => {{ try {{ return Boolean({script}) }} catch {{}} }})()"):
                    return
            except AssertionError:  # the page is just being exchanged
                pass
            time.sleep(0.05)
        raise TimeoutError(f"not true within {seconds} s: {script}; {self.text()[:500]}")

    def text(self) -> str:
        """The text of the document as a viewer sees it."""
        return str(self.run("document.body.innerText"))

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, by its name in JavaScript."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        facts = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 * shift,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False,
             media: str = "screen") -> None:  # fmt: skip
        """Set the window's size, the colours and the medium."""
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if is_phone else 1, mobile=is_phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def picture(self, file: Path) -> None:
        """Write a picture of the whole document."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000)}
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True,
            clip={**clip, "scale": 1},
        )  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A tab of a browser with an empty profile in this folder."""
    found = program()
    assert found is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def arrange() -> None:
        # The browser reads from descriptor 3 and writes to 4. The pipes may have these numbers.
        first, second = os.dup(to_read), os.dup(from_write)
        spare_first, spare_second = os.dup(first), os.dup(second)
        os.dup2(max(first, spare_first), 3)
        os.dup2(max(second, spare_second), 4)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,
            preexec_fn=arrange,
        )
    os.close(to_read)
    os.close(from_write)
    buffer = bytearray()

    def write(data: bytes) -> None:
        os.write(to_write, data)

    def read() -> bytes:
        while (end := buffer.find(b"\0")) < 0:
            piece = os.read(from_read, 1 << 20)
            assert piece, (folder / "chromium.log").read_text()
            buffer.extend(piece)
        message = bytes(buffer[:end])
        del buffer[: end + 1]
        return message

    try:
        yield Tab(write, read)
    finally:
        os.close(to_write)
        os.close(from_read)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)

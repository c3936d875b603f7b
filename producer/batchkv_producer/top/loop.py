"""The loop of ``batchkv top``: read, draw, wait for a key."""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live

from batchkv_producer.errors import BatchkvError
from batchkv_producer.top.frame import Screen, draw
from batchkv_producer.top.keys import Key, Keys
from batchkv_producer.top.view import View

REFRESH_SECONDS = 2.0
MESSAGE_SECONDS = 6.0

Change = Callable[[str], None]  # drains or resumes the worker of a name


class Top:
    """One run of it. ``read`` returns a view, ``drain`` and ``resume`` change a worker."""

    def __init__(
        self, read: Callable[[], View], drain: Change, resume: Change, console: Console
    ) -> None:
        self._read = read
        self._changes: dict[Key, tuple[Change, str]]
        self._changes = {"drain": (drain, "takes no more rows"), "resume": (resume, "takes rows")}
        self._console = console
        self._view: View | None = None
        self._selected = ""
        self._message, self._message_until = "", 0.0

    def once(self) -> None:
        """Print one frame."""
        size = self._console.size
        self._console.print(draw(self._read(), Screen(size.width, size.height, is_live=False)))

    def run(self) -> None:
        """Draw until a key ends it, or Ctrl-C."""
        keys = Keys()
        try:
            self._view = self._read()  # an error here ends the command: nothing is known yet
            with keys.reading(), Live(console=self._console, screen=True, auto_refresh=False) as on:
                while self._turn(keys, on):
                    self._refresh()
        except KeyboardInterrupt:
            pass

    def _turn(self, keys: Keys, live: Live) -> bool:
        """Draw, and handle keys until the next reading is due. False: the user ends it."""
        due = time.monotonic() + REFRESH_SECONDS
        while True:
            live.update(draw(self._shown(), self._screen()), refresh=True)
            left = due - time.monotonic()
            if left <= 0:
                return True
            key = keys.next(left)
            if key == "quit":
                return False
            if key in ("up", "down"):
                self._move(1 if key == "down" else -1)
            elif key is not None:
                self._change(key)
                due = time.monotonic()  # the state has changed

    def _shown(self) -> View:
        assert self._view is not None
        return self._view

    def _refresh(self) -> None:
        """Read again. While the server does not answer, the last view stays."""
        try:
            self._view = self._read()
        except (RedisError, BatchkvError) as fault:
            self._say(f"the server does not answer, trying again: {fault}")

    def _screen(self) -> Screen:
        names = self._names()
        if self._selected not in names:
            self._selected = names[0] if names else ""
        message = self._message if time.monotonic() < self._message_until else ""
        size = self._console.size
        return Screen(size.width, size.height, self._selected, message)

    def _names(self) -> list[str]:
        return [worker.info.name for worker in self._shown().workers]

    def _move(self, step: int) -> None:
        names = self._names()
        if names:
            place = names.index(self._selected) + step
            self._selected = names[max(0, min(place, len(names) - 1))]

    def _change(self, key: Key) -> None:
        """Drain or resume the selected worker, and say what came of it."""
        if not self._selected:
            self._say("there is no worker")
            return
        change, words = self._changes[key]
        try:
            change(self._selected)
        except (RedisError, BatchkvError) as fault:
            self._say(str(fault))
        else:
            self._say(f"{self._selected} {words}")

    def _say(self, text: str) -> None:
        self._message, self._message_until = text, time.monotonic() + MESSAGE_SECONDS

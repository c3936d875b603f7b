"""The progress of loading a model. The loader calls ``report``; ``listening`` sets the receiver.

Without a receiver the reports are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Listener = Callable[[str], object]

_listener: ContextVar[Listener] = ContextVar("listener", default=lambda _: None)
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the block, on this thread, ``listener`` gets each report. It must return at once."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(text: str) -> None:
    """Report the current step, for example ``loading 2.1 of 7.3 GB``."""
    _listener.get()(text)


def amount(num_done: float, total: float) -> str:
    """A text such as ``2.1 of 7.3 GB``, with the unit that fits the total."""
    size, unit = next((pair for pair in _UNITS if total >= pair[0]), (1, "bytes"))
    digits = 1 if size > 1 else 0
    return f"{num_done / size:,.{digits}f} of {total / size:,.{digits}f} {unit}"


def download_bar() -> type[Any]:
    """A tqdm class for a download. Its bars draw nothing and report each step.

    The hub's client makes several bars: some count bytes, and one counts files.
    """
    from tqdm import tqdm

    listener = _listener.get()  # the threads of the download have contexts of their own
    most = 0.0  # bytes; one bar counts received bytes, another one written bytes

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # starts no thread to draw

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "gui": True, "disable": False})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            total = self.total or 0
            if self.unit == "B" and total and self.n > most:
                most = self.n
                listener(f"downloading {amount(min(self.n, total), total)}")
            elif self.unit != "B" and total and not most:
                listener(f"downloading file {min(self.n + 1, total):.0f} of {total:.0f}")

        def refresh(self, *_: object, **__: object) -> None:
            pass

        display = close = refresh

    return Bar

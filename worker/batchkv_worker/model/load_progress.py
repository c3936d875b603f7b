"""How far the loading of a model is: said where it happens, told to whoever builds the engine.

Nobody has to listen: without ``heard`` what is said is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Tell = Callable[[str], object]

_listener: ContextVar[Tell] = ContextVar("listener", default=lambda _: None)
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@contextmanager
def heard(tell: Tell) -> Iterator[None]:
    """Inside, on this thread, ``tell`` gets each text of ``say``; it must return at once."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def say(text: str) -> None:
    """What is being done now, like ``loading 2.1 of 7.3 GB``."""
    _listener.get()(text)


def amount(num_done: float, total: float) -> str:
    """``2.1 of 7.3 GB``: both in the unit of the larger."""
    size, unit = next((pair for pair in _UNITS if total >= pair[0]), (1, "bytes"))
    digits = 1 if size > 1 else 0
    return f"{num_done / size:,.{digits}f} of {total / size:,.{digits}f} {unit}"


def download_bar() -> type[Any]:
    """A bar in tqdm's manner for a download: shown nowhere, each step of it is said.

    The hub's client makes several: those that count bytes, and one that counts files.
    """
    from tqdm import tqdm

    listener = _listener.get()  # threads of the download have contexts of their own
    most = 0.0  # bytes: of those that came, and of those that are written

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that draws

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

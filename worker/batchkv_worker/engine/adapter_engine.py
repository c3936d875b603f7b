"""One loaded model with several adapters: an engine for one of them at a time.

The weights of the model are loaded once. To exchange the adapter, the engine is closed while it has
no row, the arrays of the new adapter are put around the model's layers, and a new engine is built.
Nothing is measured for that: layers of the same shapes cost the same. Keys and values depend on the
adapter, so the prefix memory begins empty. The shared store stays open; its blocks are of a
namespace for each adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from batchkv_producer.wire.maker import Maker
from batchkv_worker.engine.engine import Engine
from batchkv_worker.events import Event, Work
from batchkv_worker.figures.engine import EngineFigures, Progress
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.model.adapters import LoadedAdapter, put_on
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.prefix.shared.access import Access
from batchkv_worker.trace import ENGINE, LOAD

log = logging.getLogger("batchkv.engine")

Build = Callable[[LoadedModel], Engine]


class AdapterEngine:
    """Implements ``events.ExchangesAdapters`` over one model and its adapters. It begins with none.

    ``build`` makes an engine of the model as it is then. ``access`` is closed at the end.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        adapters: Sequence[LoadedAdapter],
        build: Build,
        scheme: str,
        access: Access | None = None,
    ) -> None:
        self._loaded = loaded
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._build = build
        self._access = access
        self._take_off: Undo | None = None
        self.adapter = ""
        makers = {
            name: adapter.on(loaded, name).maker(scheme) for name, adapter in self._adapters.items()
        }
        self.makers = {"": loaded.maker(scheme), **makers}
        self.engine = build(loaded)
        self._is_open = True
        # The engine that counts, and what those before it have counted. One value, because other
        # threads read it.
        self._counting: tuple[Engine | None, EngineFigures] = self.engine, EngineFigures()

    def serve(self, adapter: str) -> None:
        """Exchange the adapter; "" is the model alone. Only while the engine is idle."""
        if adapter == self.adapter:
            return
        assert self.engine.is_idle, "the adapter is exchanged while no row is in the engine"
        ENGINE.enter(LOAD)
        chosen = self._adapters[adapter] if adapter else None
        self._is_open = False
        self._counting = None, (earlier := self.figures())
        self.engine.close()
        if self._take_off is not None:
            self._take_off()
            self._take_off = None
        loaded = self._loaded
        if chosen is not None:
            self._take_off = put_on(loaded.model, chosen)
            loaded = chosen.on(loaded, f"{loaded.name}@{adapter}")
        self.engine = self._build(loaded)
        self._is_open, self.adapter = True, adapter
        self._counting = self.engine, earlier
        log.info("serving %s", loaded.name)

    @property
    def num_slots(self) -> int:
        return self.engine.num_slots

    @property
    def max_in_flight(self) -> int:
        return self.engine.max_in_flight

    @property
    def maker(self) -> Maker:
        return self.makers[self.adapter]

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle

    def add(self, work: Work) -> None:
        self.engine.add(work)

    @property
    def prepares_ahead(self) -> int:
        return self.engine.prepares_ahead

    def prepare(self, work: Work) -> Callable[[], None]:
        return self.engine.prepare(work)

    def cancel(self, job_id: str) -> None:
        self.engine.cancel(job_id)

    def recall(self, job_ids: Sequence[str], count: int) -> list[str]:
        return self.engine.recall(job_ids, count)

    def step(self) -> list[Event]:
        return self.engine.step()

    def rest(self) -> None:
        self.engine.rest()

    def close(self) -> None:
        """Close the engine, and the store behind it."""
        try:
            if self._is_open:
                self.engine.close()
        finally:
            if self._access is not None:
                self._access.close()

    def report(self) -> str:
        return self.engine.report()

    def trouble(self) -> str:
        return self.engine.trouble()

    def has_changed(self) -> bool:
        changed = (adapter.has_changed() for adapter in self._adapters.values())
        return self._loaded.has_changed() or any(changed)

    def figures(self) -> EngineFigures:
        engine, earlier = self._counting
        return earlier if engine is None else engine.figures().after(earlier)

    def progress(self) -> Progress:
        return self.engine.progress()

    def memory_bytes(self) -> int:
        return self.engine.memory_bytes()

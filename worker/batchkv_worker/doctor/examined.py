"""The model that is examined: what its checks hand from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine
    from batchkv_worker.kv.backends.memory_budget import MemoryFacts


@dataclass(slots=True)
class Examined:
    """The model that is examined, once it is loaded."""

    name: str
    scheme: str
    folder: Path  # for the store of prefixes
    engine: Engine | None = None
    facts: MemoryFacts | None = None  # before the model took its own
    seconds: float = 0.0
    break_even: float | None = None  # MB/s from which a stored prefix pays

    @property
    def loaded_engine(self) -> Engine:
        """The engine; there is one when this is asked for."""
        assert self.engine is not None
        return self.engine

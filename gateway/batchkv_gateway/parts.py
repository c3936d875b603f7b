"""The parts of a gateway, which its routes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from redis import Redis

from batchkv_gateway.batches.driver import Driver
from batchkv_gateway.batches.store import Batches
from batchkv_gateway.files.records import Files
from batchkv_gateway.kept_facts import KeptFacts
from batchkv_gateway.keys.quotas import Quotas
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.live.calls import Calls
from batchkv_gateway.metrics.instruments import Instruments
from batchkv_gateway.settings import GatewaySettings
from batchkv_gateway.stopping import Stopping
from batchkv_gateway.worker_history import WorkerHistory


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes of one gateway need. All of it may be used by several threads."""

    connection: Redis
    settings: GatewaySettings
    keys: KeyStore
    quotas: Quotas
    files: Files
    batches: Batches
    driver: Driver
    calls: Calls  # rows of the live lane
    stopping: Stopping
    history: WorkerHistory
    facts: KeptFacts
    instruments: Instruments = field(default_factory=Instruments)

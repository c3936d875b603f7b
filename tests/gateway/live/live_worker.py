"""A worker of live rows that does what a test says: takes a row, sends pieces, ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, decode_job, encode_result
from batchkv_producer.wire.live import Kind, LiveMoves, LiveWrite, TakenRow
from batchkv_producer.wire.maker import ABILITIES
from support.worker_harness import wait_until


@dataclass(slots=True)
class LiveWorker:
    """Signs on for one model when it is made."""

    connection: Redis
    model: str
    numbers: dict[str, int] = field(default_factory=dict)  # of the last write of each row

    def __post_init__(self) -> None:
        key = redis_keys.worker(self.name)
        record = {"birth": "x", "queues": self.queue, "bkv_model": self.model, "bkv_live": 1}
        self.connection.hset(key, mapping={**record, "bkv_abilities": " ".join(ABILITIES)})
        self.connection.sadd(redis_keys.workers(self.queue), key)

    @property
    def name(self) -> str:
        return f"live-worker-of-{self.model}"

    @property
    def queue(self) -> str:
        return redis_keys.queue_name(self.model)

    def take(self) -> tuple[TakenRow, Request]:
        """The next row, once there is one."""
        found: list[TakenRow] = []

        def turn() -> bool:
            _, rows = LiveMoves(self.connection).turn(self.queue, self.name, [], 1, "", ABILITIES)
            found.extend(rows)
            return bool(found)

        wait_until(turn)
        return found[0], decode_job(found[0].pulled.data)

    def send(self, row: TakenRow, kind: Kind, payload: bytes | str) -> None:
        """Send a piece of its answer, or its end."""
        lease = row.pulled.lease
        number = self.numbers[lease.job_id] = self.numbers.get(lease.job_id, 0) + 1
        raw = payload.encode() if isinstance(payload, str) else payload
        lost = LiveMoves(self.connection).write(self.queue, [LiveWrite(lease, kind, number, raw)])
        assert lost == []

    def end(self, row: TakenRow, result: Result) -> None:
        """Send its result."""
        self.send(row, "e", encode_result(result))

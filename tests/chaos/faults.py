"""Which faults a storm brings, in which order and how far apart: a function of the seed alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """``after`` seconds of quiet, then ``kind`` happens to worker number ``worker``.

    ``kill``: kill -9. ``freeze``: SIGSTOP for ``seconds``. ``info``: RQ's own ``rq info``.
    ``server_kill``: kill -9 of the server, which comes back after ``seconds``; ``server_stop`` is
    the same with SIGTERM.
    """

    kind: str
    after: float
    worker: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How many faults of each kind, the mean quiet between two, and how long what is off is off."""

    kills: int
    freezes: int
    server_kills: int
    server_stops: int = 0
    infos: int = 0
    quiet_seconds: float = 0.6
    freeze_seconds: tuple[float, float] = (0.1, 3.5)
    server_seconds: tuple[float, float] = (0.1, 1.5)


def plan(seed: int, weather: Weather, num_workers: int) -> list[Fault]:
    """The faults of a seed."""
    rng = random.Random(seed)
    kinds = ["kill"] * weather.kills + ["freeze"] * weather.freezes + ["info"] * weather.infos
    kinds += ["server_kill"] * weather.server_kills + ["server_stop"] * weather.server_stops
    rng.shuffle(kinds)
    lengths = {"freeze": weather.freeze_seconds}
    faults = []
    for kind in kinds:
        low, high = lengths.get(kind, weather.server_seconds)
        after = round(rng.uniform(0.0, 2 * weather.quiet_seconds), 3)
        seconds = 0.0 if kind in ("kill", "info") else round(rng.uniform(low, high), 3)
        faults.append(Fault(kind, after, rng.randrange(num_workers), seconds))
    return faults


def write_log(path: Path, happened: Sequence[tuple[float, Fault]]) -> None:
    """One line of JSON a fault, with the second at which it happened."""
    lines = [json.dumps({"at": round(at, 3), **asdict(fault)}) for at, fault in happened]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def read_log(path: Path) -> list[Fault]:
    """The faults of a log, as far apart as they were."""
    faults, before = [], 0.0
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        at = record.pop("at")
        faults.append(Fault(**{**record, "after": round(max(0.0, at - before), 3)}))
        before = at
    return faults

"""Sustained load with what Metal had trouble with elsewhere, while tokens are compared.

Reported for MLX on Macs: errors of the GPU under load while a display is awake, kernels that are
wrong only at long contexts, a pool of freed memory that grows with buffers of changing sizes, and
clocks that fall as the machine gets hot. So the same waves of rows are computed again and again:
many lengths up to long contexts, shared prefixes, two compositions, and allocations of changing
sizes between them. Each wave must give the tokens that its first one gave.
"""

from __future__ import annotations

import logging
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_worker.doctor.examined import Examined
from batchkv_worker.doctor.hit_miss import numbers
from batchkv_worker.doctor.model import files_verdict, load_verdict

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine

LENGTHS = (5, 33, 64, 130, 300, 577, 1100, 2050, 4200, 8300)  # of prompts, in turn
SHARED_TOKENS = 256  # with which every other prompt begins, if it is longer
NUM_TOKENS = 24  # of each answer
FIRST_ROWS = 6
WAVES_WANTED = 24
LEAST_WAVES = 4
GROWN_BYTES = 256 * 2**20
GROWN_SHARE = 1.25
SLOWED_SHARE = 0.7
MANY_DIFFER = 0.1  # of a wave's rows, in half precision
CHURN_BYTES = 64 * 2**20
NUM_CHURNED = 24

Step = tuple[str, Callable[[], Verdict | None]]
Answers = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave. Bytes are those after it: in use, kept after freeing, and of the process."""

    kind: str
    seconds: float
    num_rows: int
    num_tokens: int
    num_different: int
    active_bytes: int = 0
    kept_bytes: int = 0
    process_bytes: int = 0


@dataclass(slots=True)
class Record:
    """What happened. ``fault`` ended it; ``notes`` are warnings of the engine, which went on."""

    is_exact: bool = True  # the model computes in float32, where waves are equal to the bit
    waves: list[Wave] = field(default_factory=list)
    fault: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def later(self) -> list[Wave]:
        """All waves of the whole composition but the first quarter, which compiles and warms up."""
        whole = [wave for wave in self.waves if wave.kind == "all"]
        return whole[len(whole) // 4 :]


class _Notes(logging.Handler):
    """Collects what the engine warns of."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(" ".join(record.getMessage().split())[:200])


def steps(request: Mapping[str, Any]) -> Iterator[Step]:
    """Load the model, run the load for the time that was asked for, judge what was seen."""
    name, seconds = str(request["model"]), float(request["seconds"])
    yield "stress: model", partial(_files, name)
    with tempfile.TemporaryDirectory(prefix="batchkv-doctor-") as folder:
        examined = Examined(name, str(request.get("scheme") or ""), Path(folder))
        yield "stress: start", partial(load_verdict, examined)
        if examined.engine is None:
            return
        record = Record(is_exact=_is_float32(examined.engine))
        try:
            yield "stress: load", partial(_run, examined.engine, seconds, record)
            yield "stress: tokens", partial(judge_tokens, record)
            yield "stress: memory", partial(judge_memory, record)
            yield "stress: speed", partial(judge_speed, record)
        finally:
            examined.engine.close()


def _files(name: str) -> Verdict | None:
    found = files_verdict(name)
    return None if found.level == "ok" else found


def _is_float32(engine: Engine) -> bool:
    import mlx.core as mx

    return bool(engine.loaded.dtype == mx.float32)


def _run(engine: Engine, seconds: float, record: Record) -> Verdict:
    notes = _Notes(record.notes)
    log = logging.getLogger("batchkv")
    log.addHandler(notes)
    log.propagate = False
    began = time.monotonic()
    try:
        run(engine, seconds, record)
    except (RuntimeError, MemoryError) as fault:
        record.fault = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
    finally:
        log.removeHandler(notes)
    return judge_load(record, time.monotonic() - began)


def run(engine: Engine, seconds: float, record: Record) -> None:
    """Waves until the time is over, and a few at least. Raises what the device raises."""
    deadline = time.monotonic() + seconds
    rng = random.Random(3)
    first = _wave(engine, prompts_of(engine, FIRST_ROWS), "first", {}, record)
    per_row = max(first.seconds, 1e-3) / FIRST_ROWS
    most = max(LEAST_WAVES, 2 * engine.config.slots)
    num_rows = max(3, min(most, int(seconds / WAVES_WANTED / per_row)))
    whole = prompts_of(engine, num_rows)
    expected: dict[str, Answers] = {}
    kinds = {"all": whole, "some": whole[::3]}
    num_compared = 0
    while True:
        for kind, prompts in kinds.items():
            if num_compared >= LEAST_WAVES and time.monotonic() >= deadline:
                return
            _wave(engine, prompts, kind, expected, record)
            churn(rng)
            num_compared += 1


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Prompts of all lengths that fit; every other one begins as the others do."""
    room = engine.loaded.context - NUM_TOKENS - 1
    fits = engine.config.memory_bytes // max(1, engine.bytes_per_token) // 4
    lengths = [length for length in LENGTHS if length <= min(room, fits)] or [max(1, room)]
    shared = numbers(engine.loaded.vocabulary, SHARED_TOKENS)
    found = []
    for index in range(count):
        length = lengths[index % len(lengths)]
        rng = random.Random(100 + index)
        prompt = [rng.randrange(engine.loaded.vocabulary) for _ in range(length)]
        if index % 2 and length > SHARED_TOKENS:
            prompt[:SHARED_TOKENS] = shared
        found.append(prompt)
    return found


def _wave(
    engine: Engine,
    prompts: Sequence[list[int]],
    kind: str,
    expected: dict[str, Answers],
    record: Record,
) -> Wave:
    """Compute one wave, compare it with the first of its kind, and note what it took."""
    import mlx.core as mx

    from batchkv_worker.events import Completed
    from batchkv_worker.sequence import Generation
    from batchkv_worker.sequence import Sequence as Row

    engine.prefixes.clear()  # so that each wave computes the same
    began = time.monotonic()
    for index, prompt in enumerate(prompts):
        engine.submit_row(Row(f"{index}", list(prompt), Generation(NUM_TOKENS, temperature=0.0)))
    found: dict[str, tuple[int, ...]] = {}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Completed):
                found[event.job_id] = event.token_ids
    seconds = time.monotonic() - began
    known = expected.setdefault(kind, found)
    wave = Wave(
        kind,
        seconds,
        len(prompts),
        sum(map(len, prompts)) + sum(map(len, found.values())),
        sum(known.get(f"{index}") != found.get(f"{index}") for index in range(len(prompts))),
        mx.get_active_memory(),
        mx.get_cache_memory(),
        process_bytes(),
    )
    record.waves.append(wave)
    return wave


def churn(rng: random.Random) -> None:
    """Allocate and free buffers of changing sizes, as growing slots and prompts do."""
    import mlx.core as mx

    left = CHURN_BYTES
    for _ in range(NUM_CHURNED):
        size = rng.randrange(1, max(2, left // 4))
        mx.eval(mx.zeros((size,), mx.uint8) + 1)
        left -= size // 2


def process_bytes() -> int:
    """The most memory that this process ever had, as the kernel counts it."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def judge_load(record: Record, seconds: float) -> Verdict:
    """It went on to the end, without an error of the device."""
    rows = sum(wave.num_rows for wave in record.waves)
    shown = f"{len(record.waves)} waves, {rows:,} rows in {seconds:,.0f} s"
    if record.fault:
        return fail(
            f"the device failed after {shown}: {record.fault}",
            "let the display sleep, or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 for workers; "
            "use fewer --slots and a smaller --prefill-chunk",
        )
    if record.notes:
        return warn(
            f"{shown}; the engine recovered {len(record.notes)} times, last: {record.notes[-1]}",
            "use fewer --slots, or give workers --memory",
        )
    return ok(shown)


def judge_tokens(record: Record) -> Verdict | None:
    """Equal waves give equal tokens."""
    compared = [wave for wave in record.waves if wave.kind != "first"]
    rows = sum(wave.num_rows for wave in compared)
    different = sum(wave.num_different for wave in compared)
    if not compared:
        return None
    if len(compared) < LEAST_WAVES:
        return warn(f"only {len(compared)} waves were compared", "give --stress more --seconds")
    if not different:
        return ok(f"{rows:,} answers are as the first time")
    share = max(wave.num_different / wave.num_rows for wave in compared)
    shown = f"{different:,} of {rows:,} answers differ from the first time"
    if record.is_exact or share > MANY_DIFFER:
        return fail(
            shown,
            "do not trust answers of this machine under load: update macOS or the "
            "driver, and report it",
        )
    return warn(
        f"{shown}, at most {share:.0%} of a wave",
        "answers may part where two tokens are "
        "about equally likely; run it again with --dtype float32 in BATCHKV_DTYPE",
    )


def judge_memory(record: Record) -> Verdict | None:
    """What MLX holds after a wave does not grow from wave to wave."""
    later = record.later
    if len(later) < LEAST_WAVES:
        return None
    held = [wave.active_bytes + wave.kept_bytes for wave in later]
    start, end = max(held[: len(held) // 2]), max(held[len(held) // 2 :])
    shown = (
        f"MLX holds {end / 2**20:,.0f} MiB after a wave, {later[-1].kept_bytes / 2**20:,.0f} of it "
        "freed"
    )
    if end > start * GROWN_SHARE and end > start + GROWN_BYTES:
        return warn(
            f"{shown}, and held {start / 2**20:,.0f} before: it grows",
            "give workers --memory, and report it",
        )
    return ok(shown)


def judge_speed(record: Record) -> Verdict | None:
    """The last waves are as fast as the ones before."""
    later = record.later
    if len(later) < LEAST_WAVES:
        return None
    speeds = [wave.num_tokens / max(wave.seconds, 1e-9) for wave in later]
    half = len(speeds) // 2
    before, after = statistics.median(speeds[:half]), statistics.median(speeds[half:])
    shown = f"{after:,.0f} tokens/s at the end, {before:,.0f} before"
    if after < SLOWED_SHARE * before:
        return warn(
            f"{shown}: the machine slows down under load",
            "let air to it, connect it to mains, and end other programs",
        )
    return ok(shown)

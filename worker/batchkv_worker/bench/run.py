"""The parts of a bench, one after the other, on one model and this machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

from batchkv_worker.bench import product
from batchkv_worker.bench.batches import Batches, bound
from batchkv_worker.bench.bounds import cost_of
from batchkv_worker.bench.extent import Extent
from batchkv_worker.bench.machine import machine_of, model_of
from batchkv_worker.bench.passes import Passes
from batchkv_worker.bench.rates import measure_rates
from batchkv_worker.bench.results import BatchRun, BenchReport, Figure, ProductRun
from batchkv_worker.bench.setup import load_model
from batchkv_worker.bench.workloads import VOCABULARY, make
from batchkv_worker.engine.engine import Engine
from batchkv_worker.kv.start.backend import choose_backend

PRODUCT_SECONDS = 1800.0  # at most, for one ``batchkv run``
TIMES_BOUND = 20.0  # a batch takes so much more than its bound, both sides together, at worst
_BATCHES = ("equal", "mixed", "shared")


class Bench:
    """Loads ``model`` and measures; ``note`` gets a line before each part.

    Raises ModelError and SettingsError.
    """

    def __init__(
        self,
        model: str,
        schemes: tuple[str, ...],
        slots: int | None,
        dtype: str,
        extent: Extent,
        note: Callable[[str], None],
    ) -> None:
        """``slots`` None: as many as a worker has here."""
        self._name, self._schemes = model, schemes
        self._extent, self._note = extent, note
        note(f"loading {model}")
        self._loaded, self._config = load_model(model, dtype, schemes[0], slots)
        self._slots = self._config.slots
        note("measuring bandwidth and products")
        self._rates = measure_rates(self._loaded.dtype)
        self._cost = cost_of(self._loaded)

    @property
    def report(self) -> BenchReport:
        """What is known before the first figure."""
        machine, model = machine_of(self._rates), model_of(self._loaded)
        return BenchReport(machine, model, self._schemes[0], self._slots)

    def figures(self) -> Iterator[Figure]:
        """All parts that were asked for, each figure as soon as it is measured."""
        extent, config = self._extent, self._config
        passes = Passes(*(self._loaded, self._cost, self._rates, extent.sample_seconds, self._note))
        if "passes" in extent.parts:
            self._note("forward passes")
            yield from passes.forward(extent.pass_rows)
        if "prefill" in extent.parts:
            self._note("prefill")
            yield from passes.prefill(extent.prefill_tokens, extent.row_seconds)
        if "decode" in extent.parts:
            self._note("decode steps")
            yield from passes.decode(
                *(choose_backend(), self._schemes, extent.contexts, config, extent.row_seconds)
            )
        del passes
        if "batches" in extent.parts:
            yield from map(self._batch, _BATCHES)
        if "product" in extent.parts:
            yield self._product()

    def _rows(self, bound_of: Callable[[int], float]) -> int:
        """So many rows that a batch of them probably ends in time, by its bound."""
        extent, rows = self._extent, self._extent.rows
        while rows > extent.least_rows and TIMES_BOUND * bound_of(rows) > extent.limit_seconds:
            rows = max(extent.least_rows, rows // 2)
        return rows

    def _batch(self, name: str) -> BatchRun:
        extent, vocabulary = self._extent, min(VOCABULARY, self._loaded.vocabulary)
        rows = self._rows(
            lambda count: bound(
                *(make(name, count, vocabulary), self._slots, self._cost, self._rates)
            )
        )
        self._note(f"batch {name}, {rows} rows")
        batches = Batches(self._loaded, self._config, extent.repeats, extent.limit_seconds)
        return batches.compare(name, rows, self._cost, self._rates)

    def _product(self) -> ProductRun:
        """The engine's runs first; then the model is dropped, since the worker loads its own."""
        extent = self._extent
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            rows = self._rows(lambda count: self._bound_of_file(file, count))
            bound_seconds = self._bound_of_file(file, rows)
            self._note(f"batchkv run, {rows} rows")
            engine = Engine(self._loaded, self._config)
            engines = [product.run_engine(engine, file) for _ in range(1 + extent.repeats)][1:]
            engine.close()
            name, scheme = self._name, self._schemes[0]
            self._drop()
            runs: list[product.Timed] = []
            end = time.monotonic() + 4 * extent.limit_seconds
            while len(runs) < extent.repeats and (not runs or time.monotonic() < end):
                runs.append(product.run_product(file, name, scheme, PRODUCT_SECONDS))
        return ProductRun(
            workload="shared groups",
            rows=rows,
            generated=runs[-1].generated,
            seconds=statistics.median(run.seconds for run in runs),
            engine_seconds=statistics.median(run.seconds for run in engines),
            bound_seconds=bound_seconds,
            start_seconds=statistics.median(run.start_seconds for run in runs),
        )

    def _bound_of_file(self, file: Path, rows: int) -> float:
        """Write a file of so many rows; the least seconds that they take."""
        product.write_rows(file, rows)
        return product.bound_of(file, self._loaded, self._slots, self._cost, self._rates)

    def _drop(self) -> None:
        del self._loaded
        mx.clear_cache()

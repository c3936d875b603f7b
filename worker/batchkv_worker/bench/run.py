"""The parts of a bench, one after the other, on one model and this machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from batchkv_worker.bench import product
from batchkv_worker.bench.batches import Batches
from batchkv_worker.bench.bounds import cost_of
from batchkv_worker.bench.extent import Extent
from batchkv_worker.bench.machine import machine_of, model_of
from batchkv_worker.bench.passes import Passes
from batchkv_worker.bench.rates import measure_rates
from batchkv_worker.bench.results import BatchRun, BenchReport, ProductRun
from batchkv_worker.bench.setup import load_model
from batchkv_worker.engine.engine import Engine
from batchkv_worker.kv.start.backend import choose_backend

PRODUCT_SECONDS = 1800.0  # at most, for one ``batchkv run``
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

    def run(self) -> BenchReport:
        """All parts that were asked for."""
        extent, loaded = self._extent, self._loaded
        report = BenchReport(
            machine_of(self._rates), model_of(loaded), self._schemes[0], self._slots
        )
        passes = Passes(loaded, self._cost, self._rates, extent.sample_seconds)
        if "passes" in extent.parts:
            self._note("forward passes")
            report = replace(report, passes=passes.forward(extent.pass_rows))
        if "prefill" in extent.parts:
            self._note("prefill")
            report = replace(report, prefill=passes.prefill(extent.prefill_tokens))
        if "decode" in extent.parts:
            self._note("decode steps")
            steps = passes.decode(choose_backend(), self._schemes, extent.contexts, self._config)
            report = replace(report, decode=steps)
        del loaded, passes
        if "batches" in extent.parts:
            report = replace(report, batches=tuple(map(self._batch, _BATCHES)))
        if "product" in extent.parts:
            report = replace(report, product=(self._product(),))
        return report

    def _batch(self, name: str) -> BatchRun:
        self._note(f"batch {name}")
        extent = self._extent
        batches = Batches(self._loaded, self._config, extent.repeats, extent.limit_seconds)
        return batches.compare(name, extent.rows, self._cost, self._rates)

    def _product(self) -> ProductRun:
        """The engine's runs first; then the model is dropped, since the worker loads its own."""
        self._note("batchkv run")
        extent = self._extent
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            product.write_rows(file, extent.rows)
            engine = Engine(self._loaded, self._config)
            engines = [product.run_engine(engine, file) for _ in range(1 + extent.repeats)][1:]
            engine.close()
            bound_seconds = product.bound_of(
                *(file, self._loaded, self._slots, self._cost, self._rates)
            )
            name, scheme = self._name, self._schemes[0]
            self._drop()
            runs: list[product.Timed] = []
            end = time.monotonic() + 4 * extent.limit_seconds
            while len(runs) < extent.repeats and (not runs or time.monotonic() < end):
                runs.append(product.run_product(file, name, scheme, PRODUCT_SECONDS))
        return ProductRun(
            workload="shared groups",
            rows=extent.rows,
            generated=runs[-1].generated,
            seconds=statistics.median(run.seconds for run in runs),
            engine_seconds=statistics.median(run.seconds for run in engines),
            bound_seconds=bound_seconds,
            start_seconds=statistics.median(run.start_seconds for run in runs),
        )

    def _drop(self) -> None:
        del self._loaded
        mx.clear_cache()

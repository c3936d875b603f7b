"""Has MLX compile its kernels for products with packed weights before there are rows.

Each took an H200 23 to 42 s, and a batch would wait for three of them, one after the other. So at
the first start with such weights, processes of their own compile them, all at once, while the
weights are read. MLX keeps them in a folder, where a file says that a kernel is there.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from batchkv_worker.kept_files import write_whole
from batchkv_worker.kv.backends import mlx_kernels
from batchkv_worker.kv.backends.packed_products import ROWS, PackedProduct, products_of

log = logging.getLogger("batchkv.engine")

MOST_SECONDS = 300.0  # of one process
POLL_SECONDS = 0.05
_MODULE = "batchkv_worker.kv.backends.cuda.early_products"

Work = tuple[PackedProduct, int]  # and the number of rows


def begin(model: Any, dtype: mx.Dtype) -> EarlyProducts | None:
    """Start to compile what a ``model`` of ``dtype`` needs, if anything is missing.

    Its weights need not be read yet.
    """
    works = [(each, rows) for each in products_of(model, dtype) for rows in ROWS]
    missing = [work for work in works if not _is_kept(*work)]
    return EarlyProducts(missing) if missing else None


class EarlyProducts:
    """Processes that compile, as many at once as half of the processors."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._waiting = [*works]
        self._running: list[tuple[subprocess.Popen[bytes], float, Work]] = []
        self._most = max(1, (os.cpu_count() or 2) // 2)
        self._begun = time.monotonic()
        self._start_more()

    def wait(self, report: Callable[[str], object]) -> None:
        """Until all have ended. One that takes too long, or fails, is told and left to MLX.

        ``report`` gets what is waited for, if it is.
        """
        self._look()
        if not self._running:
            return
        report("compiling products with packed weights, once on this machine")
        log.info(
            "MLX compiles %d kernels for products with packed weights, once on this machine: "
            "this takes about a minute",
            len(self._running) + len(self._waiting),
        )
        try:
            while self._running:
                self._look()
                time.sleep(POLL_SECONDS)
        finally:
            self.close()
        log.info("these kernels are there after %.1f s", time.monotonic() - self._begun)

    def close(self) -> None:
        """End what still runs."""
        running, self._running = self._running, []
        self._waiting.clear()
        for process, _, _ in running:
            process.kill()
            process.wait()

    def _look(self) -> None:
        """Take those that have ended, end those that take too long, and start more."""
        still = []
        for process, until, work in self._running:
            code = process.poll()
            if code is None and time.monotonic() < until:
                still.append((process, until, work))
                continue
            process.kill()
            process.wait()
            if code == 0:
                _keep(*work)
            else:
                how = "took too long" if code is None else f"ended with {code}"
                log.warning(
                    "the process that compiles %s for %d rows %s: rows may wait for it",
                    *(work[0].kernel, work[1], how),
                )
        self._running = still
        self._start_more()

    def _start_more(self) -> None:
        while self._waiting and len(self._running) < self._most:
            work = self._waiting.pop(0)
            until = time.monotonic() + MOST_SECONDS
            self._running.append((_start(*work), until, work))


def _start(product: PackedProduct, rows: int) -> subprocess.Popen[bytes]:
    request = json.dumps({"rows": rows, **product.as_dict()})
    # -P: a file named mlx.py in the working directory must not be imported.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, request],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _mark(product: PackedProduct, rows: int) -> Path | None:
    """The file that says that the kernel is kept; None where MLX keeps nothing."""
    folder = os.environ.get(mlx_kernels.VARIABLE)
    return Path(folder, f"{product.kernel}-{rows}{mlx_kernels.MARK}") if folder else None


def _is_kept(product: PackedProduct, rows: int) -> bool:
    mark = _mark(product, rows)
    return mark is not None and mark.is_file()


def _keep(product: PackedProduct, rows: int) -> None:
    mark = _mark(product, rows)
    if mark is None:
        return
    try:
        write_whole(mark, b"")
    except OSError as fault:
        log.debug("it is not kept that MLX has compiled: %s", fault)


def compile_one(request: str) -> None:
    """Multiply as the request says. This runs in the other process."""
    values = json.loads(request)
    rows = values.pop("rows")
    PackedProduct(**values).compute(rows)


if __name__ == "__main__":
    compile_one(sys.argv[1])

"""Has MLX compile its kernels for products with packed weights before there are rows.

Each took an H200 36 to 42 s, and a batch would wait for three of them, one after the other. So at
the first start with such weights, processes of their own begin to compile them while the weights
are read, a few at once. MLX keeps them in a folder, where a file says that a kernel is there.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import mlx.core as mx

from batchkv_worker.kept_files import write_whole
from batchkv_worker.kv.backends import device, mlx_kernels
from batchkv_worker.kv.backends.packed_products import ROWS, PackedProduct, products_of

log = logging.getLogger("batchkv.engine")

MOST_SECONDS = 300.0  # for all; what is missing then is left to MLX
MOST_AT_ONCE = 4  # each has the device's memory for its context, and the host's for its compiler
POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
_LAST_BYTES = 2000  # of what a process says
_MODULE = "batchkv_worker.kv.backends.cuda.early_products"

Work = tuple[PackedProduct, int]  # and the number of rows


def begin(model: Any, dtype: mx.Dtype) -> EarlyProducts | None:
    """Start to compile what a ``model`` of ``dtype`` needs, if anything is missing.

    Its weights need not be read yet.
    """
    works = [(each, rows) for each in products_of(model, dtype) for rows in ROWS]
    missing = [work for work in works if not _is_kept(*work)]
    return EarlyProducts(missing) if missing else None


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    work: Work


class EarlyProducts:
    """Processes that compile, as many at once as half of the processors, and at most a few."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._waiting = [*works]
        self._running: list[_Running] = []
        self._most = max(1, min(MOST_AT_ONCE, device.num_cpus() // 2))
        self._begun = time.monotonic()
        self._start_more()

    def wait(self, report: Callable[[str], object]) -> None:
        """Until all have ended. What fails, or takes too long, is told and left to MLX.

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
            while self._running and time.monotonic() < self._begun + MOST_SECONDS:
                self._look()
                time.sleep(POLL_SECONDS)
            if self._running:
                log.warning(
                    "%d of these kernels are not there after %.0f s: rows may wait for them",
                    *(len(self._running) + len(self._waiting), MOST_SECONDS),
                )
        finally:
            self.close()
        log.info("MLX compiled for %.1f s", time.monotonic() - self._begun)

    def close(self) -> None:
        """End what still runs."""
        running, self._running = self._running, []
        self._waiting.clear()
        for process, said, _ in running:
            process.kill()
            process.wait()
            said.close()

    def _look(self) -> None:
        """Take those that have ended, and start more."""
        for one in [*self._running]:
            code = one.process.poll()
            if code is None:
                continue
            self._running.remove(one)
            if code == 0:
                _keep(*one.work)
            else:
                product, rows = one.work
                log.warning(
                    "the process that compiles %s for %d rows ended with %d, and rows may wait for "
                    "it: %s",
                    *(product.kernel, rows, code, _last(one.said)),
                )
            one.said.close()
        self._start_more()

    def _start_more(self) -> None:
        while self._waiting and len(self._running) < self._most:
            work, said = self._waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 - closed with it
            try:
                self._running.append(_Running(_start(*work, said), said, work))
            except OSError as fault:  # no more processes: the others are left to MLX, too
                log.warning("no process can be started that compiles: %s", fault)
                self._waiting.clear()
                said.close()


def _start(product: PackedProduct, rows: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
    request = json.dumps({"rows": rows, **product.as_dict()})
    # -P: a file named mlx.py in the working directory must not be imported.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, request, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
    )


def _last(said: IO[bytes]) -> str:
    """The last line of what a process said."""
    said.seek(max(0, said.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = said.read().decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _mark(product: PackedProduct, rows: int) -> Path | None:
    """The file that says that the kernel is kept; None where MLX keeps nothing."""
    folder = os.environ.get(mlx_kernels.VARIABLE)
    name = f"{product.kernel}-{rows}-{mx.__version__}{mlx_kernels.MARK}"
    return Path(folder, name) if folder else None


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


def end_with(parent: int) -> None:
    """End this process when the worker that started it is gone, however it ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    compile_one(sys.argv[1])

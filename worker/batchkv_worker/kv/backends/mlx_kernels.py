"""The kernels that MLX itself compiles on CUDA, each when it is first used.

Most kernels are in MLX's library. Those that read or write the rows that an array names are
compiled for each dtype. Each took an H200 3.5 to 4.2 s, and a whole batch waited for it. So those
that rows need when they come, move and leave are used once before there are rows.

MLX keeps their code on disk: in the folder for temporary files, which a restart of the machine may
empty, and where another user may have been first. Its files are named by neither version nor
device. So MLX gets a folder of this user for both (``jit_module.cpp`` reads the variable once).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import mlx.core as mx

from batchkv_worker.kept_files import KERNELS, dated, is_ours, remove
from batchkv_worker.kv.kernels.named_code import is_named

log = logging.getLogger("batchkv.engine")

VARIABLE = "MLX_PTX_CACHE_DIR"
FOLDER = "mlx"  # beside batchkv's own kernels
MARK = ".done"  # of an empty file that says that MLX has compiled something
_SOURCE, _CODE, _NAMES = ".cu", ".ptx", ".txt"  # of one module; MLX writes the names after the code
_WRITING_SECONDS = 5.0  # so long, another worker may be about to write a module's names
_ROWS, _NUMBERS = 4, 64  # of an array on the device: few numbers are in the host's memory


def keep_in(home: Path, architecture: str) -> None:
    """Have MLX keep code in a folder of ``home``, unless the environment names another.

    ``architecture`` is MLX's name for the device. This comes before MLX computes anything.
    """
    if os.environ.get(VARIABLE):
        return
    home = home.resolve()  # it may be a link, to another disk perhaps
    chosen = home / KERNELS / FOLDER / f"{mx.__version__}-{architecture}"
    try:
        for one in (home, home / KERNELS, chosen.parent, chosen):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode is that of the last alone
            if not is_ours(one.lstat()):
                log.warning("MLX's kernels are not kept in %s: others may write %s", chosen, one)
                return
        _sweep(chosen)
    except OSError as fault:
        log.debug("MLX's kernels are not kept in %s: %s", chosen, fault)
        return
    os.environ[VARIABLE] = str(chosen)


def compile_now(dtype: mx.Dtype) -> None:
    """Use each kernel once, for a model of ``dtype``. It takes milliseconds where they are kept.

    One that fails is compiled anew, for its file may be spoilt. What fails then is told: rows that
    need it would fail, too.
    """
    begun = time.monotonic()
    for place in range(len(first_uses(dtype))):
        try:
            mx.eval(first_uses(dtype)[place])
        except RuntimeError as spoilt:
            log.debug("a kernel of MLX's fails: %s", spoilt)
            _forget()
            try:
                mx.eval(first_uses(dtype)[place])
            except RuntimeError as fault:
                log.warning("MLX has no kernel that reads or writes rows: %s", fault)
    log.debug("MLX's kernels for rows are there after %.1f s", time.monotonic() - begun)


def first_uses(dtype: mx.Dtype) -> list[mx.array]:
    """Graphs with one such operation each.

    Tokens of the step before are read where rows left (int32). Rows that move, and records, are
    words (uint32). Numbers of slots without records have the model's ``dtype``.
    """
    rows = mx.array([*range(_ROWS)], mx.int32)
    reads = [mx.take(_lines(kind), rows, axis=0) for kind in (mx.int32, mx.uint32)]
    writes = []
    for kind in (mx.uint32, dtype):
        buffer = _lines(kind)
        buffer[rows] = _lines(kind)
        writes.append(buffer)
    return [*reads, *writes]


def _lines(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((_ROWS, _NUMBERS), dtype)


def _sweep(kept: Path) -> None:
    """Remove code that has had no names for a while: its process was killed while it wrote."""
    before = time.time() - _WRITING_SECONDS
    code = [file for written, file in dated(kept.rglob(f"*{_CODE}")) if written < before]
    remove(file for file in code if not file.with_suffix(_NAMES).is_file())


def folder() -> Path | None:
    """Where MLX keeps code, if ``keep_in`` chose it."""
    found = Path(os.environ.get(VARIABLE, ""))
    return found if found.parent.parts[-2:] == (KERNELS, FOLDER) else None


def _forget() -> None:
    """Remove MLX's files, if the folder is one that ``keep_in`` chose.

    Code that batchkv keeps there stays: a kernel that another process makes now would miss it.
    """
    kept, endings = folder(), (_SOURCE, _CODE, _NAMES, MARK)
    files = [] if kept is None else kept.rglob("*")
    remove([file for file in files if file.suffix in endings and not is_named(file)])

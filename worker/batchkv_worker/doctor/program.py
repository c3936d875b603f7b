"""The process in which the worker's checks are made: ``python -m batchkv_worker.doctor.program``.

``batchkv_producer.doctor.worker_part`` starts it and reads its lines. The request is one JSON
object, a line on standard input, which stays open: when it is closed, the parent is gone, and this
process ends. Standard output has lines of JSON only: what libraries print goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from batchkv_producer.doctor.contract import Verdict, fail
from batchkv_producer.doctor.runner import broken
from batchkv_producer.errors import BatchkvError

# One check: its name, and the function that makes it. None: it does not apply here.
Step = tuple[str, Callable[[], Verdict | None]]
Steps = Iterator[Step]
Request = Mapping[str, Any]

NEED_MLX = ("device", "model", "together", "stress")


def steps_of(request: Request) -> Steps:
    """The checks of a request, made one after the other. A later one may need an earlier one."""
    part = str(request.get("part"))
    if part in NEED_MLX and not has_mlx():
        if part != "device":
            yield part, lambda: fail("MLX is not installed here", "run `make venv SET=worker`")
        return
    if part == "device":
        from batchkv_worker.doctor.device import steps as device_steps

        yield from device_steps()
    elif part == "model":
        from batchkv_worker.doctor.model import steps as model_steps

        yield from model_steps(request)
    elif part == "together":
        from batchkv_worker.doctor.together import steps as together_steps

        yield from together_steps(request)
    elif part == "tiers":
        from batchkv_worker.doctor.tiers import steps as tier_steps

        yield from tier_steps(request)
    elif part == "stress":
        from batchkv_worker.doctor.stress import steps as stress_steps

        yield from stress_steps(request)


def has_mlx() -> bool:
    """Whether both packages of the engine are there; neither is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def run(request: Request, out: IO[str]) -> None:
    """Make all checks of a request, and write each as it begins and ends."""
    for name, make in steps_of(request):
        _write(out, begin=name)
        began = time.monotonic()
        verdict = made(make)
        if verdict is not None:
            seconds = round(time.monotonic() - began, 3)
            _write(out, name=name, level=str(verdict.level), found=verdict.found,
                   todo=verdict.todo, seconds=seconds)  # fmt: skip


def made(make: Callable[[], Verdict | None]) -> Verdict | None:
    """The verdict of one check. Only what ends the process is raised."""
    try:
        return make()
    except BatchkvError as fault:
        return fail(str(fault), "see docs/troubleshooting.md for this sentence")
    except MemoryError:
        return fail("memory ran out in this check", "end other programs, or use a smaller model")
    except Exception as fault:  # noqa: BLE001 - a check that fails must not hide the others
        return broken(fault)


def _write(out: IO[str], **values: object) -> None:
    out.write(f"{json.dumps(values)}\n")
    out.flush()


def end_with_parent(stream: IO[str]) -> None:
    """End this process, and what it started, when the stream ends."""

    def wait() -> None:
        while stream.read(1024):
            pass
        if os.getpgrp() == os.getpid():  # as doctor starts it
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> None:
    """Read the request, keep standard output for findings, make the checks."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline() or "{}")
    end_with_parent(sys.stdin)
    with own:
        run(request, own)


if __name__ == "__main__":
    main()

"""What a service is: its command, its environment, and how it is stopped and started again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchkv_producer.service.checks import need_hub, need_private_file, need_program, need_url
from batchkv_producer.service.machine import Machine

WORKER_LABEL = "dev.batchkv.worker"
SERVER_LABELS = {"queue": "dev.batchkv.queue", "cache": "dev.batchkv.cache"}
CONFIGURATION_CODES = (2, 126, 127)  # batchkv's own, and the shell's for a program it cannot run
SERVER_CONFIGURATION_CODES = (1, 126, 127)
STOP_SECONDS = 120  # more than the worker's drain, which is 30 s unless it is set
STOP_MARGIN_SECONDS = 90
_SERVER_STOP_SECONDS = 60  # to flush the append-only file
# Variables of the caller that say where files are. Others belong on the command line.
KEPT_VARIABLES = (
    "BATCHKV_HOME",
    "BATCHKV_REDIS_CA_FILE",
    "BATCHKV_CACHE_SECRET_FILE",
    "BATCHKV_CACHE_SALT_FILE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "SSL_CERT_FILE",
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT",  # lets the GPU work longer beside a display
)


@dataclass(frozen=True, slots=True)
class Service:
    """One service. ``pause_codes`` are exit codes after which starting again at once is no help.

    ``is_server``: a server of the hub. It does not keep the machine awake itself, as a worker does,
    and has no exit code of its own for a wrong configuration.
    """

    label: str
    about: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    restart_seconds: int = 30
    stop_seconds: int = STOP_SECONDS
    open_files: int = 8192
    pause_codes: tuple[int, ...] = CONFIGURATION_CODES
    pause_seconds: int = 600
    is_server: bool = False


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker as it was asked for. ``arguments`` are further flags of `batchkv worker`."""

    models: tuple[str, ...]
    url_file: Path
    cache_file: Path | None = None
    label: str = WORKER_LABEL
    arguments: tuple[str, ...] = ()
    drain_seconds: float = 0.0


def worker_service(
    plan: WorkerPlan, machine: Machine, environ: Mapping[str, str] = os.environ
) -> Service:
    """The service of a worker. Raises UsageError when a file or MLX is missing."""
    program = need_program("worker")
    need_private_file(plan.url_file, machine.uid, "secrets/worker.url")
    need_url(plan.url_file)
    environment = {name: environ[name] for name in KEPT_VARIABLES if environ.get(name)}
    environment["BATCHKV_REDIS_URL_FILE"] = str(plan.url_file)
    if plan.cache_file is not None:
        need_private_file(plan.cache_file, machine.uid, "secrets/cache.tiers")
        environment["BATCHKV_CACHE_FILE"] = str(plan.cache_file)
    words = [word for model in plan.models for word in ("--model", model)]
    environment["PATH"] = f"{program.parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    environment["PYTHONUNBUFFERED"] = "1"
    return Service(
        label=plan.label,
        about=f"batchkv worker for {', '.join(plan.models)}",
        command=(str(program), "worker", *words, *plan.arguments),
        folder=machine.home,
        environment=environment,
        stop_seconds=max(STOP_SECONDS, int(plan.drain_seconds) + STOP_MARGIN_SECONDS),
    )


def server_service(name: str, hub: Path, machine: Machine, server: Path) -> Service:
    """The service of one of the hub's servers, "queue" or "cache". Raises UsageError."""
    need_hub(hub, name, machine.uid)
    return Service(
        label=SERVER_LABELS[name],
        about=f"batchkv {name} server of {hub}",
        command=(str(server), str(hub / f"{name}.conf")),
        folder=hub,
        restart_seconds=10,
        stop_seconds=_SERVER_STOP_SECONDS,
        open_files=16_384,
        pause_codes=SERVER_CONFIGURATION_CODES,
        pause_seconds=60,  # another server may have had the port
        is_server=True,
    )

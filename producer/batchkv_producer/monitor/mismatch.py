"""Finds rows that no worker of their queue may compute, and says what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.progress import rows
from batchkv_producer.wire.maker import GRAMMAR, SHOWN_DIGITS

MAX_NAMED = 3  # workers


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why no worker may compute the rows: ``words`` for the progress, ``note`` with ways out."""

    words: str
    note: str


def find_mismatch(status: BatchStatus, serving: Sequence[WorkerInfo]) -> Mismatch | None:
    """Why the waiting rows of a batch have no worker. None if a worker of the queue may take them.

    A worker of an older version reports neither weights nor scheme. It takes every row.
    """
    if status.is_done or not status.queued or not serving:
        return None
    if old := [worker.name for worker in serving if status.needs and worker.abilities is None]:
        return Mismatch(
            "a worker of an older version fails rows",
            f"{', '.join(old[:MAX_NAMED])} would fail rows of batch {status.batch_id}: they need "
            f"{', '.join(status.needs.split())}, which its version of batchkv does not know. "
            "Upgrade it; then `batchkv retry` queues the rows again that it failed",
        )
    differing = [(worker, _difference(status, worker)) for worker in serving]
    if not all(name for _, name in differing):
        return None
    name = "fingerprint" if any(n == "fingerprint" for _, n in differing) else differing[0][1]
    wanted = _wanted(name, status)
    have = [f"{worker.name} {_has(n, worker)}" for worker, n in differing]
    more = f" and {len(have) - MAX_NAMED} more do not fit" if len(have) > MAX_NAMED else ""
    verb = "waits" if status.queued == 1 else "wait"
    waiting = f"{rows(status.queued)} {verb} for {wanted}"
    return Mismatch(
        f"rows wait for {wanted}",
        f"{waiting}; {', '.join(have[:MAX_NAMED])}{more}. {_way_out(name, status, serving)}",
    )


def why_passed_by(status: BatchStatus, worker: WorkerInfo) -> str:
    """Why a worker of the queue passes by the rows of this batch. "" if it may take them."""
    name = _difference(status, worker)
    return f"it {_has(name, worker)}" if name else ""


def _difference(status: BatchStatus, worker: WorkerInfo) -> str:
    """The first field in which batch and worker differ. "" if the worker may take the rows."""
    if status.needs and not set(status.needs.split()) <= set(worker.abilities or ()):
        return "needs"
    names = ("fingerprint",) if status.is_mixed else ("fingerprint", "scheme", "dtype")
    for name in names:
        wanted, has = getattr(status, name), getattr(worker, name)
        if wanted and has and wanted != has:
            return name
    return ""


def _wanted(name: str, status: BatchStatus) -> str:
    if name == "needs":
        return f"a worker that can do {', '.join(status.needs.split())}"
    return _named(name, getattr(status, name))


def _has(name: str, worker: WorkerInfo) -> str:
    return "cannot" if name == "needs" else f"has {_named(name, getattr(worker, name))}"


def _named(name: str, value: str) -> str:
    if name == "fingerprint":
        return f"weights {value[:SHOWN_DIGITS]}"
    return f"KV scheme {value}" if name == "scheme" else f"dtype {value}"


def _way_out(name: str, status: BatchStatus, serving: Sequence[WorkerInfo]) -> str:
    fresh = "`--fresh` with the same file computes all rows anew, with the workers there are"
    if name == "needs":
        lacks = [set(status.needs.split()) - set(worker.abilities or ()) for worker in serving]
        if {GRAMMAR} in lacks:
            return "Install llguidance for a worker of this queue: batchkv[worker] has it"
        return "Upgrade a worker of this queue"
    if name == "fingerprint":
        return f"Start a worker where {status.model} has those files; or {fresh}"
    flag = f"--kv-scheme {status.scheme}" if name == "scheme" else "that --dtype"
    mixed = "`batchkv submit --mixed` with the same file lets every scheme and dtype in"
    return f"Start a worker with {flag}; or {mixed}; or {fresh}"

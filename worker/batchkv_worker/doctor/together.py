"""Which of several models a worker here would hold together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from batchkv_producer.doctor.contract import Verdict, ok, warn
from batchkv_producer.settings_table import BY_NAME
from batchkv_worker.doctor.capacity import GIB
from batchkv_worker.queue.models.groups import Group, plan_groups, sizes_as_asked


def steps(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The checks of several models; ``models`` and ``cache`` are those of a worker."""
    models, cache = list(request.get("models", ())), str(request.get("cache", ""))
    yield "models together", partial(look, models, cache)


def look(models: Sequence[str], cache: str) -> Verdict:
    """Read the sizes of the models and the facts of this machine, and judge them."""
    from batchkv_worker.model.footprint import read_machine

    machine = read_machine(models, cache or None, "auto")
    unknown = [model for model, size in machine.weights.items() if size is None]
    asked = os.environ.get(BY_NAME["weights"].variable, "").strip() or "auto"
    weights, unpacked = sizes_as_asked(machine, asked)
    groups = plan_groups(weights, machine.facts, unpacked=unpacked)
    return judge(groups, unknown)


def judge(groups: Sequence[Group], unknown: Sequence[str]) -> Verdict:
    """What is held together, and with how much memory for keys and values."""
    if unknown:
        names = ", ".join(unknown)
        return warn(f"the size of {names} is not known", "download the model, then ask again")
    parts = []
    for group in groups:
        names = " and ".join(group.models)
        memory = f" with {group.memory_bytes / GIB:.1f} GiB for each" if group.memory_bytes else ""
        weights = f", weights {group.weights}" if group.weights else ""
        parts.append(f"{names}{memory}{weights}")
    if len(groups) == 1:
        return ok(f"a worker with all of these -m holds them together: {parts[0]}")
    return ok(f"a worker with all of these -m holds in turn: {'; '.join(parts)}")

"""Checks a host's settings before it serves, and makes its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchkv_producer.local.local_workers import WORKER_COMMAND
from batchkv_producer.local.worker_checks import check_model_folder
from batchkv_producer.monitor.hosts import MAX_MODELS
from batchkv_producer.settings_table import BY_NAME, TABLE
from batchkv_producer.wire.adapter import split_here
from batchkv_worker.errors import SettingsError
from batchkv_worker.model.footprint import read_machine
from batchkv_worker.queue.models.groups import Group, plan_groups, sizes_as_asked
from batchkv_worker.queue.models.holding import Command
from batchkv_worker.queue.models.host import HostPlan
from batchkv_worker.settings import WorkerSettings, parsed

# A guess until a model was loaded once.
START_SECONDS = 5.0
READ_BYTES_PER_SECOND = 500e6
OWN = ("model", "memory_bytes", "stay_seconds")  # settings that are the host's, not its processes'


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of ``batchkv worker`` with several models. ``flags``: as click gives them."""

    models: tuple[str, ...]
    name: str
    url: str
    flags: Mapping[str, Any]
    is_burst: bool = False
    max_idle_seconds: float | None = None
    is_quiet: bool = False
    is_verbose: bool = False
    command: tuple[str, ...] = WORKER_COMMAND


def check_several(
    named: Sequence[str], settings: WorkerSettings, max_jobs: int | None
) -> tuple[str, ...]:
    """The names of several models. Raises UsageError for what cannot be with several."""
    models = tuple(map(_checked, named))
    if twice := [model for model in models if models.count(model) > 1]:
        raise SettingsError(f"-m {twice[0]}: it is named twice")
    if len(models) > MAX_MODELS:
        raise SettingsError(f"-m: {len(models)} models; a worker serves at most {MAX_MODELS}")
    if settings.adapters:
        raise SettingsError(
            f"{BY_NAME['adapters'].flag} {settings.adapters[0]}: adapters belong to one model. "
            "Give one -m, and start another worker for the other models"
        )
    if settings.trace is not None:
        raise SettingsError("--trace: a trace is of one model. Give one -m")
    if max_jobs is not None:
        raise SettingsError("--max-jobs: it counts the jobs of one model. Give one -m")
    for model in models:
        check_model_folder(model)
    return models


def make_plan(asked: Asked, settings: WorkerSettings) -> HostPlan:
    """The plan of a host. Raises ModelError for a model that does not fit on this machine."""
    machine = read_machine(asked.models, settings.cache, settings.dtype)
    settings.check_device(machine.facts.kind)
    weights, unpacked = sizes_as_asked(machine, settings.weights)
    groups = plan_groups(weights, machine.facts, settings.memory_bytes, unpacked)
    words: list[str] = []
    for setting in TABLE:
        if setting.name and setting.name not in OWN and asked.flags.get(setting.name):
            words += setting.words(asked.flags[setting.name])
    words += ["--quiet"] if asked.is_quiet else []
    words += ["--verbose"] if asked.is_verbose else []
    return HostPlan(
        name=asked.name,
        groups=groups,
        load_seconds={model: _guess(weights[model]) for model in asked.models},
        stay_seconds=settings.stay_seconds,
        command=Command(asked.command, tuple(words), asked.url, settings.drain_seconds),
        is_burst=asked.is_burst,
        max_idle_seconds=asked.max_idle_seconds,
    )


def words_of(groups: Sequence[Group]) -> str:
    """Which models are in memory together, for the log."""
    if len(groups) == 1:
        return f"its models fit into memory together: {groups[0]}"
    return f"its models take turns in memory: {', or '.join(map(str, groups))}"


def _checked(name: str) -> str:
    try:
        model = parsed("model", name)
    except ValueError as fault:
        raise SettingsError(f"-m {name}: {fault}") from fault
    if split_here(model)[1]:
        raise SettingsError(
            f"-m {name}: adapters belong to one model. Give one -m with "
            f"{BY_NAME['adapters'].flag}, and start another worker for the other models"
        )
    return str(model)


def _guess(num_bytes: int | None) -> float:
    return START_SECONDS + (num_bytes or 0) / READ_BYTES_PER_SECOND

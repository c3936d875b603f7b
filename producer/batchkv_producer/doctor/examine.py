"""Puts the examination together: which checks, in which order, with which bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from batchkv_producer.doctor import (
    fixes,
    home_folder,
    installation,
    linux,
    programs,
    queue_server,
    worker_part,
)
from batchkv_producer.doctor.contract import Check, Finding, fail
from batchkv_producer.doctor.mac import (
    chip,
    crashes,
    launchd,
    memory,
    network,
    one_shot,
    places,
    power,
)
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.doctor.reach import address_of
from batchkv_producer.doctor.runner import run_checks

MACHINE_SECONDS = 10.0  # for the checks of the machine, which run at once
DEVICE_SECONDS = 15.0  # for those of MLX without a model, after them: 30 s in all with a margin
MODEL_SECONDS = 1800.0  # to load a model, which may be downloaded, and to check it
TIER_SECONDS = 60.0
SERVER_SECONDS = 30.0
STRESS_MARGIN_SECONDS = 900.0
WORKER = "worker"  # the entry point of the worker's checks

_MODULES = (chip, installation, linux, memory, home_folder, programs, power, launchd, places)
MACHINE_CHECKS: tuple[Check[Any], ...] = tuple(
    check for module in (*_MODULES, crashes, fixes) for check in module.CHECKS
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to examine besides the machine. Empty texts and None: not wanted."""

    models: tuple[str, ...] = ()
    scheme: str = ""
    url: str = ""
    cache: str = ""
    stress_seconds: float = 0.0
    is_stress_alone: bool = False  # nobody named the model: it only serves the load
    faults: tuple[tuple[str, str], ...] = ()  # (check, why what the environment names is no use)


def examine_all(wanted: Wanted, machine: Machine) -> Iterator[Finding]:
    """Every finding as it is made; what needs a model or a server comes last."""
    yield from run_checks(MACHINE_CHECKS, machine, MACHINE_SECONDS)
    yield from _part(machine, "device", DEVICE_SECONDS, {})
    for name, sentence in wanted.faults:
        found, _, todo = sentence.rpartition(": ")
        yield Finding(name, fail(found or sentence, todo))
    if wanted.url:
        yield from run_checks(server_checks(wanted.url, machine), machine, SERVER_SECONDS)
    values = [{"model": model, "scheme": wanted.scheme} for model in wanted.models]
    cache: dict[str, object] = {"cache": wanted.cache, "queue": wanted.url}
    if wanted.models and not wanted.is_stress_alone:
        for each in values:
            for finding in _part(machine, "model", MODEL_SECONDS, {**each, **cache}):
                is_one = len(values) == 1
                yield finding if is_one else replace(finding, name=_of(finding, each["model"]))
        if len(values) > 1:
            together: dict[str, object] = {"models": wanted.models, "cache": wanted.cache}
            yield from _part(machine, "together", DEVICE_SECONDS, together)
    elif wanted.cache:
        yield from _part(machine, "tiers", TIER_SECONDS, cache)
    if wanted.stress_seconds:
        limit = wanted.stress_seconds + STRESS_MARGIN_SECONDS
        seconds = {"seconds": wanted.stress_seconds}
        yield from _part(machine, "stress", limit, {**values[0], **seconds})


def _of(finding: Finding, model: str) -> str:
    """The name of a check of one of several models."""
    return f"{finding.name}, {model.rstrip('/').rsplit('/', 1)[-1]}"


def server_checks(url: str, machine: Machine) -> list[Check[Any]]:
    """Of the queue's server; on a Mac also from inside launchd."""
    found: list[Check[Any]] = list(queue_server.checks(url))
    address = address_of(url)
    if address is not None:
        host, port = address

        def gather(of: Machine) -> one_shot.LaunchdReach:
            return one_shot.compare(of, host, port)

        def route(of: Machine) -> network.RouteFacts:
            return network.route_facts(of, host)

        found.append(Check("network", route, network.judge_route, ("darwin",)))
        found.append(Check("services' network", gather, one_shot.judge, ("darwin",), 28.0))
    return found


def _part(
    machine: Machine, name: str, seconds: float, values: dict[str, object]
) -> Iterator[Finding]:
    """One part of the worker's checks; none where the worker's packages are not installed."""
    module = worker_part.module_of(WORKER)
    if module is None:
        return
    is_short = seconds <= DEVICE_SECONDS
    request = worker_part.Request(seconds, {"part": name, **values}, may_be_late=is_short)
    yield from worker_part.run_part(module, request, machine.environ)

"""What is refused before a host begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchkv_producer.errors import UsageError
from batchkv_producer.wire.adapter import Adapter
from batchkv_worker.cli import worker_command
from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.backends.memory_budget import MemoryFacts
from batchkv_worker.model.footprint import Machine
from batchkv_worker.queue.models import start
from batchkv_worker.queue.models.start import check_several
from batchkv_worker.settings import WorkerSettings


def test_several_models_are_named_as_one_is() -> None:
    """Blanks around a name are left out."""
    assert check_several(["demo", " m "], WorkerSettings("demo"), None) == ("demo", "m")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (["demo", "demo"], "-m demo: it is named twice"),
        (["demo", " "], "-m  : "),
        (["demo", "m@legal"], "-m m@legal: adapters belong to one model"),
        (["demo", "/no/such/folder"], "there is no model folder /no/such/folder"),
        ([f"m{number}" for number in range(65)], "65 models"),
    ],
)
def test_names_that_cannot_be_are_refused(named: list[str], says: str) -> None:
    """The error has the name and says what is wrong with it."""
    with pytest.raises((SettingsError, UsageError)) as caught:
        check_several(named, WorkerSettings("demo"), None)
    assert says in str(caught.value)


def test_what_belongs_to_one_model_is_refused(tmp_path: Path) -> None:
    """Adapters, a trace and a count of jobs."""
    with_adapter = WorkerSettings("demo", adapters=(Adapter("a", str(tmp_path)),))
    for settings, max_jobs in (
        (with_adapter, None),
        (WorkerSettings("demo", trace="t.json"), None),
        (WorkerSettings("demo"), 5),
    ):
        with pytest.raises(SettingsError, match="one model"):
            check_several(["demo", "m"], settings, max_jobs)


def test_a_shortest_stay_needs_several_models() -> None:
    """With one model the flag would do nothing."""
    done = CliRunner().invoke(worker_command, ["-m", "demo", "--stay-seconds", "5"])
    assert done.exit_code == 2
    assert "--stay-seconds: with one model there is no change" in done.output


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (WorkerSettings("a"), ("--memory", "7", "--weights", "packed")),
        (WorkerSettings("a", weights="packed"), ("--memory", "7")),
    ],
)
def test_workers_beside_each_other_on_a_gpu_are_told_to_keep_weights_packed(
    settings: WorkerSettings,
    own: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where both cannot be unpacked. With the flag, they are told like all the others."""
    gib = 2**30
    weights = {"a": 8 * gib, "b": 8 * gib}
    machine = Machine(
        weights, dict.fromkeys(weights, 30 * gib), MemoryFacts("cuda", 99 * gib, 80 * gib)
    )
    monkeypatch.setattr(start, "read_machine", lambda *_: machine)
    flags = {"weights": settings.weights} if settings.weights != "auto" else {}
    plan = start.make_plan(start.Asked(("a", "b"), "host", "redis://nowhere", flags), settings)
    (group,) = plan.groups
    assert group.memory_bytes
    assert replace(group, memory_bytes=7).flags == own
    assert ("--weights" in plan.command.arguments) == bool(flags)


def test_unpacked_weights_are_refused_where_nothing_unpacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine({"a": 1, "b": 1}, None, MemoryFacts("metal", 2**36, 2**35))
    monkeypatch.setattr(start, "read_machine", lambda *_: machine)
    asked = start.Asked(("a", "b"), "host", "redis://nowhere", {"weights": "unpacked"})
    with pytest.raises(SettingsError, match="--weights unpacked: only NVIDIA GPUs"):
        start.make_plan(asked, WorkerSettings("a", weights="unpacked"))

"""A Mac stays awake while a command works: caffeinate is started, watched, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchkv_producer.cli import cli, run_submit
from batchkv_producer.local.awake import Awake, kept_awake
from batchkv_producer.local.beginning import is_polite
from support.fake_mac import FakeMac
from support.worker_harness import wait_until


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    """A PATH with macOS's programs."""
    made = FakeMac(tmp_path / "mac").install()
    monkeypatch.setenv("PATH", made.path)
    return made


def test_the_assertion_is_held_inside(mac: FakeMac) -> None:
    """Inside runs `caffeinate -i -w PID`, which keeps the display out of it; afterwards none."""
    with kept_awake("darwin") as awake:
        wait_until(lambda: mac.awake)
        assert [arguments for _, arguments in mac.awake] == [f"-i -w {os.getpid()}"]
        awake.hold()  # it is held already
        awake.release()
        assert mac.awake == [] and not awake.is_held
        awake.hold()
        wait_until(lambda: mac.awake)
    assert mac.awake == []


def test_the_assertion_ends_with_a_killed_process(mac: FakeMac, tmp_path: Path) -> None:
    """A process that is killed cannot release it: caffeinate sees that it is gone."""
    code = (
        "import time\nfrom batchkv_producer.local.awake import Awake\n"
        "Awake('darwin').hold()\nprint(flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        wait_until(lambda: mac.awake)
        process.kill()
    wait_until(lambda: not mac.awake)


def test_other_systems_need_none(mac: FakeMac) -> None:
    """On Linux nothing is started."""
    with kept_awake("linux") as awake:
        assert not awake.is_held
    assert not (mac.folder / "caffeinate.log").exists()


def test_a_mac_without_caffeinate_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The program is missing: the work goes on, and one line says that the Mac may sleep."""
    monkeypatch.setenv("PATH", str(tmp_path))
    awake = Awake("darwin")
    for _ in range(2):
        awake.hold()
    awake.release()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "this Mac may sleep when it is idle"
    ]


@pytest.mark.parametrize(("flag", "num_held"), [((), 1), (("--polite",), 0)])
def test_run_keeps_the_mac_awake(
    mac: FakeMac,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: tuple[str, ...],
    num_held: int,
) -> None:
    """`run` holds it from before it submits. A polite run leaves that to its workers."""
    held: list[int] = []

    def running(*given: Any, **_: object) -> None:
        assert given[3].worker_arguments == flag
        if num_held:
            wait_until(lambda: mac.awake)
        held.append(len(mac.awake))
        raise SystemExit(0)

    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_submit, "kept_awake", partial(kept_awake, "darwin"))
    monkeypatch.setattr(run_submit.running, "run", running)
    monkeypatch.setattr(run_submit, "either", _no_session)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    CliRunner().invoke(cli, ["run", str(prompts), "-m", "demo", *flag])
    assert held == [num_held] and mac.awake == []


def _no_session(_: str | None) -> Callable[..., object]:
    from contextlib import nullcontext
    from types import SimpleNamespace

    found = SimpleNamespace(is_embedded=False, client=None, connection=None, url="")
    opened = SimpleNamespace(remote=None, session=found, client=None)
    return nullcontext(opened)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ((), {}, False),
        (("--polite",), {}, True),
        ((), {"BATCHKV_POLITE": "on"}, True),
        ((), {"BATCHKV_POLITE": "off"}, False),
        ((), {"BATCHKV_POLITE": "perhaps"}, False),
    ],
)
def test_politeness_is_a_flag_or_a_variable(
    arguments: tuple[str, ...], environ: dict[str, str], expected: bool
) -> None:
    """`run` reads both, as its workers do. A wrong value is theirs to refuse."""
    assert is_polite(arguments, environ) is expected

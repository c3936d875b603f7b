"""Every shell script of the repository, and the rules that tools/check_tree.py keeps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rooms

ROOT = Path(__file__).resolve().parents[2]
GLOBS = ("deploy/*/*.sh", "tools/*.sh", "producer/*/*/*.sh", ".ci/run")
SCRIPTS = sorted(path for pattern in GLOBS for path in ROOT.glob(pattern))


def test_shellcheck_is_content() -> None:
    """shellcheck finds nothing in any script."""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    command = [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    """The shell that the first line names reads each script without a complaint."""
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    result = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def check_tree(root: Path) -> tuple[int, str]:
    """Exit code and output of the check on a tree."""
    command = [sys.executable, str(ROOT / "tools" / "check_tree.py"), str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("worker/x.py", "", "directly in worker/"),
        ("producer/batchkv_producer/x.py", "import mlx.core as mx", "must not import mlx"),
        ("producer/p/x.py", "from batchkv_worker import y", "must not import batchkv_worker"),
        ("cache_store/p/x.py", "def f():\n    import mlx_lm", "must not import mlx_lm"),
        ("producer/p/x.py", "import_module('mlx')", "must not import mlx"),
        ("worker/p/x.py", "import pickle", "pickle runs code"),
        ("worker/p/x.py", "eval('1')", "eval() runs code"),
        ("worker/p/x.py", "x = 1\n" * 401, "module of 401 lines"),
        ("worker/p/x.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("tests/data.bin", "x" * 1_000_001, "1,000,001 bytes"),
        ("requirements/run.txt", "--index-url https://example.org\n", "no index and no host"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, path: str, text: str, message: str) -> None:
    """Each rule of the tree ends the check with a line that names file and rule."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, output = check_tree(tmp_path)
    assert code == 1
    assert f"{path}" in output
    assert message in output


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "worker/p/x.py",
            "import mlx.core as mx\nfrom batchkv_producer.wire.job import Job\nmx.eval(1)",
        ),
        ("worker/batchkv_worker/demo/model/model.safetensors", "x" * 1_000_001),
        ("cache_store/p/x.py", "import msgpack"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, text: str) -> None:
    """MLX in the worker, its method named eval, and the packaged model break no rule."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert check_tree(tmp_path) == (0, "check_tree: ok\n")


def plant(root: Path, files: dict[str, str]) -> None:
    """A tree of these files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


WORKER, PRODUCER = "worker/batchkv_worker", "producer/batchkv_producer"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {
                f"{WORKER}/kv/slots/a.py": "from batchkv_worker.kv.layers import b",
                f"{WORKER}/kv/layers/b.py": "",
            },
            f"{WORKER}/kv/slots/a.py: imports batchkv_worker.kv.layers.b: "
            "kv.slots must not import from kv.layers",
        ),
        (
            {
                f"{WORKER}/kv/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from batchkv_worker.engine.schedule.scheduler import Scheduler",
                f"{WORKER}/engine/schedule/scheduler.py": "class Scheduler: ...",
            },
            "kv.types must not import from engine.schedule",
        ),
        (
            {
                f"{PRODUCER}/wire/a.py": "def f():\n    import batchkv_producer.cli.b",
                f"{PRODUCER}/cli/b.py": "",
            },
            "wire must not import from cli",
        ),
        ({f"{PRODUCER}/stray.py": ""}, f"{PRODUCER}/stray.py: in no room of ORDER"),
        (
            {
                f"{PRODUCER}/wire/a.py": "from batchkv_producer.wire.b import x",
                f"{PRODUCER}/wire/b.py": "from batchkv_producer.wire import c",
                f"{PRODUCER}/wire/c.py": "import batchkv_producer.wire.a",
            },
            "import cycle: batchkv_producer.wire.a, batchkv_producer.wire.b, "
            "batchkv_producer.wire.c",
        ),
        (
            {f"tests/somewhere/test_{number}.py": "" for number in range(21)},
            "tests/somewhere: 21 modules in one folder (at most 20)",
        ),
        (
            {f"{WORKER}/queue/a.py": "", f"{WORKER}/cli.py": "", "tests/worker/line/test_a.py": ""},
            "tests/worker/line: folders of tests must have the name of a room",
        ),
        (
            {
                f"{WORKER}/queue/a.py": "\n".join(
                    f"from batchkv_worker.kv.slots.m{n} import x" for n in range(13)
                )
            }
            | {f"{WORKER}/kv/slots/m{n}.py": "x = 1" for n in range(13)},
            f"{WORKER}/queue/a.py: imports 13 modules of the project (at most 12)",
        ),
    ],
)
def test_a_breach_of_the_rooms_is_found(tmp_path: Path, files: dict[str, str], line: str) -> None:
    """An import that goes up, a circle, a full or a misnamed folder: one line each."""
    plant(tmp_path, files)
    code, output = check_tree(tmp_path)
    assert (code, output.count("\n")) == (1, 2)
    assert line in output


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import mlx.core as mx\nmx.default_device()\n", "2: mx.default_device depends"),
        ("import mlx.core as mx\nfound = mx.metal.is_available()\n", "2: mx.metal depends"),
        ("from batchkv_worker.kv.backends.cpu import exp2\n", "1: batchkv_worker.kv.backends.cpu"),
        ("def change(layer, kind):\n    layer.__class__ = kind\n", "2: an assignment to __class__"),
    ],
)
def test_only_backends_know_the_device(tmp_path: Path, code: str, message: str) -> None:
    """A module of another room that asks for the device is found; in the backends it may."""
    for room in ("backends", "attention"):
        file = tmp_path / "worker" / "batchkv_worker" / "kv" / room / "some.py"
        file.parent.mkdir(parents=True)
        file.write_text(code)
    code_of_exit, output = check_tree(tmp_path)
    assert code_of_exit == 1
    assert f"kv/attention/some.py:{message}" in output
    assert "kv/backends/some.py" not in output


def test_rooms_may_import_down_and_skip_floors(tmp_path: Path) -> None:
    """Any room may import from any room below it, and twenty modules fill no folder."""
    files = {f"{WORKER}/queue/m{n}.py": "" for n in range(19)}
    files[f"{WORKER}/queue/a.py"] = "from batchkv_worker.kv.types import Parts"
    files[f"{WORKER}/kv/types.py"] = "Parts = tuple"
    files[f"{WORKER}/queue/__init__.py"] = ""
    plant(tmp_path, files)
    assert check_tree(tmp_path) == (0, "check_tree: ok\n")


def test_a_reason_that_is_no_longer_needed_is_found(tmp_path: Path) -> None:
    """An exception to the number of imports goes when its module imports few, or is gone."""
    plant(tmp_path, {f"{WORKER}/queue/a.py": ""})
    allowed = {"batchkv_worker.queue.a": "once", "batchkv_worker.queue.gone": "once"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "ALLOWED_FAN_OUT", allowed)
        found = list(rooms.stale_fan_out(tmp_path, list(tmp_path.rglob("*.py"))))
    assert found == [f"tools/rooms.py: ALLOWED_FAN_OUT need not name {name}" for name in allowed]


FAKE_BATCHKV = """#!/bin/sh
echo "$* $BATCHKV_HOME ${BATCHKV_REDIS_URL-unset}" >>"$LOG"
[ "$1" = run ] || exit 0
while [ "$1" != --output ]; do shift; done
[ "$CODE" = 3 ] || echo '{}' >"$2"
echo "an answer"
exit "$CODE"
"""


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_demo_leaves_its_answers_behind(tmp_path: Path, code: int) -> None:
    """A state of its own, its server stopped, the run's exit code; the file that it names stays."""
    program, log = tmp_path / "batchkv", tmp_path / "log"
    program.write_text(FAKE_BATCHKV)
    program.chmod(0o755)
    result = subprocess.run(
        ["sh", str(ROOT / "tools" / "demo.sh"), str(program), "--kv-scheme", "affine4"],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "LOG": str(log),
            "CODE": str(code),
            "BATCHKV_REDIS_URL": "redis://elsewhere",
            "BATCHKV_HOME": "/elsewhere",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, "an answer\n", "")
    run, stop = (line.split() for line in log.read_text().splitlines())
    home = Path(run[-2])
    assert run[:4] == ["run", "producer/examples/quickstart.jsonl", "--model", "demo"]
    assert run[-4:] == ["--kv-scheme", "affine4", str(home), "unset"]
    assert stop == ["server", "stop", str(home), "unset"]
    assert not home.exists()
    if code == 3:  # nothing was answered
        assert not home.parent.exists()
    else:
        results = Path(run[run.index("--output") + 1])
        assert list(home.parent.iterdir()) == [results] and results.read_text() == "{}\n"
        shutil.rmtree(home.parent)

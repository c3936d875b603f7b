"""A new machine's environment: what tools/bootstrap.sh says and sets, and CI's device on macOS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = ROOT / "tests" / "support" / "on_cpu"
LOGS_ITS_CALL = '#!/bin/sh\necho "SYSTEM_VERSION_COMPAT=$SYSTEM_VERSION_COMPAT $*" >>"$CALLS"\n'


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def bootstrap(tmp_path: Path, system: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run it on a pretended system; what is called is written to ``tmp_path``/calls."""
    script(tmp_path / "bin" / "uname", f"#!/bin/sh\necho {system}\n")
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "bootstrap.sh"), str(tmp_path / "venv"), "worker"],
        env={"PATH": f"{tmp_path / 'bin'}{path}", "CALLS": str(tmp_path / "calls")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("system", "ways"),
    [("Darwin", ("astral.sh/uv", "python.org", "brew")), ("Linux", ("astral.sh/uv", "apt"))],
)
def test_a_machine_without_python_is_told_where_it_comes_from(
    tmp_path: Path, system: str, ways: tuple[str, ...]
) -> None:
    """Without Python and uv it ends with 1 and names uv first; on a Mac python.org before brew."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dirname").symlink_to(shutil.which("dirname") or "")
    ended = bootstrap(tmp_path, system, "")
    assert ended.returncode == 1
    places = [ended.stderr.find(way) for way in ways]
    assert -1 not in places and places == sorted(places)


@pytest.mark.parametrize(("system", "value"), [("Darwin", "0"), ("Linux", "")])
def test_uv_sees_the_real_version_of_macos(tmp_path: Path, system: str, value: str) -> None:
    """On a Mac each call of uv has SYSTEM_VERSION_COMPAT=0; elsewhere it is not set."""
    script(tmp_path / "bin" / "uv", LOGS_ITS_CALL)
    assert bootstrap(tmp_path, system, f":{os.environ['PATH']}").returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert any("pip install" in call for call in calls)
    assert all(call.startswith(f"SYSTEM_VERSION_COMPAT={value} ") for call in calls)


@pytest.mark.parametrize(
    ("version", "is_warned"), [("26.0", True), ("26.1.1", True), ("26.2", False), ("15.6", False)]
)
def test_the_first_versions_of_macos_26_are_warned_of(
    tmp_path: Path, version: str, is_warned: bool
) -> None:
    """MLX's library for macOS 26 needs 26.2, and its package is installed on 26.0 as well."""
    script(tmp_path / "bin" / "uv", LOGS_ITS_CALL)
    script(tmp_path / "bin" / "sw_vers", f"#!/bin/sh\necho {version}\n")
    ended = bootstrap(tmp_path, "Darwin", f":{os.environ['PATH']}")
    assert ended.returncode == 0
    assert ("needs 26.2" in ended.stderr) is is_warned


def test_pip_sees_the_real_version_of_macos(tmp_path: Path) -> None:
    """On a Mac each call of pip has SYSTEM_VERSION_COMPAT=0."""
    script(tmp_path / "bin" / "uv", "#!/bin/sh\nexit 1\n")
    script(tmp_path / "venv" / "bin" / "python", LOGS_ITS_CALL)
    assert bootstrap(tmp_path, "Darwin", f":{os.environ['PATH']}").returncode == 0
    calls = [c for c in (tmp_path / "calls").read_text().splitlines() if "pip install" in c]
    assert len(calls) == 2
    assert all(call.startswith("SYSTEM_VERSION_COMPAT=0 ") for call in calls)


def test_the_macos_job_computes_on_the_cpu() -> None:
    """CI's job on macOS puts the folder that chooses the CPU into PYTHONPATH before any Python."""
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["check"]
    steps = [str(step.get("run", "")) for step in job["steps"]]
    choosing = next(n for n, step in enumerate(steps) if "PYTHONPATH=" in step)
    assert f"$GITHUB_WORKSPACE/{ON_CPU.relative_to(ROOT)}" in steps[choosing]
    assert job["steps"][choosing]["if"] == "runner.os == 'macOS'"
    assert all("python" not in step and "make" not in step for step in steps[:choosing])


def test_each_process_has_the_cpu_as_default_device(tmp_path: Path) -> None:
    """With the folder in PYTHONPATH, importing MLX anywhere sets its default device."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text(
        "cpu = 'the CPU'\ndevice = 'a GPU'\n"
        "def set_default_device(chosen):\n    global device\n    device = chosen\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "import json, mlx.core as mx; print(mx.device)"],
        env={"PYTHONPATH": f"{ON_CPU}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("the CPU\n", "")

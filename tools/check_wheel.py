# ruff: noqa: T201  (a helper that talks to a terminal)
"""Build the wheel, install it as on a producer host, and use it without the source tree.

usage: python tools/check_wheel.py   (the environment's own Python, from anywhere)

A clean environment gets the packages of requirements/run.txt and the wheel, nothing else. The
packages are copied from the environment that runs this, so no network is needed. A package that is
missing in run.txt is noticed at once. Then ``batchkv`` must run without MLX.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "producer" / "examples" / "quickstart.jsonl"
ASSETS = "gateway/batchkv_gateway/page/assets"
PACKAGES = ("batchkv_worker", "batchkv_gateway", "batchkv_producer", "batchkv_cache_store")

# Run in the clean environment: every part of the producer can be imported without MLX.
PROBE = """
import importlib, importlib.util, pkgutil, sys
for name in ("mlx", "mlx_lm", "transformers"):
    assert importlib.util.find_spec(name) is None, f"{name} is importable"
for name in ("batchkv_producer", "batchkv_cache_store"):
    package = importlib.import_module(name)
    assert sys.prefix in package.__file__, f"{name} comes from {package.__file__}"
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
importlib.import_module("batchkv_worker")
importlib.import_module("batchkv_gateway.keys.command")
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel from the tree, with the locked hatchling."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_assets(wheel: Path) -> None:
    """The wheel has all files of the gateway's page."""
    folder = ROOT / "gateway"
    files = (ROOT / ASSETS).rglob("*.*")
    missing = {file.relative_to(folder).as_posix() for file in files} - set(
        zipfile.ZipFile(wheel).namelist()
    )
    if missing:
        sys.exit(f"check_wheel: not in the wheel: {', '.join(sorted(missing))}")


def run(command: list[str], cwd: Path) -> None:
    """Run a command with an empty environment. If it fails, end with its output."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=environment, check=False
    )
    if result.returncode:
        shown = " ".join(command[:2])
        sys.exit(f"check_wheel: {shown} ... failed\n{result.stdout}{result.stderr}")


def copy_distribution(name: str, site_packages: Path) -> None:
    """Copy the files of an installed distribution, without its scripts."""
    files = distribution(name).files or []
    for file in files:
        if ".." in file.parts:
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(str(file.locate()), target)


def locked_names() -> list[str]:
    """The names in the run set, with any marker."""
    text = (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8")
    return re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)


def install(wheel: Path, environment: Path) -> Path:
    """Make the clean environment. Returns its bin directory."""
    uv = shutil.which("uv")
    venv.create(environment, with_pip=uv is None, symlinks=True)
    site_packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )
    for name in locked_names():
        try:
            copy_distribution(name, site_packages)
        except PackageNotFoundError:
            print(f"check_wheel: {name} is not for this machine")
    python = str(environment / "bin" / "python")
    if uv is None:
        installer = [python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check"]
    else:
        installer = [uv, "pip", "install", "--offline", "--python", python]
    run([*installer, "--no-deps", str(wheel)], cwd=environment)
    return environment / "bin"


def main() -> None:
    """Build, install and use the wheel. The first error ends it with a message."""
    with tempfile.TemporaryDirectory(prefix="batchkv-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build_wheel(folder / "dist")
        check_assets(wheel)
        scripts = install(wheel, folder / "venv")
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        prompts = shutil.copy2(EXAMPLE, elsewhere / "prompts.jsonl")
        run([str(scripts / "python"), "-Ic", PROBE], cwd=elsewhere)
        run([str(scripts / "batchkv"), "--help"], cwd=elsewhere)
        for command in ("keys", "serve"):  # without its extra, serve says what to install
            run([str(scripts / "batchkv"), command, "--help"], cwd=elsewhere)
        submit = [str(scripts / "batchkv"), "submit", "--dry-run", "-m", "demo", str(prompts)]
        run(submit, cwd=elsewhere)
        print(f"check_wheel: {wheel.name} works alone, without MLX")


if __name__ == "__main__":
    main()

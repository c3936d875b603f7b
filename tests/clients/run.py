"""Real clients of the gateway, each in an environment of its own: ``make clients``.

    python tests/clients/run.py [--only NAME] [--cache FOLDER] [--keep-versions]

It starts a server, a gateway and a worker of the included model. Then it installs the newest
release of each client and runs its script. If a package that the newest release needs cannot be
had, pip takes an older release. Then the newest one is put over it, and the report names what it
lacks. An environment is kept in the cache folder, and its packages are upgraded each time, unless
``--keep-versions`` is given. promptfoo, which needs npm and
1.4 GB, is used only by ``--only promptfoo``. The exit code is 1 if a client failed or cannot be
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.gateway import Gateway, running_gateway, working
from support.redis_server import running_server

TESTS = Path(__file__).parents[1]
INSTALL_SECONDS, RUN_SECONDS, START_SECONDS = 1200, 900, 120
MODEL = "demo"
# The clients send nothing to their makers.
QUIET = {
    "DEEPEVAL_TELEMETRY_OPT_OUT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A client: its name, what pip or npm installs, the distribution whose version is shown."""

    name: str
    packages: tuple[str, ...]
    distribution: str
    is_npm: bool = False

    @property
    def script(self) -> Path:
        """Its script."""
        return Path(__file__).with_name(f"{self.name}_client.py")


TOOLS = (
    Tool("openai", ("openai",), "openai"),
    Tool("litellm", ("litellm",), "litellm"),
    Tool("inspect", ("inspect-ai", "openai"), "inspect-ai"),
    Tool("lm_eval", ("lm-eval[api]",), "lm-eval"),
    Tool("deepeval", ("deepeval",), "deepeval"),
    Tool("promptfoo", ("promptfoo",), "promptfoo", is_npm=True),
)


class Failed(Exception):
    """A client did not do what it should. The message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a tool is installed, and the Python that runs its script."""

    tool: Tool
    folder: Path

    @property
    def python(self) -> Path:
        """The Python: of the environment, or this one for a tool of npm."""
        return Path(sys.executable) if self.tool.is_npm else self.folder / "bin" / "python"

    def install(self, *, is_kept: bool) -> None:
        """Install or upgrade. Raises Failed if that cannot be done."""
        stamp = self.folder / "installed"
        if stamp.exists() and is_kept:
            return
        self.folder.mkdir(exist_ok=True)
        if self.tool.is_npm:
            npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.folder)]
            _install([*npm, *self.tool.packages])
        else:
            if not self.python.exists():
                venv.create(self.folder, with_pip=True)
            pip = [str(self.python), "-m", "pip", "install", "-q", "--upgrade"]
            _install([*pip, *self.tool.packages])
            _install([*pip, "--no-deps", self.tool.distribution])
        stamp.touch()

    def lacks(self) -> str:
        """What the newest release needs and has in another version; "" if there is nothing."""
        if self.tool.is_npm:
            return ""
        command = [str(self.python), "-m", "pip", "check"]
        found = subprocess.run(command, capture_output=True, text=True)
        lines = found.stdout.splitlines() if found.returncode else []
        own = [line for line in lines if line.startswith(f"{self.tool.distribution} ")]
        return "; ".join(
            (line.partition(" has requirement ")[2] or line).rstrip(".") for line in own
        )

    def version(self) -> str:
        """The version of the tool."""
        name = self.tool.distribution
        if self.tool.is_npm:
            about = self.folder / "node_modules" / name / "package.json"
            return str(json.loads(about.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        command = [str(self.python), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _install(command: list[str]) -> None:
    """Run an installer. Raises Failed."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise Failed(f"does not install: {fault}") from fault
    if found.returncode:
        raise Failed(f"does not install: {(found.stderr.strip().splitlines() or ['?'])[-1]}")


@contextmanager
def demo_worker(redis_url: str, folder: Path) -> Iterator[None]:
    """A worker of the included model in a process of its own."""
    environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url, "BATCHKV_HOME": str(folder)}
    command = [sys.executable, "-m", "batchkv_producer", "worker", "-m", MODEL]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def wait_served(gateway: Gateway) -> None:
    """Wait until a worker has loaded the model, and answers."""
    deadline = time.monotonic() + START_SECONDS
    body = {"model": MODEL, "prompt": "1", "max_tokens": 1}
    request = urllib.request.Request(
        f"{gateway.url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    while True:
        try:
            urllib.request.urlopen(request, timeout=START_SECONDS).close()
            return
        except urllib.error.HTTPError as fault:
            if time.monotonic() > deadline:
                raise Failed(f"the demo model has no worker: {fault.read().decode()}") from fault
            fault.close()
        time.sleep(0.2)


def run_tool(place: Environment, gateway: Gateway, folder: Path) -> None:
    """Run a tool's script. What it prints is shown. Raises Failed if it fails."""
    environment = {
        **{name: value for name, value in os.environ.items() if "PROXY" not in name.upper()},
        "PYTHONPATH": str(TESTS),
        "GATEWAY_URL": gateway.url,
        "GATEWAY_PORT": str(gateway.port),
        "GATEWAY_MODEL": MODEL,
        "TOOL_FOLDER": str(place.folder),
        **QUIET,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    work = folder / place.tool.name
    work.mkdir()
    command = [str(place.python), str(place.tool.script)]
    try:
        code = subprocess.run(command, cwd=work, env=environment, timeout=RUN_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise Failed(f"has not ended after {RUN_SECONDS} seconds") from None
    if code:
        raise Failed(f"ended with exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchkv-clients"
    parser.add_argument("--only", default="", metavar="NAME", help="one client")
    parser.add_argument("--cache", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--keep-versions", action="store_true", help="upgrade nothing")
    options = parser.parse_args()
    only = options.only
    chosen = [tool for tool in TOOLS if tool.name == only or not (only or tool.is_npm)]
    if not chosen:
        parser.error(f"--only must be one of {', '.join(tool.name for tool in TOOLS)}")
    options.cache.mkdir(parents=True, exist_ok=True)
    report = []
    with (
        tempfile.TemporaryDirectory(prefix="clients-", dir="/tmp") as name,
        running_server() as server,
        running_gateway(server.url, Path(name) / "home") as gateway,
        demo_worker(server.url, Path(name) / "home"),
        working(server.url),
    ):
        wait_served(gateway)
        for tool in chosen:
            began = time.monotonic()
            version, python = "", f"{sys.version_info.major}.{sys.version_info.minor}"
            place = Environment(tool, options.cache / f"{tool.name}-{python}")
            try:
                place.install(is_kept=options.keep_versions)
                version = place.version()
                print(f"== {tool.name} {version}", flush=True)
                run_tool(place, gateway, Path(name))
                lacks = place.lacks()
                outcome = f"ok, with packages other than it asks for: {lacks}" if lacks else "ok"
            except Failed as fault:
                outcome = str(fault)
            report.append((tool.name, version, time.monotonic() - began, outcome))
    print()
    for tool_name, version, seconds, outcome in report:
        print(f"{tool_name:10} {version:12} {seconds:6.1f} s  {outcome}")
    return 0 if all(outcome.startswith("ok") for *_, outcome in report) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A gateway in a process of its own. It can be killed, also at a named step of its work.

As a program it is ``batchkv serve`` with changes: DIE_AT names a function of the gateway
(``package.module:Class.function``), before or after whose call the process ends by SIGKILL. Before
the first call of the function that HOLD_AT names, it makes a file ``held`` beside its home folder,
and waits until the file is deleted. The number in a file ``clock`` there is added to its clock, in
seconds. PATCH has other values for constants, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # as a program it needs no client
    from openai import OpenAI

    from support.fake_worker import FakeWorker

START_SECONDS = 30.0
PATCHED = tuple(
    f"batchkv_gateway.{name}"
    for name in (
        *("http.limits", "http.server", "batches.driver", "batches.steps"),
        *("live.answering", "live.calls", "webhooks.sender", "cli"),
    )
)


class Gateway:
    """One process. ``home`` is its home folder."""

    def __init__(
        self,
        redis_url: str,
        home: Path,
        *flags: str,
        die_at: str = "",
        hold_at: str = "",
        **patch: Any,
    ) -> None:
        environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url, "BATCHKV_HOME": str(home)}
        environment |= {"DIE_AT": die_at, "HOLD_AT": hold_at, "PATCH": json.dumps(patch)}
        self.held, self.clock = home.with_name("held"), home.with_name("clock")
        self.log = home.parent / f"gateway-{time.monotonic_ns()}.log"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "serve", "--port", "0", *flags],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"serving (https?://\S+:(\d+)/v1)", line)
        if found:
            self.url, self.port = found[1], int(found[2])
            return
        self.stop()
        # Its background work begins before it serves, and may come to DIE_AT first.
        was_killed = self.process.returncode == -signal.SIGKILL
        assert die_at and was_killed, (line, self.log.read_text())

    def client(self, key: str = "any", **more: Any) -> OpenAI:
        """OpenAI's own client of this gateway. Each answer that it gets is checked strictly."""
        from openai import DefaultHttpxClient, OpenAI

        from support.openai_objects import check_response

        if "http_client" not in more:
            hooks = {"response": [check_response]}
            more["http_client"] = DefaultHttpxClient(event_hooks=hooks)
        return OpenAI(base_url=self.url, api_key=key, **{"timeout": 30, **more})

    def wait_killed(self) -> None:
        """Wait until the process has ended by DIE_AT."""
        assert self.process.wait(START_SECONDS) == -signal.SIGKILL, self.log.read_text()

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


@contextmanager
def running_gateway(
    redis_url: str, home: Path, *flags: str, die_at: str = "", hold_at: str = "", **patch: Any
) -> Iterator[Gateway]:
    """A gateway for the length of a ``with`` block. ``patch``: constants of ``PATCHED``."""
    found = Gateway(redis_url, home, *flags, die_at=die_at, hold_at=hold_at, **patch)
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def working(redis_url: str, model: str = "fake") -> Iterator[FakeWorker]:
    """A fake worker in a thread, which echoes prompts."""
    from support.fake_worker import FakeWorker

    before = os.environ.get("BATCHKV_REDIS_URL")
    os.environ["BATCHKV_REDIS_URL"] = redis_url
    try:
        worker = FakeWorker(model, f"fake-{time.monotonic_ns()}", "affine8")
    finally:
        os.environ.pop("BATCHKV_REDIS_URL")
        if before is not None:
            os.environ["BATCHKV_REDIS_URL"] = before
    thread = threading.Thread(target=worker.work)
    thread.start()
    try:
        yield worker
    finally:
        worker.stopping.set()
        thread.join(20)
        worker.connection.close()


def chat_line(custom_id: str, text: str = "hi", **more: Any) -> str:
    """One line of a batch's file."""
    body = {"model": "fake", "messages": [{"role": "user", "content": text}], **more}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line)


def chat_file(*custom_ids: str) -> bytes:
    """A batch's file."""
    return "".join(f"{chat_line(each, f'text of {each}')}\n" for each in custom_ids).encode()


def _owner_of(place: str) -> tuple[Any, str, Any]:
    """The module or class of ``package.module:Class.function``, its name there, and itself."""
    module_name, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def _die_at(place: str) -> None:
    """Let the process end when a function is called, or after its call (``after ...``)."""
    is_after = place.startswith("after ")
    owner, name, whole = _owner_of(place.removeprefix("after "))

    def dying(*args: Any, **kwargs: Any) -> None:
        if is_after:
            whole(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def _hold_at(place: str) -> None:
    """Let a function wait before its first call."""
    owner, name, whole = _owner_of(place)
    held = Path(os.environ["BATCHKV_HOME"]).with_name("held")

    def holding(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, whole)
        held.touch()
        while held.exists():
            time.sleep(0.01)
        return whole(*args, **kwargs)

    setattr(owner, name, holding)


def _shift_clock() -> None:
    """Let this process have another time than the machine."""
    clock, real = Path(os.environ["BATCHKV_HOME"]).with_name("clock"), time.time

    def shifted() -> float:
        try:
            return real() + float(clock.read_text())
        except FileNotFoundError:
            return real()

    time.time = shifted


def _patch(constants: dict[str, float]) -> None:
    """Set constants of the gateway's modules that have them."""
    for module_name in PATCHED:
        module = importlib.import_module(module_name)
        for name in constants.keys() & vars(module).keys():
            setattr(module, name, constants[name])


if __name__ == "__main__":
    from batchkv_producer.cli import main

    _patch(json.loads(os.environ["PATCH"]))
    _shift_clock()
    if os.environ.get("DIE_AT"):
        _die_at(os.environ["DIE_AT"])
    if os.environ.get("HOLD_AT"):
        _hold_at(os.environ["HOLD_AT"])
    main()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """(certificate, private key) for 127.0.0.1, as files in the folder. Needs openssl."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    command = ["openssl", *made.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key

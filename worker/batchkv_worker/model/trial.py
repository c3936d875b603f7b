"""Tries a model's tokenizer and chat template in another process, with limits.

A template is a program. It or the tokenizer can use all memory or never end. So before a worker
loads a model's files for the first time, another process loads the tokenizer and renders one
message. If that exceeds a limit, the process is ended and the model is refused. Faults that only
some messages cause are not found here.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from batchkv_producer.errors import UsageError
from batchkv_producer.server.home import home_from_environment
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.errors import ModelError
from batchkv_worker.model import load_progress as loading

MAX_BYTES = 4 * 2**30  # a tokenizer of 256,000 tokens takes some hundred megabytes
MAX_SECONDS = 300.0
POLL_SECONDS = 0.05
MAX_KNOWN_BYTES = 2**20
KNOWN_NAME = "rehearsed.txt"  # in the home folder: fingerprints of models that passed


def check(name: str, folder: Path, fingerprint: str) -> None:
    """Try the tokenizer and the template of a model's folder; raises ModelError.

    The included model, and files that passed before, are not tried. A plain failure raises nothing,
    because the loader will report it better.
    """
    if folder == MODEL_PATH or fingerprint in _known():
        return
    loading.report("trying the tokenizer and the chat template")
    # -P: a file named torch.py in the working directory must not be imported.
    command = [sys.executable, "-P", "-m", "batchkv_worker.model.trial", str(folder.absolute())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        start_new_session=True,  # so that a Ctrl-C does not count as a fault of the model
    )
    try:
        excess = _watch(process)
    finally:
        process.kill()
        process.wait()
    if excess:
        raise ModelError(f"model {name!r} is refused: its tokenizer or chat template {excess}")
    if process.returncode == 0 and fingerprint:
        _remember(fingerprint)


def _watch(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of the process. Returns the limit that it exceeded, or ""."""
    deadline = time.monotonic() + MAX_SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"takes longer than {MAX_SECONDS:g} s for one message"
        if _memory_bytes(process.pid) > MAX_BYTES:
            return f"takes more than {MAX_BYTES / 2**30:g} GiB for one message"
        time.sleep(POLL_SECONDS)
    if process.returncode < 0:
        return f"ends the process that tries it ({signal.Signals(-process.returncode).name})"
    return ""


def _memory_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if unknown."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]
        return int(pages) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        pass
    asked = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    kilobytes = asked.stdout.strip()
    return int(kilobytes) * 1024 if kilobytes.isdecimal() else 0


def _known() -> set[str]:
    with suppress(OSError, UsageError), open(_known_file(), "rb") as file:
        return set(file.read(MAX_KNOWN_BYTES).decode("ascii", "replace").split())
    return set()


def _remember(fingerprint: str) -> None:
    # If the home folder is read-only, the model is tried each time.
    with suppress(OSError, UsageError):
        descriptor = os.open(_known_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "wb") as file:
            file.write(fingerprint.encode() + b"\n")


def _known_file() -> Path:
    return home_from_environment().path / KNOWN_NAME


def run_trial(folder: str) -> None:
    """Load the tokenizer and render one message. This runs in the other process."""
    most = int(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))  # holds even if the worker has died
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "How are you?"}]
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)


if __name__ == "__main__":
    run_trial(sys.argv[1])

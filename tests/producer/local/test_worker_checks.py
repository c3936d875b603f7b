"""``batchkv run`` refuses a model that does not exist, before anything is queued."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.errors import UsageError
from batchkv_producer.local.worker_checks import check_model_name


class _Hub(BaseHTTPRequestHandler):
    """A hub that has no repository; it answers as the real one does."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_mistyped_model_is_refused_before_anything_is_queued(
    hub: str, redis_url: str, redis_connection: Redis, tmp_path: Path
) -> None:
    """``run`` asks the hub for a name that is no folder here."""
    source = tmp_path / "p.txt"
    source.write_text("hello\n")
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("BATCHKV_", "HF_"))}
    places = {"BATCHKV_REDIS_URL": redis_url, "BATCHKV_HOME": str(tmp_path / "home")}
    places |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "batchkv_producer", "run", str(source), "-m", "mlx/Qwen-TYPO"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**keep, **places}, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip() == (
        "batchkv: there is no model mlx/Qwen-TYPO: it is neither a folder here nor a repository of "
        "the Hugging Face hub that this user may read. Check the name; nothing was queued"
    )
    assert Client(redis_connection).list_batches() == []


@pytest.mark.parametrize(
    ("fault", "is_refused"),
    [
        (OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled."), True),
        (ConnectionError("[Errno -2] Name or service not known\nmore"), True),
        (ConnectionError(""), True),
        (TimeoutError("timed out"), False),
        (ValueError("502"), False),
    ],
)
def test_an_offline_machine_refuses_a_model_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, is_refused: bool
) -> None:
    """Its workers cannot download one. A hub that is slow or fails refuses nothing."""

    def model_info(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(HfApi, "model_info", model_info)
    if not is_refused:
        return check_model_name("mlx/Qwen-TYPO")
    with pytest.raises(UsageError, match=r"cannot be reached .*; nothing was queued$"):
        check_model_name("mlx/Qwen-TYPO")
    check_model_name("demo")
    return None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("demmo", "demo"),
        ("mlx-community/Qwen3-4B-4bti", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3-4b-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("mlx-comunity/Gone-1B", ""),  # its files are not here any more
        ("something-else", ""),
    ],
)
def test_a_name_that_is_like_one_of_this_machine_is_answered_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, meant: str
) -> None:
    """A model's owner may be left out, and a letter be wrong."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name, is_whole in (("Qwen3-4B-4bit", True), ("Gone-1B", False)):
        repository, commit = tmp_path / f"models--mlx-community--{name}", 40 * "a"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        if is_whole:
            (repository / "snapshots" / commit).mkdir(parents=True)

    def model_info(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(UsageError) as raised:
        check_model_name(given)
    hint = f" {meant} is on this machine: check the name, name a" if meant else " Check the name, "
    assert hint in str(raised.value)

"""Downloading a model, with the hub's own client and a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.model import load_progress as loading
from batchkv_worker.model.loader import load
from support import tiny_models  # noqa: F401 - first: it loads the BLAS

REPOSITORY = "somebody/small-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(BaseHTTPRequestHandler):
    """The requests of a client that downloads one repository."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in self.files.items()
            ]
            self._answer(json.dumps(found).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
            self._answer(json.dumps(info).encode(), {"Content-Type": "application/json"})
        else:
            data = self.files[path.rpartition("/")[2]]
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
            self._answer(data, headers)

    do_HEAD = do_GET

    def _answer(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    """The hub's URL; it has the files of the included model."""
    SmallHub.files = {file.name: file.read_bytes() for file in MODEL_PATH.iterdir()}
    with ThreadingHTTPServer(("127.0.0.1", 0), SmallHub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_said_as_it_goes(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The download reports its bytes, then the loading; the client's own bars are not drawn."""
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this hub is here
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    said: list[str] = []
    with loading.listening(said.append):
        assert load(REPOSITORY).context == 8192
    downloading = [text for text in said if text.startswith("downloading ") and "MB" in text]
    total = downloading[-1].rpartition(" of ")[2]
    assert downloading[-1] == f"downloading {total.split()[0]} of {total}"
    assert said[0] == "loading" and said[-1].startswith("loading ")
    assert "%" not in capsys.readouterr().err

"""RQ's configuration module: the URL from the environment or a file, and the model's queue."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from batchkv_producer.wire import redis_keys


def load(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, Any]:
    """The names in capitals that RQ would read."""
    for name in ("BATCHKV_REDIS_URL", "BATCHKV_REDIS_URL_FILE", "BATCHKV_MODEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    values = runpy.run_module("batchkv_worker.rq_config")
    return {name: value for name, value in values.items() if name.isupper()}


def test_url_and_queue_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL is passed on, and the queue is the model's, so that it need not be typed."""
    found = load(monkeypatch, BATCHKV_REDIS_URL="redis://h:1/2", BATCHKV_MODEL="demo")
    assert found == {"REDIS_URL": "redis://h:1/2", "QUEUES": [redis_keys.queue_name("demo")]}


def test_the_url_may_stand_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A password then stands in no process list and no environment."""
    path = tmp_path / "url"
    path.write_text("rediss://:secret@h:1\n")
    path.chmod(0o600)
    found = load(monkeypatch, BATCHKV_REDIS_URL_FILE=str(path))
    assert found == {"REDIS_URL": "rediss://:secret@h:1"}


def test_nothing_set_leaves_rq_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """``rq worker --url`` works with the module as without it."""
    assert load(monkeypatch) == {}


@pytest.mark.parametrize("text", ["", "http://:secret@h"])
def test_a_bad_file_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """The message names the fault and never the password."""
    path = tmp_path / "url"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        load(monkeypatch, BATCHKV_REDIS_URL_FILE=str(path))
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("batchkv: ")
    assert error.count("\n") == 1
    assert "secret" not in error


def test_a_missing_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that is not there ends with its name on standard error."""
    with pytest.raises(SystemExit):
        load(monkeypatch, BATCHKV_REDIS_URL_FILE="/nowhere/url")
    assert "/nowhere/url" in capsys.readouterr().err

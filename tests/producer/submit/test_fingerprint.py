"""The fingerprint of a model's files: what it covers, what it costs, when a file is read again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchkv_producer.submit import fingerprint
from batchkv_producer.submit.fingerprint import (
    CACHE_NAME,
    locate,
    of_folder,
    of_model,
    progress_to,
)

FILES = {
    "model.safetensors": b"weights",
    "config.json": b"{}",
    "generation_config.json": b'{"temperature": 0}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, in which nothing is known yet."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder that was written an hour ago."""
    return written(tmp_path / "model")


def written(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the files that are hashed from now on; ``ctime`` of all counts as long past."""
    reads, real = [], fingerprint.blake3

    def counting(*args: object, **options: object) -> object:
        if options:
            reads.append(1)
        return real(*args, **options)

    counting.AUTO = real.AUTO  # type: ignore[attr-defined]
    monkeypatch.setattr(fingerprint, "blake3", counting)
    return reads


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_makes_answers_counts(model: Path, name: str) -> None:
    """Another content, another fingerprint; the old content, the old fingerprint."""
    before = of_folder(model)
    assert len(before) == 32
    (model / name).write_bytes(FILES[name] + b" ")
    assert of_folder(model) != before
    (model / name).write_bytes(FILES[name])
    assert of_folder(model) == before


def test_a_renamed_file_counts_and_others_do_not(model: Path, tmp_path: Path) -> None:
    """What a worker does not read changes nothing; copies of a folder are equal."""
    before = of_folder(model)
    for name in ("README.md", ".DS_Store", "pytorch_model.bin", "model.safetensors.index.json~"):
        (model / name).write_bytes(b"new")
    assert of_folder(model) == before == of_folder(written(tmp_path / "copy"))
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    assert of_folder(model) != before


def test_a_folder_without_weights_has_none(model: Path) -> None:
    """Of half a download nobody can say what it will be."""
    (model / "model.safetensors").unlink()
    assert of_folder(model) == ""


def test_files_are_read_once(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is kept by what the system tells of a file, and what was written anew is read."""
    monkeypatch.setattr(fingerprint, "RECENT_SECONDS", -10.0)
    reads = count_reads(monkeypatch)
    before = of_folder(model)
    assert len(reads) == len(FILES)
    assert of_folder(model) == before and len(reads) == len(FILES)
    times = os.stat(model / "config.json")
    (model / "config.json").write_bytes(b"[]")  # as long, and its time is set back
    os.utime(model / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert of_folder(model) != before and len(reads) == len(FILES) + 1
    assert (home / CACHE_NAME).stat().st_mode & 0o077 == 0


def test_reading_a_large_folder_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who waits for files to be read is told what is read, and how much of it; else nobody is."""
    notes: list[str] = []
    with progress_to(notes.append):
        of_folder(model)
        assert notes == []  # it takes less than a second
        monkeypatch.setattr(fingerprint, "QUIET_SECONDS", 0.0)
        monkeypatch.setattr(fingerprint, "TELL_SECONDS", 0.0)
        of_folder(model)
    assert len(notes) == len(FILES)
    assert notes[-1].startswith(f"reading the files of {model} for their fingerprint")
    assert notes[-1].endswith("0.0 of at most 0.0 GB")


def test_a_file_that_has_just_changed_is_not_believed(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within one tick of its clock."""
    reads = count_reads(monkeypatch)
    of_folder(model)
    of_folder(model)
    assert len(reads) == 2 * len(FILES)
    assert not (home / CACHE_NAME).exists()


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_cache_costs_reading_again(
    model: Path, home: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in it."""
    monkeypatch.setattr(fingerprint, "RECENT_SECONDS", -10.0)
    before = of_folder(model)
    (home / CACHE_NAME).write_bytes(damage)
    assert of_folder(model) == before


def test_a_home_that_cannot_be_written_does_no_harm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is the same without the cache."""
    before = of_folder(model)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(fingerprint, "RECENT_SECONDS", -10.0)
    assert of_folder(model) == before


def make_snapshot(hub: Path, commit: str, blobs: dict[str, str]) -> None:
    """A repository as Hugging Face's client keeps it, with blobs that are not there."""
    repository = hub / "models--some--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for name, blob in blobs.items():
        (repository / "blobs" / blob).write_bytes(b"")
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_a_snapshot_is_known_by_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is read, and another revision is another model only if its blobs are."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    reads = count_reads(monkeypatch)
    assert of_model("some/model") == ""
    make_snapshot(tmp_path, "1" * 40, {"model.safetensors": "a" * 64, "config.json": "b" * 40})
    first = of_model("some/model")
    make_snapshot(tmp_path, "2" * 40, {"model.safetensors": "a" * 64, "config.json": "b" * 40})
    assert first and of_model("some/model") == first
    make_snapshot(tmp_path, "3" * 40, {"model.safetensors": "a" * 64, "config.json": "c" * 40})
    assert of_model("some/model") not in ("", first)
    assert reads == []


def test_half_a_snapshot_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While files of weights are missing that its index names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    blobs = {"model-1.safetensors": "a" * 64, "model.safetensors.index.json": "b" * 40}
    make_snapshot(tmp_path, "1" * 40, blobs)
    snapshot = locate("some/model")
    assert snapshot is not None and of_model("some/model")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of_model("some/model") == ""
    (snapshot / "model-2.safetensors").symlink_to("../../blobs/" + "a" * 64)
    assert of_model("some/model")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "{0}/x", "HF_HOME": "{0}/y"}, "x"),
        ({"HF_HOME": "{0}/y"}, "y/hub"),
        ({"XDG_CACHE_HOME": "{0}/z"}, "z/huggingface/hub"),
    ],
)
def test_the_hub_is_where_its_client_has_it(
    tmp_path: Path, variables: dict[str, str], place: str
) -> None:
    """The same variables name it, in the same order."""
    make_snapshot(tmp_path / place, "1" * 40, {"model.safetensors": "a" * 64})
    said = {name: value.format(tmp_path) for name, value in variables.items()}
    assert locate("some/model", said) is not None
    assert locate("other/model", said) is None


@pytest.mark.parametrize("name", ["fake", "a/b/c", "../x", "~nobody/x", "a\0b", "x" * 5000, ""])
def test_what_is_not_here_is_not_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nothing here answers to raises nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert of_model(name) == ""


def test_the_demo_has_one() -> None:
    """The shipped model is a folder like others, found without importing MLX."""
    assert len(of_model("demo")) == 32

"""The fingerprint of a model's files: 32 hex digits, equal on every machine. No MLX.

It covers the names and contents of all files that decide the answers: weights, configuration,
generation defaults, tokenizer and chat templates. In a snapshot of the Hugging Face cache, files
are links to blobs that are named by their digest, so nothing is read. Elsewhere each file is hashed
once. The digest is cached in the home folder, by the file's identity, size and times.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3

from batchkv_producer.errors import BatchkvError
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.submit.adapter_folders import folder_of
from batchkv_producer.wire.adapter import split_here

WEIGHTS = "model*.safetensors"
PATTERNS = (
    *(WEIGHTS, "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "*.model"),
    *("chat_template*", "*.jinja", "additional_chat_templates/*.jinja", "*processor_config.json"),
)
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
CACHE_NAME = "fingerprints.json"
DIGEST_BYTES = 16
READ_BYTES = 2**24
MAX_KEPT = 2000  # digests of files
# seconds: a file that changed so recently may change again within one tick of its clock, unseen
RECENT_SECONDS = 2.0

QUIET_SECONDS = 1.0  # before the first note on files that are read
TELL_SECONDS = 5.0

_NOTE: ContextVar[Callable[[str], None] | None] = ContextVar("note", default=None)
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def of_model(name: str) -> str:
    """The fingerprint of the files that a worker would load by this name now; "" if unknown.

    Nothing is downloaded: a repository is read from the local cache of Hugging Face. A model whose
    weights are not on this machine has no fingerprint. ``MODEL@NAME`` is a model with an adapter;
    without the adapter's folder it has none either.
    """
    model, adapter = split_here(name)
    if adapter:
        folder_name, weights = folder_of(adapter), of_model(model)
        try:
            return of_adapter(weights, Path(folder_name).expanduser()) if folder_name else ""
        except (RuntimeError, OSError):
            return ""
    folder = locate(name)
    if folder is None:
        return ""
    try:
        return of_folder(folder)
    except OSError:
        return ""


def of_adapter(weights: str, folder: Path) -> str:
    """The fingerprint of a model with an adapter; ``weights`` is the model's own. Raises OSError.

    It depends on the contents of the adapter's files, not on its name. "" if ``weights`` is "".
    """
    if not weights:
        return ""
    files = [folder / name for name in ADAPTER_FILES]
    cache = _Cache.load(_Progress(folder, sum(file.stat().st_size for file in files)))
    whole = blake3(f"model {weights}\n".encode())
    for file in files:
        whole.update(f"{file.name}={cache.digest(file)}\n".encode())
    cache.save()
    return whole.hexdigest(DIGEST_BYTES)


def locate(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of a model's files on this machine, or None."""
    if name == "demo":
        package = importlib.util.find_spec("batchkv_worker")
        places = (package.submodule_search_locations if package else None) or []
        return next((Path(place) / "demo" / "model" for place in places), None)
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    except (RuntimeError, OSError, ValueError):  # an unknown ~user; a name too long or with a NUL
        return None
    parts = name.split("/")
    if len(parts) > 2 or not all(re.fullmatch(r"[\w.-]+", part, re.ASCII) for part in parts):
        return None
    repository = _hub(environ) / "--".join(("models", *parts))
    try:
        commit = (repository / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def names_here(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The repositories of the Hugging Face hub whose files are on this machine, by name."""
    try:
        found = [place.name.split("--") for place in _hub(environ).iterdir()]
    except OSError:
        return []
    names = sorted("/".join(parts[1:]) for parts in found if parts[0] == "models" and parts[1:])
    return [name for name in names if locate(name, environ) is not None]


def of_folder(folder: Path) -> str:
    """The fingerprint of a model's folder; "" when it lacks weights. Raises OSError."""
    names = _names(folder)
    weights = {name for name in names if fnmatchcase(name, WEIGHTS)}
    blobs = {name: blob for name in names if (blob := _blob_name(folder / name))}
    if not weights or (blobs and not _indexed(folder) <= weights):
        return ""
    plain = [folder / name for name in names if name not in blobs]
    cache = _Cache.load(_Progress(folder, sum(file.stat().st_size for file in plain)))
    whole = blake3()
    for name in names:
        digest = blobs.get(name) or cache.digest(folder / name)
        whole.update(f"{len(name.encode())}:{name}={digest}\n".encode())
    cache.save()
    return whole.hexdigest(DIGEST_BYTES)


def _indexed(folder: Path) -> set[str]:
    """The files of weights that a complete snapshot has, by its own index."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return set()


def _names(folder: Path) -> list[str]:
    """The names of the files that the fingerprint covers, in order."""
    found = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    more = folder / "additional_chat_templates"
    if more.is_dir():
        found += [f"{more.name}/{entry.name}" for entry in os.scandir(more) if entry.is_file()]
    return sorted(name for name in found if _counts(name))


def _counts(name: str) -> bool:
    hidden = name.startswith(".") or name.endswith("~")
    return not hidden and any(fnmatchcase(name, pattern) for pattern in PATTERNS)


def _hub(environ: Mapping[str, str]) -> Path:
    """The folder in which Hugging Face's client stores repositories."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _blob_name(file: Path) -> str:
    """The digest in the name that a link into the Hugging Face cache points to, or ""."""
    try:
        target = os.readlink(file)
    except OSError:
        return ""
    head, blob = os.path.split(target)
    return f"blob {blob}" if os.path.basename(head) == "blobs" and _BLOB.fullmatch(blob) else ""


@contextmanager
def progress_to(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``note`` gets a sentence if it takes over a second to read a model's files."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)


@dataclass(slots=True)
class _Progress:
    """Counts the bytes of a model's files that were read."""

    folder: Path
    num_bytes: int  # bytes of all files that may have to be read
    num_read: int = 0
    next_at: float = field(default_factory=lambda: time.monotonic() + QUIET_SECONDS)

    def add(self, num_bytes: int) -> None:
        self.num_read += num_bytes
        note = _NOTE.get()
        if note is not None and time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + TELL_SECONDS
            done, total = self.num_read / 1e9, self.num_bytes / 1e9
            note(
                f"reading the files of {self.folder} for their fingerprint, which is then kept: "
                f"{done:.1f} of at most {total:.1f} GB"
            )


@dataclass(slots=True)
class _Cache:
    """Digests of files by inode, size and times. If this is damaged, files are hashed again."""

    path: Path | None
    progress: _Progress
    known: dict[str, str] = field(default_factory=dict)
    is_new: bool = False

    @classmethod
    def load(cls, progress: _Progress) -> _Cache:
        try:
            path = home_from_environment().path / CACHE_NAME
        except BatchkvError:  # there is no home
            return cls(None, progress)
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return cls(path, progress)
        items = found.items() if isinstance(found, dict) else ()
        good = {k: v for k, v in items if isinstance(v, str) and _DIGEST.fullmatch(v)}
        return cls(path, progress, good)

    def digest(self, file: Path) -> str:
        """BLAKE3 of a file's content, read only if it may have changed since."""
        with file.open("rb") as stream:
            before = os.fstat(stream.fileno())
            key = _key(before)
            if known := self.known.pop(key, ""):
                self.known[key] = known  # the last used are at the end
                return known
            content = blake3(max_threads=blake3.AUTO)
            began = time.time()
            while block := stream.read(READ_BYTES):
                content.update(block)
                self.progress.add(len(block))
            found = content.hexdigest()
            changed = max(before.st_mtime, before.st_ctime)
            if _key(os.fstat(stream.fileno())) == key and changed < began - RECENT_SECONDS:
                self.known[key], self.is_new = found, True
        return found

    def save(self) -> None:
        """Write the new digests, all or none. A home folder that cannot be written does no harm."""
        if not self.is_new or self.path is None:
            return
        kept = dict(list(self.known.items())[-MAX_KEPT:])
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{CACHE_NAME}.")
            try:
                with os.fdopen(handle, "w") as stream:
                    json.dump(kept, stream)
                os.replace(name, self.path)
            except OSError:
                os.unlink(name)


def _key(facts: os.stat_result) -> str:
    """A file's identity and when it changed. ``ctime`` cannot be set back as ``mtime`` can."""
    times = (facts.st_mtime_ns, facts.st_ctime_ns)
    return ":".join(map(str, (facts.st_dev, facts.st_ino, facts.st_size, *times)))

"""Loads a model and finds its dtype, context, caches and defaults for the engine.

``load`` accepts a Hugging Face repository, a local folder or ``demo``, and returns a
``LoadedModel``. A model that cannot be served is refused with one sentence, before any job starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten

from batchkv_producer.submit import fingerprint
from batchkv_producer.wire.maker import Maker
from batchkv_worker.demo import MODEL_PATH as DEMO_PATH
from batchkv_worker.errors import ModelChangedError, ModelError
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.layers.discover import CacheTree, discover
from batchkv_worker.model import load_progress as loading
from batchkv_worker.model import trial
from batchkv_worker.model.added_tokens import added_tokens

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
READ_BYTES = 2**28  # of weights between two reports of progress
MAX_CONFIG_BYTES = 2**24
MAX_LAYERS = 4096  # of any count of layers in a config; known models have far fewer
_LAYERS = re.compile(r"(layers?|blocks|depth)$")
_DEFAULT_CONTEXT = 8192  # for a config that names no limit


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    ``context``: the most tokens of prompt and answer together. ``weight_bytes``: of its parameters.
    ``defaults``: the sampling values of its ``generation_config.json``. ``vocabulary``: the number
    of token ids with a row in the embedding. ``special_tokens``: ids that texts leave out.
    ``config``: its ``config.json``. ``adapter``: the name of an adapter in its weights; both are
    part of the cache's identity. ``fingerprint``: of the loaded files. ``named``: of the files that
    the name meant on this machine then. ``weight_files`` tells places and times of the weights'
    files from others. "" is unknown.
    """

    name: str
    model: Any
    tokenizer: Any
    dtype: mx.Dtype
    caches: CacheTree
    context: int
    weight_bytes: int
    defaults: dict[str, Any]
    vocabulary: int = 2**31 - 1
    special_tokens: frozenset[int] = frozenset()
    config: dict[str, Any] = field(default_factory=dict)
    adapter: str = ""
    fingerprint: str = ""
    named: str = ""
    weight_files: str = ""

    @property
    def float_bytes(self) -> int:
        """Bytes of one number in the model's dtype."""
        return int(self.dtype.size)

    def maker(self, scheme: str) -> Maker:
        """The maker (weights, scheme, dtype) of answers under a KV scheme."""
        return Maker(self.fingerprint, scheme, dtype_class(self.dtype))

    def has_changed(self) -> bool:
        """Whether the name means other files now. For any thread; it may read all of them."""
        return bool(self.named) and fingerprint.of_model(self.name) not in ("", self.named)


def dtype_class(dtype: mx.Dtype) -> str:
    """``float32``, or ``half`` for the two of 16 bits, whose answers differ by rounding alone."""
    return "float32" if dtype == mx.float32 else "half"


def load(
    name: str,
    dtype: str = "auto",
    *,
    is_careful: bool = False,
    before_reading: Callable[[Any, mx.Dtype], object] | None = None,
) -> LoadedModel:
    """Load ``name``; raises ModelError with the reason if it cannot be served.

    ``dtype`` "auto" is float32 on a CPU, where half precision is slow, else the weights' own.
    ``is_careful``: another process first tries the tokenizer and the chat template (``trial``).
    ``before_reading`` gets the model and its dtype before its weights are read. It may replace
    layers.
    """
    loading.report("loading")
    path = _find(name)
    before, named = _fingerprint(path), fingerprint.of_model(name)
    files = _weight_files(path)
    _check_layers(name, path)
    if is_careful:
        trial.check(name, path, before)
    try:
        model, tokenizer, config = mlx_lm.utils.load(
            str(path), tokenizer_config={"trust_remote_code": False}, return_config=True, lazy=True
        )
        _cast(model, dtype)
        model.eval()
        weights = [array for _, array in tree_flatten(model.parameters())]
        kind = _float_dtype(weights)
        if before_reading is not None:
            before_reading(model, kind)
            weights = [array for _, array in tree_flatten(model.parameters())]
        _read(weights)
    except ModelError:
        raise
    except Exception as fault:  # tokenizers, missing packages and model code raise anything
        if is_device_fault(fault):
            raise
        raise ModelError(f"model {name!r} cannot be loaded from {path}: {_first(fault)}") from fault
    if _fingerprint(path) != before:
        raise ModelChangedError(f"the files of model {name!r} changed while they were loaded")
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        dtype=kind,
        caches=discover(name, model),
        context=_context(config),
        weight_bytes=sum(array.nbytes for array in weights),
        defaults=_generation_defaults(path),
        vocabulary=_vocabulary(name, model),
        special_tokens=_special_tokens(tokenizer),
        config=config,
        fingerprint=before,
        named=named,
        weight_files=files,
    )


def _fingerprint(path: Path) -> str:
    try:
        return fingerprint.of_folder(path)
    except OSError as fault:
        raise ModelError(f"{fault.filename or path}: {fault.strerror or fault}") from fault


def _weight_files(path: Path) -> str:
    """A digest of where the weights are, and of when they changed; they are not read.

    "" is unknown.
    """
    facts = []
    try:
        for file in sorted(path.glob(fingerprint.WEIGHTS)):
            found = file.stat()
            facts.append((str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino))
    except OSError:
        return ""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _read(weights: list[mx.array]) -> None:
    """Read the weights, a group at a time, and report the progress."""
    total, num_done, group = sum(array.nbytes for array in weights), 0, 0
    first = 0
    for index, array in enumerate(weights, 1):
        group += array.nbytes
        if group >= READ_BYTES or index == len(weights):
            mx.eval(weights[first:index])
            first, num_done, group = index, num_done + group, 0
            loading.report(f"loading {loading.amount(num_done, total)}")


def _find(name: str) -> Path:
    """The folder of a model; downloads a repository that is not on this machine yet."""
    if name == "demo":
        return DEMO_PATH
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(name, path)
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name!r} is not a folder; give a model folder or a repository")
    try:
        return _downloaded(name)
    except Exception as fault:  # the client's errors have no common base class
        raise ModelError(
            f"model {name!r} is neither a folder here nor a repository that can be downloaded "
            f"({_first(fault).removeprefix('Got: ')}). Correct the name, name a folder, or connect "
            "this machine to the internet"
        ) from fault


def _downloaded(name: str) -> Path:
    """Download the repository as mlx-lm does, with reports of progress. Returns its folder."""
    fetch = mlx_lm.utils.snapshot_download
    if not fetch.__module__.startswith("huggingface_hub"):  # another hub's client, if asked for
        return Path(mlx_lm.utils._download(name))
    patterns = mlx_lm.utils.DEFAULT_ALLOW_PATTERNS
    return Path(fetch(name, allow_patterns=patterns, tqdm_class=loading.download_bar()))


def _check_folder(name: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {name!r} has no config.json")
    if not list(path.glob("model*.safetensors")):
        raise ModelError(f"model folder {name!r} has no weights (model*.safetensors)")


def _check_layers(name: str, path: Path) -> None:
    """Refuse a config with so many layers that building the model would never end."""
    try:
        if (path / "config.json").stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"model {name!r}: its config.json is over {MAX_CONFIG_BYTES} bytes")
        level: list[Any] = [json.loads((path / "config.json").read_bytes())]
    except (OSError, ValueError, RecursionError):
        return  # mlx-lm's loader reports what is wrong
    while level:
        parts = [part for part in level if isinstance(part, dict)]
        for key, value in (item for part in parts for item in part.items()):
            if isinstance(value, int) and value > MAX_LAYERS and _LAYERS.search(key):
                raise ModelError(
                    f"model {name!r}: its config.json has {key} = {value}; at most {MAX_LAYERS}"
                )
        level = [value for part in parts for value in part.values()]


def _first(fault: BaseException) -> str:
    """The first line of an error, because libraries append pages of advice."""
    return next(iter(str(fault).strip().splitlines()), type(fault).__name__)[:300]


def _cast(model: Any, dtype: str) -> None:
    if dtype == "auto":
        if (usual := device.usual_dtype()) is not None:
            model.set_dtype(usual)
    elif dtype in _DTYPES:
        model.set_dtype(_DTYPES[dtype])
    else:
        raise ModelError(f"unknown dtype {dtype!r}; known: auto, {', '.join(_DTYPES)}")


def _float_dtype(weights: list[mx.array]) -> mx.Dtype:
    floats = [array.dtype for array in weights if mx.issubdtype(array.dtype, mx.floating)]
    return max(set(floats), key=floats.count) if floats else mx.float32


def _vocabulary(name: str, model: Any) -> int:
    """Rows of the embedding; a larger id would read out of bounds. The graph is not evaluated."""
    try:
        return int(model(mx.array([[0]])).shape[-1])
    except Exception as fault:  # model code may raise anything
        raise ModelError(f"model {name!r} cannot be run: {_first(fault)}") from fault


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids without text: those that the tokenizer's own ``decode`` can leave out."""
    found = {token for token, facts in added_tokens(tokenizer).items() if facts.special}
    return frozenset(found.union(getattr(tokenizer, "all_special_ids", ())))


def _context(config: dict[str, Any]) -> int:
    for source in (config, config.get("text_config")):
        value = source.get("max_position_embeddings") if isinstance(source, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return _DEFAULT_CONTEXT


_MAX_DEFAULT = 2**64  # larger values, infinity and NaN are left out

_FROM_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _generation_defaults(path: Path) -> dict[str, Any]:
    """The sampling values that the model recommends; ``do_sample: false`` means greedy."""
    try:
        config = json.loads((path / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    defaults = {
        ours: config[theirs]
        for theirs, ours in _FROM_CONFIG.items()
        if isinstance(config.get(theirs), int | float) and abs(config[theirs]) < _MAX_DEFAULT
    }
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults

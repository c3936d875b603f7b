"""Checks, before anything is queued, whether this machine can run workers for the model."""

from __future__ import annotations

import importlib.util
import tempfile
from difflib import get_close_matches
from pathlib import Path

from redis import Redis
from redis.exceptions import NoPermissionError

from batchkv_producer.disk import full_home, is_full
from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.progress import printable
from batchkv_producer.server import connection
from batchkv_producer.server.home import HOME_VARIABLE, Home, make_folders
from batchkv_producer.submit.fingerprint import locate, names_here
from batchkv_producer.wire import redis_keys

ASK_HUB_SECONDS = 5.0
# Names of errors of the hub's client and of the HTTP clients that its versions use.
OFFLINE = ("ConnectError", "ConnectionError", "OfflineModeIsEnabled")

_WAY_OUT_OF_RUN = (
    "`batchkv run` needs the admin's URL. With the URL of a producer, use `batchkv submit` or "
    "`batchkv run --workers 0`; workers elsewhere then compute the rows"
)
WAY_OUT_OF_ASK = (
    "no worker with these weights serves the model, and `batchkv ask` can start one with the "
    "admin's URL only. With the URL of a producer, ask while a worker serves the model"
)


def check_model_folder(model: str) -> None:
    """Refuse a path that is no model folder. A repository name is not looked up here."""
    is_place = model.startswith((".", "/", "~"))
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~name of an unknown user
        folder = Path(model)
    if is_place and not folder.is_dir():
        raise UsageError(f"there is no model folder {model}")
    if (is_place or ("/" in model and folder.is_dir())) and not (folder / "config.json").is_file():
        raise UsageError(f"the model folder {model} has no config.json")


def folder_note(model: str) -> str:
    """What to say of a submit for a model whose name is a path, but no model folder here; or ""."""
    try:
        check_model_folder(model)
    except UsageError as fault:
        return (
            f"{fault}. Other machines may have it. If the name is a slip, correct it: only workers "
            "that were started with this name take the rows"
        )
    return ""


def check_model_name(model: str) -> None:
    """Refuse a repository that is neither on this machine nor on the Hugging Face hub.

    It is refused, too, if this machine is offline. If the hub answers late or fails, nothing is
    refused: then the worker asks again, with more time.
    """
    if model == "demo" or Path(model).expanduser().is_dir() or locate(model) is not None:
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        return
    # Imported here, because it is slow and most models are on this machine.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(model, timeout=ASK_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as fault:
        raise UsageError(
            f"there is no model {model}: it is neither a folder here nor a repository of the "
            f"Hugging Face hub that this user may read. {_advice(model)}; nothing was queued"
        ) from fault
    except Exception as fault:  # offline, or the hub fails: any error of its client
        if type(fault).__name__ not in OFFLINE:
            return
        raise UsageError(
            f"there is no model {model} on this machine, and the Hugging Face hub cannot be "
            f"reached ({printable(_first_line(fault))}). {_advice(model)}, name a folder, or "
            "connect this machine to the internet; nothing was queued"
        ) from fault


def _advice(model: str) -> str:
    """What to do about a name that no model has; names one of this machine that is like it."""
    names = ["demo", *names_here()]
    close = get_close_matches(model, names, n=1, cutoff=0.75)
    ends = {name.rpartition("/")[2].lower(): name for name in names}  # the owner was left out
    close = close or [ends[end] for end in get_close_matches(model.lower(), ends, 1, 0.75)]
    return (
        f"{printable(close[0])} is on this machine: check the name" if close else "Check the name"
    )


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), type(fault).__name__)


def check_rights(redis: Redis, url: str, model: str, way_out: str = _WAY_OUT_OF_RUN) -> None:
    """Refuse a Redis user that may not run workers. Nothing is changed."""
    try:
        redis.lpop(f"{redis_keys.queue(redis_keys.queue_name(model))}:none")  # an empty key
    except NoPermissionError as fault:
        raise ServerError(
            f"Redis at {connection.masked(url)} does not let this user run workers (NOPERM): "
            f"{way_out}"
        ) from fault


def check_logs(home: Home) -> None:
    """Refuse, before anything is queued, a home folder in which workers cannot write their logs.

    Raises UsageError, or FullHomeError if the disk is full.
    """
    make_folders(home)
    try:
        with tempfile.TemporaryFile(dir=home.logs):
            pass
    except OSError as fault:
        if is_full(fault):
            raise full_home(home.path, str(fault.strerror)) from fault
        raise UsageError(
            f"workers cannot write their logs in {home.logs}: {fault.strerror}. "
            f"Set {HOME_VARIABLE} to a folder that you can write"
        ) from fault

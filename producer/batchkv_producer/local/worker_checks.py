"""Checks before anything is queued whether this machine can run workers for the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from redis import Redis
from redis.exceptions import NoPermissionError

from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server import connection
from batchkv_producer.submit.fingerprint import locate
from batchkv_producer.wire import redis_keys

ASK_HUB_SECONDS = 5.0

_WAY_OUT_OF_RUN = (
    "`batchkv run` needs the admin's URL; with a producer's, use `batchkv submit`, or run "
    "--workers 0, and leave the work to workers with theirs"
)
WAY_OUT_OF_ASK = (
    "no worker that fits serves this model, and `batchkv ask` starts one with the admin's URL "
    "only; with a producer's, ask when one serves it"
)


def check_model_folder(model: str) -> None:
    """Refuse a model that is said by its place when it is not there; a name is not looked up."""
    is_place = model.startswith((".", "/", "~"))
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~somebody, whom nobody knows
        folder = Path(model)
    if is_place and not folder.is_dir():
        raise UsageError(f"there is no model folder {model}")
    if (is_place or ("/" in model and folder.is_dir())) and not (folder / "config.json").is_file():
        raise UsageError(f"the model folder {model} has no config.json")


def check_model_name(model: str) -> None:
    """Refuse a repository that is neither here nor on the hub.

    A hub that cannot be asked refuses nothing: the worker will say what is wrong.
    """
    if model == "demo" or Path(model).expanduser().is_dir() or locate(model) is not None:
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        return
    # Imported here: it takes a while, and most models are here.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(model, timeout=ASK_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as fault:
        raise UsageError(
            f"there is no model {model}: it is no folder here and no repository of the Hugging "
            "Face hub that this user may read. Check the name; nothing was queued"
        ) from fault
    except Exception:  # noqa: BLE001  offline, a proxy, a hub that fails: the client's own errors
        return


def check_rights(redis: Redis, url: str, model: str, way_out: str = _WAY_OUT_OF_RUN) -> None:
    """Refuse a user who may not run workers, before they die of it; nothing is changed."""
    try:
        redis.lpop(f"{redis_keys.queue(redis_keys.queue_name(model))}:none")  # where nothing is
    except NoPermissionError as fault:
        raise ServerError(
            f"Redis at {connection.masked(url)} lets this user run no workers (NOPERM): {way_out}"
        ) from fault

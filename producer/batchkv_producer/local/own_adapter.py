"""The model and the adapter that the workers of ``run`` and ``ask`` on this machine serve."""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_producer.errors import UsageError
from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.submit.adapter_folders import folder_of
from batchkv_producer.submit.fingerprint import ADAPTER_FILES
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter, served_name, split_here

_SETTING = BY_NAME["adapters"]


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model for workers of this machine, with one adapter or none."""

    model: str
    adapter: Adapter | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The flags of `batchkv worker` besides the model."""
        return () if self.adapter is None else (_SETTING.flag, str(self.adapter))

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of its workers: the model's own, and that of the adapter."""
        names = [self.model]
        if self.adapter is not None:
            names.append(served_name(self.model, self.adapter.name))
        return tuple(map(redis_keys.queue_name, names))


def own_model(served: str, adapter: Adapter | None = None) -> OwnModel:
    """The model for workers here that are to serve ``served``. Raises UsageError.

    ``adapter``: as the command names it, perhaps with its folder. Else BATCHKV_ADAPTERS has it.
    """
    model, name = split_here(served)
    if not name:
        return OwnModel(model)
    folder = adapter.folder if adapter is not None and adapter.name == name else ""
    found = Adapter(name, folder or folder_of(name))
    if not found.folder:
        raise UsageError(
            f"a worker of this machine does not know the files of adapter {name}: give "
            f"{_SETTING.flag} {name}=FOLDER, or set {_SETTING.variable}"
        )
    missing = [file for file in ADAPTER_FILES if not (found.path / file).is_file()]
    if missing:
        raise UsageError(f"{_SETTING.flag} {found}: the folder has no {' and no '.join(missing)}")
    return OwnModel(model, found)

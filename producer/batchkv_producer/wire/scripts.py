"""Sends the scripts of ``lua/`` to a server and runs them there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

if TYPE_CHECKING:
    from redis import Redis
    from redis.commands.core import Script

_PRELUDES: dict[str, tuple[str, ...]]  # scripts that are put before a script
_PRELUDES = dict.fromkeys(("retry", "mend", "forget", "sweep", "restore", "recount"), ("common",))
_PRELUDES |= dict.fromkeys(("give_back", "reap"), ("common", "suspects"))
_PRELUDES |= dict.fromkeys(("submit", "settle", "copy", "follow"), ("common", "duplicates"))
_PRELUDES |= dict.fromkeys(("live_ask", "live_keep", "live_cancel"), ("live",))
_PRELUDES |= {"finish": ("common", "duplicates", "maker", "reuse")}
_PRELUDES |= {"pull": ("common", "duplicates", "maker", "suspects", "reuse")}

FLUSHES = 3  # tries: somebody may call `SCRIPT FLUSH` between the load of a script and its run


class Scripts:
    """Runs scripts by name. Each is sent to the server once."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection
        self._scripts: dict[str, Script] = {}

    def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        script = self._scripts.get(name)
        if script is None:
            folder = files("batchkv_producer.wire").joinpath("lua")
            parts = (*_PRELUDES.get(name, ()), name)
            source = "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in parts)
            script = self._scripts[name] = self.connection.register_script(source)
        for _ in range(FLUSHES):
            with suppress(NoScriptError):
                return script(keys=keys, args=args)
        return script(keys=keys, args=args)

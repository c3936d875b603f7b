"""Changes of several keys in one step: a script of the server, or none of it.

Commands are lists of words that this package makes. They are written to the script as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from redis import Redis

Command = tuple[str | int, ...]

_GUARDED = """
local state = redis.call('hget', KEYS[1], ARGV[1])
if not state then return 'gone' end
if not string.find(ARGV[2], ' ' .. state .. ' ', 1, true) then return state end
for _, command in ipairs(cjson.decode(ARGV[3])) do redis.call(unpack(command)) end
return ''
"""
_UNUSED = """
if redis.call('hlen', KEYS[2]) > 0 then return 'used' end
if redis.call('exists', KEYS[1]) == 0 then return 'gone' end
for _, command in ipairs(cjson.decode(ARGV[1])) do redis.call(unpack(command)) end
return ''
"""
# The batch that was asked for before, while it is of use, or the new one.
_CREATE = """
local known = redis.call('hget', KEYS[1], ARGV[1])
if known then
  local batch = ARGV[3] .. known
  local state = redis.call('hget', batch, 'status')
  local answers = state == 'completed'
  if answers then
    local made = redis.call('hmget', batch, 'output_file_id', 'error_file_id')
    answers = false
    for _, file in ipairs(made) do
      if file and file ~= '' and redis.call('exists', ARGV[4] .. file) == 1 then answers = true end
    end
  end
  local is_open = state == 'validating' or state == 'in_progress' or state == 'finalizing'
  if answers or is_open then return known end
end
if redis.call('exists', KEYS[2]) == 0 then return 'gone' end
redis.call('hset', KEYS[1], ARGV[1], ARGV[2])
for _, command in ipairs(cjson.decode(ARGV[5])) do redis.call(unpack(command)) end
return ARGV[2]
"""
_LEASE = """
local now = redis.call('time')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local held = redis.call('hget', KEYS[1], ARGV[1])
if held then
  local holder, until_ms = string.match(held, '^(%S+) (%d+)$')
  if holder ~= ARGV[2] and until_ms and tonumber(until_ms) > ms then return 0 end
end
redis.call('hset', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%.0f', ms + ARGV[3]))
return 1
"""


def guarded(
    connection: Redis, key: str, field: str, expected: Collection[str], commands: Sequence[Command]
) -> str:
    """Run the commands if the hash's field has an expected value, and return "".

    Else returns its value, or ``gone`` if there is no such hash.
    """
    words = f" {' '.join(expected)} "
    return _run(connection, _GUARDED, [key], [field, words, _packed(commands)])


def unless_used(connection: Redis, key: str, uses: str, commands: Sequence[Command]) -> str:
    """Run the commands if the hash ``uses`` is empty. Returns "", ``used`` or ``gone``."""
    return _run(connection, _UNUSED, [key, uses], [_packed(commands)])


def create(
    connection: Redis,
    same: str,
    file: str,
    digest: str,
    batch_id: str,
    prefixes: tuple[str, str],
    commands: Sequence[Command],
) -> str:
    """Run the commands, unless a batch of this digest is open or has its files.

    Returns the id of that batch, or ``batch_id``, or ``gone`` if there is no such file.
    ``prefixes``: of the keys of batches and files.
    """
    return _run(connection, _CREATE, [same, file], [digest, batch_id, *prefixes, _packed(commands)])


def lease(connection: Redis, key: str, name: str, holder: str, milliseconds: int) -> bool:
    """Take or renew a lease in the hash. False if another holder has it."""
    taken: Any = connection.register_script(_LEASE)(keys=[key], args=[name, holder, milliseconds])
    return bool(taken)


def _packed(commands: Sequence[Command]) -> str:
    return json.dumps([[str(word) for word in command] for command in commands])


def _run(connection: Redis, script: str, keys: list[str], args: list[str]) -> str:
    reply: Any = connection.register_script(script)(keys=keys, args=args)
    return bytes(reply).decode("utf-8", "replace")

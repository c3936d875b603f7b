"""Changes of several keys in one step: a script of the server, or none of it.

Commands are lists of words that this package makes. They are written to the script as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
# The open rows of a hash (name -> "ROWS SECONDS"), without those of this name, when so many of each
# name have ended.
_OPEN_ROWS = """
local function open_rows(key, name, ended)
  local total, held = 0, redis.call('hgetall', key)
  for i = 1, #held, 2 do
    if held[i] ~= name then
      local rows = tonumber(string.match(held[i + 1], '^%d+')) or 0
      total = total + math.max(0, rows - (tonumber(ended[held[i]]) or 0))
    end
  end
  return total
end
local function is_full(key, name, rows, limit, ended)
  limit = tonumber(limit)
  return limit > 0 and open_rows(key, name, cjson.decode(ended)) + tonumber(rows) > limit
end
"""
_RESERVE = f"""{_OPEN_ROWS}
if is_full(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]) then return 'full' end
redis.call('hset', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. redis.call('time')[1])
return ''
"""
_FORGET = """
for i = 1, #ARGV, 2 do
  if redis.call('hget', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    redis.call('hdel', KEYS[1], ARGV[i])
  end
end
return ''
"""
_STORE = """
local total, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
if limit > 0 then
  for _, id in ipairs(redis.call('zrange', KEYS[1], 0, -1)) do
    total = total + (tonumber(redis.call('hget', ARGV[1] .. id, 'bytes')) or 0)
  end
  if total > limit then return 'full' end
end
for _, command in ipairs(cjson.decode(ARGV[4])) do redis.call(unpack(command)) end
return ''
"""
# The batch that was asked for before, while it is of use, or the new one.
_CREATE = f"""{_OPEN_ROWS}
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
if is_full(KEYS[3], ARGV[2], ARGV[6], ARGV[7], ARGV[8]) then return 'full' end
if ARGV[6] ~= '0' then redis.call('hset', KEYS[3], ARGV[2], ARGV[6]) end
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
  local left = (tonumber(until_ms) or 0) - ms
  -- One with far more time left than a lease has is from when the server's clock was ahead.
  if holder ~= ARGV[2] and left > 0 and left <= 10 * ARGV[3] then return 0 end
end
redis.call('hset', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%.0f', ms + ARGV[3]))
return 1
"""
_TAKE = """
local now = tonumber(redis.call('time')[1])
local id = redis.call('zrange', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, 1)[1]
if not id then return false end
redis.call('zadd', KEYS[1], now + tonumber(ARGV[1]), id)
return {id, redis.call('hget', KEYS[2], id) or ''}
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows that count as open in the hash ``key`` from now on, under ``name``.

    Refused if more than ``limit`` are open then (0: no limit). ``ended``: how many rows of the
    other names have ended.
    """

    key: str
    name: str
    num_rows: int = 0
    limit: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)

    def args(self) -> list[str]:
        """Rows, limit and ended rows as the scripts take them."""
        ended = {name: str(count) for name, count in self.ended.items()}
        return [str(self.num_rows), str(self.limit), json.dumps(ended)]


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
    same_and_file: tuple[str, str],
    digest: str,
    rows: Reservation,
    prefixes: tuple[str, str],
    commands: Sequence[Command],
) -> str:
    """Run the commands, unless a batch of this digest is open or has its files.

    Returns the id of that batch, or that of the new one (``rows.name``), or ``gone`` if there is no
    such file, or ``full`` if its rows cannot be reserved. ``same_and_file``: the keys of the hash
    of digests, and of the file. ``prefixes``: of the keys of batches and files.
    """
    args = [digest, rows.name, *prefixes, _packed(commands), *rows.args()]
    return _run(connection, _CREATE, [*same_and_file, rows.key], args)


def reserve(connection: Redis, rows: Reservation) -> bool:
    """Reserve rows; a second time under one name replaces the first. False if it is refused."""
    return not _run(connection, _RESERVE, [rows.key], [rows.name, *rows.args()])


def forget_reservations(connection: Redis, key: str, values: Mapping[str, bytes]) -> None:
    """Delete reservations that still have these values."""
    words: list[str | bytes] = [word for pair in values.items() for word in pair]
    _run(connection, _FORGET, [key], words)


def store(
    connection: Redis,
    files: str,
    prefix: str,
    num_bytes: int,
    limit: int,
    commands: Sequence[Command],
) -> bool:
    """Run the commands, which store a file of so many bytes beside those of the set ``files``.

    False if all have more bytes than the limit then (0: no limit). ``prefix``: of a file's key.
    """
    args = [prefix, str(num_bytes), str(limit), _packed(commands)]
    return not _run(connection, _STORE, [files], args)


def lease(connection: Redis, key: str, name: str, holder: str, milliseconds: int) -> bool:
    """Take or renew a lease in the hash. False if another holder has it."""
    taken: Any = connection.register_script(_LEASE)(keys=[key], args=[name, holder, milliseconds])
    return bool(taken)


def take_due(connection: Redis, due: str, values: str, seconds: int) -> tuple[str, bytes] | None:
    """Take the name that is due first in the set, and its value in the hash. None if none is due.

    It is due again after ``seconds``.
    """
    reply: Any = connection.register_script(_TAKE)(keys=[due, values], args=[seconds])
    return None if reply is None else (bytes(reply[0]).decode("utf-8", "replace"), bytes(reply[1]))


def _packed(commands: Sequence[Command]) -> str:
    return json.dumps([[str(word) for word in command] for command in commands])


def _run(connection: Redis, script: str, keys: list[str], args: Sequence[str | bytes]) -> str:
    reply: Any = connection.register_script(script)(keys=keys, args=args)
    return bytes(reply).decode("utf-8", "replace")

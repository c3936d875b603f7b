"""The books of a batch, read in one step: where each line stands, and whether counters agree."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from batchkv_producer.wire import redis_keys

# Every line is ended, held, queued, or failed by a stock tool and not yet healed. A line that is
# none of these, and whose chunk was submitted, is lost. What is read in one script cannot be
# between two moves.
_LOOK = """
local total, batch, queue, chunk_rows = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local listed = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do listed[id] = true end
local counts = redis.call('HMGET', KEYS[1], 'ok', 'failed', 'canceled', 'running', 'chunks')
local submitted = tonumber(counts[5]) * chunk_rows
local ended, held, queued, unhealed, both, lost = 0, 0, 0, 0, 0, {}
for line = 1, total do
  local id = batch .. '-' .. line
  local job = redis.call('HMGET', 'rq:job:' .. id, 'status', 'bkv_exec')
  local is_ended = redis.call('HEXISTS', KEYS[3], line) == 1
  local is_held = job[2] and job[2] ~= ''
  if is_ended and is_held then both = both + 1 end
  if is_ended then ended = ended + 1
  elseif is_held then held = held + 1
  elseif line > submitted or (listed[id] and job[1] == 'queued') then queued = queued + 1
  elseif job[1] == 'failed' or job[1] == 'stopped' or job[1] == 'canceled' then
    unhealed = unhealed + 1
  else lost[#lost + 1] = id end
end
local distinct, num_distinct = {}, 0
for _, line in ipairs(redis.call('LRANGE', KEYS[4], 0, -1)) do
  if not distinct[line] then num_distinct = num_distinct + 1 end
  distinct[line] = true
end
return {tonumber(counts[1]), tonumber(counts[2]), tonumber(counts[3]), tonumber(counts[4]), ended,
  held, queued, unhealed, both, redis.call('LLEN', KEYS[4]), num_distinct, lost}
"""


@dataclass(frozen=True, slots=True)
class Books:
    """The counters of a batch, and beside them what was counted job by job."""

    ok: int
    failed: int
    canceled: int
    running: int
    ended: int
    held: int
    queued: int
    unhealed: int
    ended_and_held: int
    num_done: int
    num_distinct: int
    lost: list[bytes]

    def faults(self, total: int) -> list[str]:
        """What is wrong; lost lines apart, for a stock tool moves in several steps."""
        ended = self.ok + self.failed + self.canceled
        said = {
            "ok + failed + canceled is not the number of results": ended != self.ended,
            "running is not the number of jobs held": self.running != self.held,
            "a line that has a result is held": self.ended_and_held > 0,
            "the finish order has not each result once": not (
                self.num_done == self.num_distinct == self.ended
            ),
            "n is not ok + failed + canceled + queued + running": total
            != ended + self.running + self.queued + self.unhealed + len(self.lost),
        }
        return [f"{text}: {self}" for text, is_so in said.items() if is_so]


def look(connection: Redis, batch_id: str, queue: str, total: int, chunk_rows: int) -> Books:
    """The books now. Raises RedisError when the server is away."""
    keys = [redis_keys.batch(batch_id), redis_keys.queue(queue)]
    keys += [redis_keys.results(batch_id), redis_keys.done(batch_id)]
    found = connection.eval(_LOOK, len(keys), *keys, total, batch_id, queue, chunk_rows)
    return Books(*found)


# What there is of a job in somebody's hands. Nothing of it may be there when all has ended.
_IN_HAND = ("rq:executions:*", "rq:execution:*", "rq:wip:*", "rq:queue:*:intermediate")


def leftovers(connection: Redis, queue: str) -> list[str]:
    """What of queue, leases and executions is still there, by key."""
    found = [key.decode() for pattern in _IN_HAND for key in connection.scan_iter(pattern)]
    if connection.exists(redis_keys.queue(queue)):
        found.append(redis_keys.queue(queue))
    for key in connection.scan_iter("rq:job:*", count=1000):
        if any(connection.hmget(key, "bkv_exec", "bkv_begun")):
            found.append(f"{key.decode()} is held, or said to have begun")
    return found

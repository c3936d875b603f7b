-- (gone) -> queued: make the missing jobs of ended rows again, and delete their old results.
-- A row that has an answer by now, because somebody else restored it, keeps it.
-- KEYS: batch hash, results, queue list, failed or canceled zset.
-- ARGV: 'failed' or 'canceled', time in ISO 8601, new timeout (s), new deadline (s since 1970; ''
--       keeps the old one, 0 is none), queue name, result ttl (s), failure ttl (s), description,
--       then id, line, data, shared bytes, needs ('' for none) for each row.
-- Returns how many were queued.
local outcome, now, timeout, expires, queue = unpack(ARGV, 1, 5)
local batch = string.match(KEYS[1], '%x+$')
local list = list_of(KEYS[3], batch)
local queued = 0
if is_forgotten(batch) then return 0 end
for position = 9, #ARGV, 5 do
  local id, line, data, shared, needs = unpack(ARGV, position, position + 4)
  local key = 'rq:job:' .. id
  local status = redis.call('HGET', key, 'status')
  if (not status or status == outcome) and redis.call('HSTRLEN', key, 'data') == 0
      and redis.call('HDEL', KEYS[2], line) == 1 then
    redis.call('HINCRBY', KEYS[1], outcome, -1)
    redis.call('ZREM', KEYS[4], id)
    redis.call('HDEL', 'batchkv:due:' .. queue, id)
    redis.call('DEL', key)
    redis.call('HSET', key, 'data', data, 'created_at', now, 'enqueued_at', now, 'origin', queue,
      'status', 'queued', 'description', ARGV[8], 'timeout', timeout, 'result_ttl', ARGV[6],
      'failure_ttl', ARGV[7], 'retries_left', 3, 'bkv_shared', shared)
    if needs ~= '' then redis.call('HSET', key, 'bkv_needs', needs) end
    redis.call('RPUSH', list, id)
    queued = queued + 1
  end
end
if queued > 0 then reopen(batch, timeout, expires) end
return queued

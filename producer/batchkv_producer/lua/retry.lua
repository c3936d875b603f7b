-- failed | canceled -> queued: run rows again whose job is still there. Their old result goes.
-- KEYS: batch hash, results, queue list, failed or canceled zset.
-- ARGV: 'failed' or 'canceled', time in ISO 8601, new timeout (s; 0 keeps the old one),
--       then id, line for each row.  Returns how many were queued.
local outcome, iso, timeout = ARGV[1], ARGV[2], tonumber(ARGV[3])
local queued = 0
for position = 4, #ARGV, 2 do
  local id, line = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  if redis.call('HGET', key, 'status') == outcome and redis.call('HSTRLEN', key, 'data') > 0
      and redis.call('HDEL', KEYS[2], line) == 1 then
    redis.call('HINCRBY', KEYS[1], outcome, -1)
    redis.call('ZREM', KEYS[4], id)
    redis.call('HDEL', key, 'bkv_deaths', 'ended_at')
    redis.call('HSET', key, 'status', 'queued', 'enqueued_at', iso, 'retries_left', 3)
    if timeout > 0 then redis.call('HSET', key, 'timeout', timeout) end
    redis.call('PERSIST', key)
    redis.call('RPUSH', KEYS[3], id)
    queued = queued + 1
  end
end
if queued > 0 and timeout > 0 then redis.call('HSET', KEYS[1], 'job_timeout', timeout) end
return queued

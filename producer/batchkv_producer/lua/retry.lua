-- failed -> queued: run rows again whose job is still there. Their old result goes.
-- KEYS: batch hash, results, queue list, failed zset.
-- ARGV: time in ISO 8601, then id, line for each row.  Returns how many were queued.
local queued = 0
for position = 2, #ARGV, 2 do
  local id, line = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  if redis.call('HGET', key, 'status') == 'failed' and redis.call('HSTRLEN', key, 'data') > 0
      and redis.call('HDEL', KEYS[2], line) == 1 then
    redis.call('HINCRBY', KEYS[1], 'failed', -1)
    redis.call('ZREM', KEYS[4], id)
    redis.call('HDEL', key, 'bkv_deaths', 'ended_at')
    redis.call('HSET', key, 'status', 'queued', 'enqueued_at', ARGV[1], 'retries_left', 3)
    redis.call('PERSIST', key)
    redis.call('RPUSH', KEYS[3], id)
    queued = queued + 1
  end
end
return queued

-- started -> queued, at the head of its priority's list and in the order given: a worker that stops hands its jobs back.
-- When the holder died with them, the death is counted, and a job that has cost more than
-- `max_deaths` holders is failed in RQ's terms, as in `reap`.
-- KEYS: queue list, wip, failed zsets.
-- ARGV: 1 when the job's holder died, else 0, max_deaths, failure ttl (s),
--       then id, execution for each job.
-- Returns how many went back to the queue.
local died, max_deaths, failure_ttl = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
local given = 0
for position = #ARGV - 1, 4, -2 do
  local id, execution = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  if redis.call('HGET', key, 'bkv_exec') == execution then
    local batch, line = string.match(id, '^(%x+)%-(%d+)$')
    redis.call('ZREM', KEYS[2], id .. ':' .. execution)
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
    release(batch, line)
    if batch and is_forgotten(batch) then
      redis.call('DEL', key)
    elseif died and count_death(key) > max_deaths then
      redis.call('HSET', key, 'status', 'failed')
      redis.call('EXPIRE', key, failure_ttl)
      redis.call('ZADD', KEYS[3], now + failure_ttl, id)
    else
      redis.call('HSET', key, 'status', 'queued', 'worker_name', '')
      redis.call('LPUSH', list_of(KEYS[1], batch), id)
      given = given + 1
    end
  end
end
return given

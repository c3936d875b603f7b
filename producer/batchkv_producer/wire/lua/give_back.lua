-- started -> queued, at the head of its priority's list and in the order given: a worker
-- that stops returns its jobs.
-- When the holder died with them, the death is counted (`suspects.lua`), and a job that has died alone
-- `max_deaths` times is failed in RQ's terms, as in `reap`.
-- KEYS: queue list, wip, failed zsets.
-- ARGV: 1 when the job's holder died, else 0, max_deaths, failure ttl (s),
--       then id, execution for each job.
-- Returns how many went back to the queue.
local died, max_deaths, failure_ttl = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
local given, mine, doomed = 0, {}, {}
for position = 4, died and #ARGV - 1 or 0, 2 do
  if redis.call('HGET', 'rq:job:' .. ARGV[position], 'bkv_exec') == ARGV[position + 1] then
    redis.call('ZREM', KEYS[2], ARGV[position] .. ':' .. ARGV[position + 1])  -- see `allow_when_full`
    mine[#mine + 1] = ARGV[position]
  end
end
if died then doomed = count_death(mine, 2, max_deaths) end
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
    elseif doomed[id] then
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

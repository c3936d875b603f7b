-- started -> queued, at the head and in the order given: a worker that stops hands its jobs back.
-- KEYS: queue list, wip zset.  ARGV: 1 when the job's holder died (counted), else 0,
-- then id, execution for each job.  Returns how many went back.
local given = 0
for position = #ARGV - 1, 2, -2 do
  local id, execution = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  if redis.call('HGET', key, 'bkv_exec') == execution then
    local batch = string.match(id, '^(%x+)%-%d+$')
    redis.call('ZREM', KEYS[2], id .. ':' .. execution)
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    redis.call('HDEL', key, 'bkv_exec')
    if batch then redis.call('HINCRBY', 'batchkv:batch:' .. batch, 'running', -1) end
    if ARGV[1] == '1' then redis.call('HINCRBY', key, 'bkv_deaths', 1) end
    redis.call('HSET', key, 'status', 'queued', 'worker_name', '')
    redis.call('LPUSH', KEYS[1], id)
    given = given + 1
  end
end
return given

-- Prolong the leases that a worker still holds, and report those that it has lost.
-- KEYS: wip zset, worker hash.  ARGV: lease (s), worker's ttl (s), time in ISO 8601,
-- then id, execution for each job.  Returns {id, status or 'deleted'} for each job lost.
local lease, iso = tonumber(ARGV[1]), ARGV[3]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local lost = {}
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HSET', KEYS[2], 'last_heartbeat', iso, 'bkv_seen', time[1])
  redis.call('EXPIRE', KEYS[2], tonumber(ARGV[2]))
end
for position = 4, #ARGV, 2 do
  local id, execution = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  local job = redis.call('HMGET', key, 'bkv_exec', 'status')
  if job[1] == execution then
    redis.call('HSET', key, 'last_heartbeat', iso)
    if job[2] ~= 'started' then redis.call('HSET', key, 'status', 'started') end
    redis.call('ZADD', KEYS[1], now + lease, id .. ':' .. execution)
    redis.call('ZADD', 'rq:executions:' .. id, now + lease + 60, execution)
    redis.call('EXPIRE', 'rq:executions:' .. id, lease + 60)
    local execution_key = 'rq:execution:' .. id .. ':' .. execution
    redis.call('HSET', execution_key, 'last_heartbeat', now)
    redis.call('EXPIRE', execution_key, lease)
  else
    lost[#lost + 1] = {id, job[2] or 'deleted'}
  end
end
return lost

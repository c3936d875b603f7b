-- started -> queued at the head of its priority's list, or failed: take back the jobs whose holder let its lease lapse.
-- A job that has cost `max_deaths` holders is failed in RQ's terms; `heal` gives it its error row.
-- KEYS: queue list, wip, failed zsets.
-- ARGV: largest number of leases to look at, max_deaths, failure ttl (s), and either '' or the name
--       of a worker known to be dead, whose leases are taken back although they still run.
-- Returns {requeued, failed}.
local limit, max_deaths, failure_ttl, dead = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local members
if dead == '' then
  members = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)
else
  members = redis.call('ZRANGE', KEYS[2], 0, limit - 1)
end
local requeued, failed = 0, 0
for index = #members, 1, -1 do
  local id, execution = string.match(members[index], '^([%w_%-]+):([^:]*)$')
  local key = 'rq:job:' .. (id or '')
  local job = id and redis.call('HMGET', key, 'bkv_exec', 'worker_name') or {}
  local gone = id and not job[1] and not job[2] and redis.call('EXISTS', key) == 0
  if not id then
    redis.call('ZREM', KEYS[2], members[index])  -- not a lease
  elseif dead == '' or job[2] == dead or gone then
    redis.call('ZREM', KEYS[2], members[index])
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    if job[1] == execution then
      local batch, line = string.match(id, '^(%x+)%-(%d+)$')
      redis.call('HDEL', key, 'bkv_exec')
      release(batch, line)
      if redis.call('HINCRBY', key, 'bkv_deaths', 1) > max_deaths then
        redis.call('HSET', key, 'status', 'failed')
        redis.call('EXPIRE', key, failure_ttl)
        redis.call('ZADD', KEYS[3], tonumber(time[1]) + failure_ttl, id)
        failed = failed + 1
      else
        redis.call('HSET', key, 'status', 'queued', 'worker_name', '')
        redis.call('LPUSH', list_of(KEYS[1], batch), id)
        requeued = requeued + 1
      end
    end
  end
end
return {requeued, failed}

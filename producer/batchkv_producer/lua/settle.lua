-- Give rows their last word without holding them.
--   canceled: queued | started | deferred | scheduled -> canceled, whoever holds the job
--   failed:   a job that a stock tool or `reap` failed, and that nobody holds, gets its error row
-- A row that has a result keeps it, and its job keeps its status.
-- KEYS: canceled or failed zset, wip zset.
-- ARGV: 'canceled' or 'failed', time in ISO 8601, ttl (s), then id, result for each job.
-- Returns for each job '' (nothing to do), 'done', or the name of the worker that was running it.
local target, iso, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local verdicts = {}
for position = 4, #ARGV, 2 do
  local id, result = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local job = redis.call('HMGET', key, 'status', 'bkv_exec', 'worker_name')
  local status, execution = job[1], job[2]
  local held = execution and execution ~= ''
  local lease = held and redis.call('ZSCORE', KEYS[2], id .. ':' .. execution)
  local live = lease and tonumber(lease) > now
  local verdict = ''
  local wanted
  if target == 'canceled' then
    wanted = status == 'queued' or status == 'started' or status == 'deferred' or status == 'scheduled'
  else
    wanted = (status == 'failed' or status == 'stopped' or status == 'canceled') and not live
  end
  if batch and status and wanted then
    local hash = 'batchkv:batch:' .. batch
    if held then
      redis.call('ZREM', KEYS[2], id .. ':' .. execution)
      redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
      redis.call('HDEL', key, 'bkv_exec')
      redis.call('HINCRBY', hash, 'running', -1)
    end
    if redis.call('HSETNX', 'batchkv:res:' .. batch, line, result) == 1 then
      redis.call('RPUSH', 'batchkv:done:' .. batch, line)
      redis.call('HINCRBY', hash, target, 1)
      verdict = 'done'
      if held and job[3] and job[3] ~= '' then verdict = job[3] end
      redis.call('HSET', key, 'status', target, 'ended_at', iso)
      redis.call('EXPIRE', key, ttl)
      redis.call('ZADD', KEYS[1], tonumber(time[1]) + ttl, id)
    end
  end
  verdicts[#verdicts + 1] = verdict
end
return verdicts

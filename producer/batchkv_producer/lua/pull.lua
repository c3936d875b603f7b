-- queued -> started: take up to `count` jobs from the head of a queue and register each with RQ, all
-- in one step, so that no crash can leave a job between the queue and its holder.
-- An id whose job is gone, ended, or held by somebody whose lease still runs (stock tools can queue
-- an id twice, or revive a job that ended while they looked at it) is dropped, and so is what is no
-- id at all: RQ's have letters, digits, "_" and "-" only.
-- KEYS: queue list, wip zset.
-- ARGV: worker name, lease (s), count, time in ISO 8601, largest data accepted (bytes), prefix of the
--       new execution ids, bytes of data after which no further job is taken.
-- Returns {length of the queue afterwards, jobs}, a job being {id, execution, data or '' when too
-- large, deaths, timeout (s, 0: none)}; no jobs while RQ's workers are suspended.
local worker, lease, count, iso, max_bytes, prefix, enough_bytes = ARGV[1], tonumber(ARGV[2]),
  tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local taken, num_bytes = {}, 0
if redis.call('EXISTS', 'rq:suspended') == 1 then
  return {redis.call('LLEN', KEYS[1]), taken}
end
for attempt = 1, count + 1000 do
  if #taken >= count or num_bytes >= enough_bytes then break end
  local id = redis.call('LPOP', KEYS[1])
  if not id then break end
  local is_id = #id <= 200 and string.match(id, '^[%w_%-]+$')
  local key = 'rq:job:' .. id
  local job = {}
  if is_id then  -- pcall: the key may be of another type, and others' jobs are still to be taken
    job = redis.pcall('HMGET', key, 'status', 'bkv_exec', 'bkv_deaths', 'timeout')
  end
  local live = false
  if job[2] and job[2] ~= '' then
    local ends = redis.call('ZSCORE', KEYS[2], id .. ':' .. job[2])
    live = ends and tonumber(ends) > now
  end
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local ended = batch and redis.call('HEXISTS', 'batchkv:res:' .. batch, line) == 1
  if ended and job[1] == 'queued' then
    -- Its result stands. As a failed job it can still be retried, if that is what it was.
    redis.call('HSET', key, 'status', 'failed')
    redis.call('EXPIRE', key, 7 * 86400)
  elseif job[1] == 'queued' and not live then
    local execution = prefix .. '-' .. attempt
    local held = job[2] and job[2] ~= ''
    -- A lease that has lapsed goes only now that another takes its place: without a lease `reap`
    -- would never find a job that still counts as started.
    if held then
      redis.call('ZREM', KEYS[2], id .. ':' .. job[2])
      redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. job[2])
    end
    redis.call('HSET', key, 'status', 'started', 'started_at', iso, 'last_heartbeat', iso,
      'worker_name', worker, 'bkv_exec', execution)
    redis.call('PERSIST', key)
    redis.call('ZADD', KEYS[2], now + lease, id .. ':' .. execution)
    redis.call('ZADD', 'rq:executions:' .. id, now + lease + 60, execution)
    redis.call('EXPIRE', 'rq:executions:' .. id, lease + 60)
    local execution_key = 'rq:execution:' .. id .. ':' .. execution
    redis.call('HSET', execution_key, 'id', execution, 'created_at', now, 'last_heartbeat', now,
      'worker_name', worker)
    redis.call('EXPIRE', execution_key, lease)
    if batch and not held then redis.call('HINCRBY', 'batchkv:batch:' .. batch, 'running', 1) end
    local data = ''
    if redis.call('HSTRLEN', key, 'data') <= max_bytes then
      data = redis.call('HGET', key, 'data') or ''
    end
    num_bytes = num_bytes + #data
    taken[#taken + 1] = {id, execution, data, tonumber(job[3] or '0') or 0,
      tonumber(job[4] or '0') or 0}
  end
end
return {redis.call('LLEN', KEYS[1]), taken}

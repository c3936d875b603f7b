-- Store results of rows that the caller does not hold.
--   canceled: queued | started | deferred | scheduled -> canceled, also if a worker holds the job
--   failed:   a job that a stock tool or `reap` ended, and that nobody holds, gets its error
--   expired:  queued | deferred -> failed, once the batch's deadline is past; nobody holds the job
--   lost:     (gone) -> failed, for a row of the batch whose job somebody deleted
-- A row that has a result keeps it, and its job keeps its status. Duplicates of a row that failed end
-- with it. If the leader was canceled or lost, the first duplicate becomes the leader of the others.
-- KEYS: canceled or failed zset, wip zset, queue list.
-- ARGV: target, time in ISO 8601, ttl (s), queue name, result ttl (s), most copies, then id, result
--       for each job.
-- Returns for each job '' (nothing to do), 'done', or the name of the worker that was running it.
local target, iso, ttl, queue = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local result_ttl, budget = tonumber(ARGV[5]), tonumber(ARGV[6])
local outcome = target == 'canceled' and 'canceled' or 'failed'
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local open = {queued = true, started = true, deferred = true, scheduled = true}
local ended = {failed = true, stopped = true, canceled = true, finished = true}
local verdicts, touched, left = {}, {}, {}

local function is_wanted(batch, line, status, live)
  local hash = 'batchkv:batch:' .. batch
  if target == 'canceled' then return open[status] end
  if target == 'failed' then return ended[status] and not live end
  if target == 'lost' then
    local whole = redis.call('HMGET', hash, 'chunks', 'num_chunks', 'last_line', 'total')
    return not status and whole[1] and whole[1] == whole[2]
      and tonumber(line) <= tonumber(whole[3] or whole[4])
  end
  local expires = redis.call('HGET', hash, 'expires')
  return (status == 'queued' or status == 'deferred') and not live
    and expires and tonumber(expires) <= now
end

-- A leader has ended: its duplicates end with it, or one of them becomes the leader.
local function end_duplicates(batch, line, status)
  if redis.call('EXISTS', duplicates_key(batch, line)) == 0 then return end
  if target == 'expired' then
    redis.call('DEL', duplicates_key(batch, line))
  elseif target == 'failed' and status ~= 'canceled' then
    budget = copy_to_duplicates(queue, batch, line, 'failed', iso, now, result_ttl, ttl, budget)
  else
    promote_duplicate(list_of(KEYS[3], batch), batch, line, iso)
  end
end

for position = 7, #ARGV, 2 do
  local id, result = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local job = redis.call('HMGET', key, 'status', 'bkv_exec', 'worker_name')
  local status, execution = job[1], job[2]
  local held = execution and execution ~= ''
  local lease = held and redis.call('ZSCORE', KEYS[2], id .. ':' .. execution)
  local live = lease and tonumber(lease) > now
  local verdict = ''
  if batch and not is_forgotten(batch) and is_wanted(batch, line, status, live) then
    local hash = 'batchkv:batch:' .. batch
    if held then
      redis.call('ZREM', KEYS[2], id .. ':' .. execution)
      redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
      redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
    end
    if target == 'lost' then
      local held_by = redis.call('HGET', 'batchkv:held:' .. batch, line)
      if held_by then redis.call('ZREM', KEYS[2], id .. ':' .. held_by) end
    end
    release(batch, line)
    if redis.call('HSETNX', 'batchkv:res:' .. batch, line, result) == 1 then
      redis.call('RPUSH', 'batchkv:done:' .. batch, line)
      redis.call('HINCRBY', hash, outcome, 1)
      verdict = 'done'
      if held and job[3] and job[3] ~= '' then verdict = job[3] end
      if status then
        redis.call('HSET', key, 'status', outcome, 'ended_at', iso)
        redis.call('EXPIRE', key, ttl)
        redis.call('ZADD', KEYS[1], tonumber(time[1]) + ttl, id)
      end
      touched[batch] = true
      left[#left + 1] = {batch, line, status}
    end
  end
  verdicts[#verdicts + 1] = verdict
end
for _, row in ipairs(left) do end_duplicates(row[1], row[2], row[3]) end
for batch in pairs(touched) do keep_if_done(batch, now) end
return verdicts

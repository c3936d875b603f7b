-- failed | canceled -> queued: run rows again whose job still exists, and delete their old results.
-- A row whose leader runs, or will run, waits for it. A stock tool may have changed the job's status by
-- queueing it again, which runs no row with a result. Such a row can be retried, too.
-- KEYS: batch hash, results, queue list, failed or canceled zset.
-- ARGV: 'failed' or 'canceled', time in ISO 8601, new timeout (s; 0 keeps the old one), new deadline
--       (s since 1970; '' keeps the old one, 0 is none), queue name, then id, line for each row.
-- Returns how many were queued.
local outcome, iso, timeout = ARGV[1], ARGV[2], tonumber(ARGV[3])
local expires, queue = ARGV[4], ARGV[5]
local batch = string.match(KEYS[1], '%x+$')
local list = list_of(KEYS[3], batch)
local queued = 0
if is_forgotten(batch) then return 0 end

-- The leader's line if this row is to wait for it; else the row leads itself. So does a row that never
-- waited, because its custom_id cannot be read here.
local function open_leader(key, line)
  local first = redis.call('HGET', key, 'bkv_first') or line
  local first_key = 'rq:job:' .. batch .. '-' .. first
  local lead = redis.call('HGET', first_key, 'bkv_lead') or first
  local can_wait = redis.call('HEXISTS', key, 'bkv_custom_id') == 1
  if can_wait and lead ~= line and redis.call('HEXISTS', KEYS[2], lead) == 0 then
    local status = redis.call('HGET', 'rq:job:' .. batch .. '-' .. lead, 'status')
    if status == 'queued' or status == 'started' then return lead end
  end
  if lead ~= line and redis.call('EXISTS', first_key) == 1 then
    redis.call('HSET', first_key, 'bkv_lead', line)
  end
end

local meddled = {queued = true, scheduled = true, stopped = true, finished = true}
local function has_ended(status, execution)
  return status == outcome or (meddled[status] and (not execution or execution == ''))
end

local has_duplicates = redis.call('HEXISTS', KEYS[1], 'dedupe') == 1
for position = 6, #ARGV, 2 do
  local id, line = ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  local job = redis.call('HMGET', key, 'status', 'bkv_exec')
  if has_ended(job[1], job[2]) and redis.call('HSTRLEN', key, 'data') > 0
      and redis.call('HDEL', KEYS[2], line) == 1 then
    redis.call('HINCRBY', KEYS[1], outcome, -1)
    redis.call('ZREM', KEYS[4], id)
    redis.call('HDEL', key, 'bkv_deaths', 'bkv_died', 'bkv_suspect', 'bkv_halves', 'ended_at')
    redis.call('HDEL', 'batchkv:due:' .. queue, id)
    local leader = has_duplicates and open_leader(key, line)
    local status = leader and 'deferred' or 'queued'
    redis.call('HSET', key, 'status', status, 'enqueued_at', iso, 'retries_left', 3)
    if timeout > 0 then redis.call('HSET', key, 'timeout', timeout) end
    redis.call('PERSIST', key)
    if leader then
      local duplicates = 'batchkv:twins:' .. batch .. ':' .. leader
      redis.call('RPUSH', duplicates, line)
      -- Duplicates of this row that have not ended wait with it.
      while redis.call('RPOPLPUSH', 'batchkv:twins:' .. batch .. ':' .. line, duplicates) do end
    else
      redis.call('RPUSH', list, id)
    end
    queued = queued + 1
  end
end
if queued > 0 then reopen(batch, timeout, expires) end
return queued

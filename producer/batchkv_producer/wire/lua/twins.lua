-- Put before the scripts that need it (`transitions.py`). Twins are rows that ask for the same: the
-- first is the leader and runs, the others wait as RQ's "deferred" in the leader's list of twins.
local function twins_key(batch, line) return 'batchkv:twins:' .. batch .. ':' .. line end

-- The leader has ended: its twins end as it did, each with a copy of the result under its own
-- custom_id. Once `budget` of them are done, the leader is noted in `due`, and `copy` goes on.
-- Returns what is left of the budget.
local function copy_to_twins(queue, batch, line, outcome, iso, now, result_ttl, failure_ttl, budget)
  local twins, due = twins_key(batch, line), 'batchkv:due:' .. queue
  local hash, results = 'batchkv:batch:' .. batch, 'batchkv:res:' .. batch
  local result = bare(redis.call('HGET', results, line))
  local copied = 0
  while result and budget > 0 do
    local twin = redis.call('LPOP', twins)
    if not twin then break end
    budget = budget - 1
    local id = batch .. '-' .. twin
    local key = 'rq:job:' .. id
    local job = redis.call('HMGET', key, 'status', 'bkv_custom_id')
    local name = job[2] or ('line-' .. twin)
    if job[1] == 'deferred'
        and redis.call('HSETNX', results, twin, '=' .. #name .. ':' .. name .. result) == 1 then
      copied = copied + 1
      redis.call('RPUSH', 'batchkv:done:' .. batch, twin)
      if outcome == 'ok' then
        redis.call('HSET', key, 'status', 'finished', 'ended_at', iso, 'data', '')
        redis.call('EXPIRE', key, result_ttl)
        redis.call('ZADD', 'rq:finished:' .. queue, now + result_ttl, id)
        redis.call('EXPIRE', 'rq:finished:' .. queue, result_ttl)
      else
        redis.call('HSET', key, 'status', 'failed', 'ended_at', iso)
        redis.call('EXPIRE', key, failure_ttl)
        redis.call('ZADD', 'rq:failed:' .. queue, now + failure_ttl, id)
      end
    end
  end
  if copied > 0 then
    redis.call('HINCRBY', hash, outcome, copied)
    redis.call('HINCRBY', hash, 'copied', copied)
    if outcome == 'ok' and redis.call('HGET', 'rq:job:' .. batch .. '-' .. line, 'bkv_cut') then
      redis.call('HINCRBY', hash, 'cut', copied)
    end
  end
  if result and redis.call('EXISTS', twins) == 1 then
    redis.call('HSET', due, batch .. '-' .. line, outcome)
  else
    redis.call('HDEL', due, batch .. '-' .. line)
  end
  return budget
end

-- The leader was canceled, or is gone: the next twin that still waits leads from now on.
local function promote_twin(list, batch, line, iso)
  local twins = twins_key(batch, line)
  while true do
    local twin = redis.call('LPOP', twins)
    if not twin then return end
    local id = batch .. '-' .. twin
    local job = redis.call('HMGET', 'rq:job:' .. id, 'status', 'bkv_first')
    if job[1] == 'deferred' then
      redis.call('HSET', 'rq:job:' .. id, 'status', 'queued', 'enqueued_at', iso)
      redis.call('LPUSH', list, id)
      if redis.call('EXISTS', twins) == 1 then
        redis.call('RENAME', twins, twins_key(batch, twin))
      end
      -- Where rows that are retried look for who leads.
      local first = 'rq:job:' .. batch .. '-' .. (job[2] or twin)
      if redis.call('EXISTS', first) == 1 then redis.call('HSET', first, 'bkv_lead', twin) end
      return
    end
  end
end

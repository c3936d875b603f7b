-- Put before the scripts that need it (`scripts.py`). Duplicates are rows with the same request as an
-- earlier row, the leader. The leader runs, and its duplicates wait in a list, as RQ's "deferred".
local function duplicates_key(batch, line) return 'batchkv:twins:' .. batch .. ':' .. line end

-- The leader has ended: each of its duplicates ends with a copy of its result and its own custom_id. The
-- copy of a remembered answer is marked as such, too (`stamp.py`).
-- After `budget` of them the leader is noted in `due`, and `copy` does the rest.
-- Returns the rest of the budget.
local function copy_to_duplicates(queue, batch, line, outcome, iso, now, result_ttl, failure_ttl,
    budget)
  local duplicates, due = duplicates_key(batch, line), 'batchkv:due:' .. queue
  local hash, results = 'batchkv:batch:' .. batch, 'batchkv:res:' .. batch
  local stored = redis.call('HGET', results, line)
  local result, mark = bare(stored), string.sub(stored or '', 1, 1) == '+' and '+' or '='
  local copied = 0
  while result and budget > 0 do
    local duplicate = redis.call('LPOP', duplicates)
    if not duplicate then break end
    budget = budget - 1
    local id = batch .. '-' .. duplicate
    local key = 'rq:job:' .. id
    local job = redis.call('HMGET', key, 'status', 'bkv_custom_id')
    local name = job[2] or ('line-' .. duplicate)
    if job[1] == 'deferred'
        and redis.call('HSETNX', results, duplicate, mark .. #name .. ':' .. name .. result) == 1 then
      copied = copied + 1
      redis.call('RPUSH', 'batchkv:done:' .. batch, duplicate)
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
  if result and redis.call('EXISTS', duplicates) == 1 then
    redis.call('HSET', due, batch .. '-' .. line, outcome)
  else
    redis.call('HDEL', due, batch .. '-' .. line)
  end
  return budget
end

-- The leader was canceled, or is gone: the next waiting duplicate becomes the leader.
local function promote_duplicate(list, batch, line, iso)
  local duplicates = duplicates_key(batch, line)
  while true do
    local duplicate = redis.call('LPOP', duplicates)
    if not duplicate then return end
    local id = batch .. '-' .. duplicate
    local job = redis.call('HMGET', 'rq:job:' .. id, 'status', 'bkv_first')
    if job[1] == 'deferred' then
      redis.call('HSET', 'rq:job:' .. id, 'status', 'queued', 'enqueued_at', iso)
      redis.call('LPUSH', list, id)
      if redis.call('EXISTS', duplicates) == 1 then
        redis.call('RENAME', duplicates, duplicates_key(batch, duplicate))
      end
      -- Rows that are retried find their leader here.
      local first = 'rq:job:' .. batch .. '-' .. (job[2] or duplicate)
      if redis.call('EXISTS', first) == 1 then redis.call('HSET', first, 'bkv_lead', duplicate) end
      return
    end
  end
end

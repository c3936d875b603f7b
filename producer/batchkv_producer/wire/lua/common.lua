-- Put before the scripts that need it (`scripts.py`).
-- The list in which a batch's rows wait: the queue's own, or that of the batch's priority.
local function list_of(queue_key, batch)
  local priority = batch and redis.call('HGET', 'batchkv:batch:' .. batch, 'priority')
  if priority == 'high' or priority == 'low' then return queue_key .. ':' .. priority end
  return queue_key
end

-- A full server refuses writes that add to it, except in a script that has deleted something before.
-- Scripts that free memory, or lead to that, begin with this. No line is called 0.
local function allow_when_full(batch) redis.call('HDEL', 'batchkv:held:' .. batch, '0') end

-- Whether `batchkv forget` has begun with a batch, or only a job is left of it, which a stock tool brought
-- back. Nothing more is written for such a batch.
local marks = {}
local function is_forgotten(batch)
  if marks[batch] == nil then
    local said = redis.call('HMGET', 'batchkv:batch:' .. batch, 'forgotten', 'digest')
    marks[batch] = said[1] == '1' or (#batch == 16 and not said[2])
  end
  return marks[batch]
end

-- A result without the custom_id that a copy has before it (`stamp.py`).
local function bare(result)
  local size, rest = string.match(result or '', '^=(%d+):()')
  return size and string.sub(result, rest + tonumber(size)) or result
end

-- What a batch keeps of a stretch of rows, beside their jobs.
local function store_facts(hash, number, digests, names)
  if digests ~= '' then redis.call('HSET', hash .. ':rows', 'd' .. number, digests) end
  if names ~= '' then redis.call('HSET', hash .. ':rows', 'n' .. number, names) end
end

-- Nobody holds this row any more. The holder is also kept outside the job, so that the count stays right
-- when a tool deletes a running job.
local function release(batch, line)
  if batch and redis.call('HDEL', 'batchkv:held:' .. batch, line) == 1
      and redis.call('EXISTS', 'batchkv:batch:' .. batch) == 1 then
    redis.call('HINCRBY', 'batchkv:batch:' .. batch, 'running', -1)
  end
end

-- If the batch has ended and says how long it is kept, all its keys expire at one moment.
local function keep_if_done(batch, now)
  local hash = 'batchkv:batch:' .. batch
  local keep = redis.call('HGET', hash, 'keep')
  if not keep then return end
  local counts = redis.call('HMGET', hash, 'total', 'ok', 'failed', 'canceled', 'chunks', 'num_chunks')
  if tonumber(counts[2]) + tonumber(counts[3]) + tonumber(counts[4]) < tonumber(counts[1])
      or counts[5] ~= counts[6] then
    return
  end
  local at = math.floor(tonumber(now)) + tonumber(keep)
  redis.call('HSET', hash, 'kept_until', at)
  for _, key in ipairs({hash, hash .. ':rows', 'batchkv:res:' .. batch, 'batchkv:done:' .. batch}) do
    redis.call('EXPIREAT', key, at)
  end
end

-- Rows of an ended batch are queued again: under a new timeout and deadline if they are given, and no
-- longer about to expire.
local function reopen(batch, timeout, expires)
  local hash = 'batchkv:batch:' .. batch
  if tonumber(timeout) > 0 then redis.call('HSET', hash, 'job_timeout', timeout) end
  if expires == '0' then
    redis.call('HDEL', hash, 'expires')
  elseif expires ~= '' then
    redis.call('HSET', hash, 'expires', expires)
  end
  if redis.call('HDEL', hash, 'kept_until', 'kept_jobs') > 0 then
    for _, key in ipairs({hash, hash .. ':rows', 'batchkv:res:' .. batch, 'batchkv:done:' .. batch}) do
      redis.call('PERSIST', key)
    end
  end
end

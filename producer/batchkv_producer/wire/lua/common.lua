-- Put before the scripts that need it (`scripts.py`).
-- The list in which a batch's rows wait: the queue's own, or that of the batch's priority.
local function list_of(queue_key, batch)
  local priority = batch and redis.call('HGET', 'batchkv:batch:' .. batch, 'priority')
  if priority == 'high' or priority == 'low' then return queue_key .. ':' .. priority end
  return queue_key
end

-- A full server refuses writes that add data, except in a script that has deleted something before.
-- Scripts that free memory, or prepare that, begin with this. No line has the number 0.
local function allow_when_full(batch) redis.call('HDEL', 'batchkv:held:' .. batch, '0') end

-- Whether `batchkv forget` has begun to delete a batch, or only one job is left of it, which a stock
-- tool restored. Nothing is written for such a batch.
local marks = {}
local function is_forgotten(batch)
  if marks[batch] == nil then
    local fields = redis.call('HMGET', 'batchkv:batch:' .. batch, 'forgotten', 'digest')
    marks[batch] = fields[1] == '1' or (#batch == 16 and not fields[2])
  end
  return marks[batch]
end

-- A result without the custom_id that a copy or a reused one has before it (`stamp.py`).
local function bare(result)
  local size, rest = string.match(result or '', '^[=+](%d+):()')
  return size and string.sub(result, rest + tonumber(size)) or result
end

-- Store the facts of a stretch of rows. They outlive the jobs.
local function store_facts(hash, number, digests, names)
  if digests ~= '' then redis.call('HSET', hash .. ':rows', 'd' .. number, digests) end
  if names ~= '' then redis.call('HSET', hash .. ':rows', 'n' .. number, names) end
end

-- Remove the holder of this row. The holder is also stored outside the job, so that the count stays
-- right if a tool deletes a running job.
local function release(batch, line)
  if batch and redis.call('HDEL', 'batchkv:held:' .. batch, line) == 1
      and redis.call('EXISTS', 'batchkv:batch:' .. batch) == 1 then
    redis.call('HINCRBY', 'batchkv:batch:' .. batch, 'running', -1)
  end
end

-- If the batch has ended and has a time to keep, all its keys get one time to expire.
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

-- Prepare an ended batch for rows that are queued again: store a new timeout and deadline if they are
-- given, and let its keys no longer expire.
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

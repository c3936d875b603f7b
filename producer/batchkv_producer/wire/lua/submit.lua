-- Enqueue one chunk of a batch, exactly once. Only the next chunk is accepted, so that every job is
-- queued once even after an interrupted submit, or with two submits at once.
-- KEYS: batch hash, queue list, results, done, set of queues.  The list of the batch's priority is
-- derived.
-- ARGV: queue name, chunk number (from 0), time in ISO 8601, job timeout (s), result ttl (s),
--       failure ttl (s), description, digests and names of a stretch of rows (`row_facts.py`),
--       batch whose answers may be kept ('' for none), number of ends of its rows when it was
--       read, number of jobs, then id, data, shared bytes, needs, kept, reuse for each job, then line,
--       result for each row that failed before it was queued.
-- `needs`, `kept` and `reuse` may be ''; `reuse` is the digest of the request, then the custom_id, of a
-- row that may end with a remembered answer (`reuse.lua`). `kept` is <line of the earlier batch>:
-- <custom_id>, with a "c" before the colon if that line's answer was cut at max_tokens. Such a row ends at once with that line's answer,
-- if both batches have the same model, scheme and dtype. This batch then stores those that it lacks.
-- Otherwise the row is queued.
-- Returns the number of chunks enqueued so far.
local queue, chunk, now, timeout, result_ttl, failure_ttl, description, num_jobs =
  ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[12])
local chunks, forgotten = unpack(redis.call('HMGET', KEYS[1], 'chunks', 'forgotten'), 1, 2)
if not chunks or forgotten then return -1 end
if tonumber(chunks) ~= chunk then return tonumber(chunks) end
local batch = string.match(KEYS[1], '%x+$')
local list = list_of(KEYS[2], batch)
redis.call('SADD', KEYS[5], KEYS[2], list)
store_facts(KEYS[1], ARGV[2], ARGV[8], ARGV[9])
local ids, position, leaders = {}, 13, {}

local function may_keep(earlier)
  if earlier == '' then return false end
  local names = {'fingerprint', 'scheme', 'dtype', 'mixed', 'forgotten'}
  local its = redis.call('HMGET', 'batchkv:batch:' .. earlier, unpack(names))
  local own = redis.call('HMGET', KEYS[1], unpack(names))
  if not its[1] or not its[2] or its[4] or its[5]
      or redis.call('LLEN', 'batchkv:done:' .. earlier) ~= tonumber(ARGV[11]) then
    return false
  end
  for index = 1, own[4] and 1 or 3 do
    if own[index] and own[index] ~= its[index] then return false end
  end
  for index = 1, own[4] and 1 or 3 do
    if its[index] then redis.call('HSETNX', KEYS[1], names[index], its[index]) end
  end
  return true
end

local earlier = may_keep(ARGV[10]) and ARGV[10]

-- End the row with the answer of an earlier batch's line. Returns whether it did.
local function keep(id, kept)
  local from, cut, name = string.match(kept, '^(%d+)(c?):(.*)$')
  local result = earlier and from and redis.call('HGET', 'batchkv:res:' .. earlier, from)
  if not result then return false end
  local line = string.match(id, '(%d+)$')
  if redis.call('HSETNX', KEYS[3], line, '=' .. #name .. ':' .. name .. bare(result)) == 1 then
    redis.call('RPUSH', KEYS[4], line)
    redis.call('HINCRBY', KEYS[1], 'ok', 1)
    redis.call('HINCRBY', KEYS[1], 'kept', 1)
    if cut == 'c' then redis.call('HINCRBY', KEYS[1], 'cut', 1) end
    leaders[#leaders + 1] = {line, cut == 'c'}
  end
  return true
end

local is_first = false  -- the first job of the prefix ended at once: the next one is the first
for _ = 1, num_jobs do
  local id, shared = ARGV[position], ARGV[position + 2]
  if ARGV[position + 4] ~= '' and keep(id, ARGV[position + 4]) then
    is_first = is_first or string.match(shared, '^0%d') ~= nil
  else
    if is_first and string.sub(shared, 1, 1) ~= '0' then shared = '0' .. shared end
    is_first = false
    local more = ARGV[position + 3] ~= '' and {'bkv_needs', ARGV[position + 3]} or {}
    if ARGV[position + 5] ~= '' then
      more[#more + 1] = 'bkv_reuse'
      more[#more + 1] = ARGV[position + 5]
    end
    redis.call('DEL', 'rq:job:' .. id)  -- a key of an earlier batch with this id has a time to live
    redis.call('HSET', 'rq:job:' .. id, 'data', ARGV[position + 1], 'created_at', now,
      'enqueued_at', now, 'origin', queue, 'status', 'queued', 'description', description,
      'timeout', timeout, 'result_ttl', result_ttl, 'failure_ttl', failure_ttl, 'retries_left', 3,
      'bkv_shared', shared, unpack(more))
    ids[#ids + 1] = id
  end
  position = position + 6
end
-- Many at once are faster; unpack accepts some thousands at most.
for first = 1, #ids, 1000 do
  redis.call('RPUSH', list, unpack(ids, first, math.min(first + 999, #ids)))
end
while position < #ARGV do
  if redis.call('HSETNX', KEYS[3], ARGV[position], ARGV[position + 1]) == 1 then
    redis.call('RPUSH', KEYS[4], ARGV[position])
    redis.call('HINCRBY', KEYS[1], 'failed', 1)
  end
  position = position + 2
end
if redis.call('HEXISTS', KEYS[1], 'dedupe') == 1 then
  local at, budget = tonumber(redis.call('TIME')[1]), 1000
  for _, leader in ipairs(leaders) do
    local line, before = leader[1], budget
    if redis.call('EXISTS', duplicates_key(batch, line)) == 1 then
      budget = copy_to_duplicates(queue, batch, line, 'ok', now, at, tonumber(result_ttl),
        tonumber(failure_ttl), budget)
      if leader[2] then redis.call('HINCRBY', KEYS[1], 'cut', before - budget) end
    end
  end
end
chunks = redis.call('HINCRBY', KEYS[1], 'chunks', 1)
keep_if_done(batch, redis.call('TIME')[1])
return chunks

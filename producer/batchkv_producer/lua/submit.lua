-- Enqueue one chunk of a batch, exactly once: a chunk whose turn is not now is left alone, so that
-- an interrupted submit, or two at once, end with every job queued one time.
-- KEYS: batch hash, queue list, results, done, set of queues.  The list of the batch's priority is
-- derived.
-- ARGV: queue name, chunk number (from 0), time in ISO 8601, job timeout (s), result ttl (s),
--       failure ttl (s), description, digests and names of a stretch of rows (`row_facts.py`),
--       number of jobs, then id, data, shared bytes, needs for
--       each job ('' for none), then line, result for each row that failed before it was queued.
-- Returns the number of chunks enqueued so far.
local queue, chunk, now, timeout, result_ttl, failure_ttl, description, num_jobs =
  ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[10])
local chunks, forgotten = unpack(redis.call('HMGET', KEYS[1], 'chunks', 'forgotten'), 1, 2)
if not chunks or forgotten then return -1 end
if tonumber(chunks) ~= chunk then return tonumber(chunks) end
local batch = string.match(KEYS[1], '%x+$')
local list = list_of(KEYS[2], batch)
redis.call('SADD', KEYS[5], KEYS[2], list)
store_facts(KEYS[1], ARGV[2], ARGV[8], ARGV[9])
local ids, position = {}, 11
for _ = 1, num_jobs do
  local id = ARGV[position]
  redis.call('HSET', 'rq:job:' .. id, 'data', ARGV[position + 1], 'created_at', now,
    'enqueued_at', now, 'origin', queue, 'status', 'queued', 'description', description,
    'timeout', timeout, 'result_ttl', result_ttl, 'failure_ttl', failure_ttl, 'retries_left', 3,
    'bkv_shared', ARGV[position + 2])
  if ARGV[position + 3] ~= '' then
    redis.call('HSET', 'rq:job:' .. id, 'bkv_needs', ARGV[position + 3])
  end
  ids[#ids + 1] = id
  position = position + 4
end
-- Many at once is faster; unpack takes some thousands at most.
for first = 1, num_jobs, 1000 do
  redis.call('RPUSH', list, unpack(ids, first, math.min(first + 999, num_jobs)))
end
while position < #ARGV do
  if redis.call('HSETNX', KEYS[3], ARGV[position], ARGV[position + 1]) == 1 then
    redis.call('RPUSH', KEYS[4], ARGV[position])
    redis.call('HINCRBY', KEYS[1], 'failed', 1)
  end
  position = position + 2
end
chunks = redis.call('HINCRBY', KEYS[1], 'chunks', 1)
keep_if_done(batch, redis.call('TIME')[1])
return chunks

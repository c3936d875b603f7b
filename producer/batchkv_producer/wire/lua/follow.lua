-- Store one chunk of duplicates, exactly once, as `submit` does. Chunks of duplicates come before those
-- of their leaders.
-- KEYS: batch hash.
-- ARGV: queue name, chunk number (from 0), time in ISO 8601, job timeout (s), result ttl (s),
--       failure ttl (s), description, digests and names of a stretch of rows (`row_facts.py`),
--       then id, data, custom_id, line of the leader, needs, reuse (see `submit`) for each.
-- Returns the number of chunks submitted so far.
local queue, chunk, now, timeout, result_ttl, failure_ttl, description =
  ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local chunks, forgotten = unpack(redis.call('HMGET', KEYS[1], 'chunks', 'forgotten'), 1, 2)
if not chunks or forgotten then return -1 end
if tonumber(chunks) ~= chunk then return tonumber(chunks) end
store_facts(KEYS[1], ARGV[2], ARGV[8], ARGV[9])
for position = 10, #ARGV, 6 do
  local id, leader = ARGV[position], ARGV[position + 3]
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local more = ARGV[position + 4] ~= '' and {'bkv_needs', ARGV[position + 4]} or {}
  if ARGV[position + 5] ~= '' then
    more[#more + 1] = 'bkv_reuse'
    more[#more + 1] = ARGV[position + 5]
  end
  -- A key of an earlier batch with this id has a time to live; see `allow_when_full`.
  if redis.call('EXISTS', 'rq:job:' .. id) == 1 then redis.call('DEL', 'rq:job:' .. id) end
  redis.call('HSET', 'rq:job:' .. id, 'data', ARGV[position + 1], 'created_at', now,
    'enqueued_at', now, 'origin', queue, 'status', 'deferred', 'description', description,
    'timeout', timeout, 'result_ttl', result_ttl, 'failure_ttl', failure_ttl, 'retries_left', 3,
    'bkv_custom_id', ARGV[position + 2], 'bkv_first', leader, unpack(more))
  redis.call('RPUSH', duplicates_key(batch, leader), line)
end
return redis.call('HINCRBY', KEYS[1], 'chunks', 1)

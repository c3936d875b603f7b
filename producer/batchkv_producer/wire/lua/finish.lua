-- started -> finished | failed: end jobs that this worker holds; result, counters, finish order and
-- RQ's bookkeeping in one step. Only the holder of the job's current execution may end it, and a
-- line gets at most one result. Their duplicates end with them (`duplicates.lua`). Jobs that have begun
-- because others ended are marked as begun, for `reap`.
-- A row goes back to the queue if its batch has another model, KV scheme or dtype than this worker.
-- An answer of a batch with `reuse` is remembered (`reuse.lua`), if the worker gives its digest.
-- KEYS: wip, finished, failed zsets, worker hash, queue list.
-- ARGV: time in ISO 8601, result ttl (s), failure ttl (s), queue name, most copies, fingerprint, KV
--       scheme and dtype's class of the worker ('*' each: compare nothing), seconds for which answers
--       are remembered, most of them, most of their bytes, number of jobs that have begun, then id,
--       execution for each of these, then for each job that ends: id, execution, 'ok', 'cut' (ok, and
--       cut at max_tokens) or 'failed', result, prompt, completion, cached tokens, busy ms, ms that
--       the cached tokens saved, digest of its request, or '' if its answer is not to be remembered.
-- Returns for each job that ends 'ok', 'lost' (somebody else holds or ended it), 'duplicate', or
-- 'unfit' (it waits again).
local iso, result_ttl, failure_ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
local queue, budget = ARGV[4], tonumber(ARGV[5])
local maker, batches = {ARGV[6], ARGV[7], ARGV[8]}, {}
local verdicts, ok, failed, ended = {}, 0, 0, {}
local limits = {tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])}
local first, num_remembered = 13 + 2 * tonumber(ARGV[12]), 0

-- The fields of the batch: {fingerprint, scheme, dtype, mixed, dedupe, reuse}; read once.
local function batch_fields(batch)
  batches[batch] = batches[batch] or redis.call('HMGET', 'batchkv:batch:' .. batch, 'fingerprint',
    'scheme', 'dtype', 'mixed', 'dedupe', 'reuse')
  return batches[batch]
end

for position = 13, first - 1, 2 do
  local key = 'rq:job:' .. ARGV[position]
  if redis.call('HGET', key, 'bkv_exec') == ARGV[position + 1] then
    redis.call('HSET', key, 'bkv_begun', '1')
  end
end
for position = first, #ARGV, 10 do
  local id, execution, outcome, result = unpack(ARGV, position, position + 3)
  local digest = ARGV[position + 9]
  local key = 'rq:job:' .. id
  local is_cut = outcome == 'cut'
  if is_cut then outcome = 'ok' end
  local verdict = 'lost'
  if redis.call('HGET', key, 'bkv_exec') == execution then
    local batch, line = string.match(id, '^(%x+)%-(%d+)$')
    local hash = batch and 'batchkv:batch:' .. batch
    redis.call('ZREM', KEYS[1], id .. ':' .. execution)
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
    release(batch, line)
    local is_dropped = batch and is_forgotten(batch)
    verdict = is_dropped and 'lost' or 'duplicate'
    if batch and not is_dropped and not suits(maker, batch_fields(batch)) then
      verdict = 'unfit'
    elseif not batch then
      verdict = 'ok'  -- a job that batchkv did not make: only RQ's record is written
    elseif not is_dropped
        and redis.call('HSETNX', 'batchkv:res:' .. batch, line, result) == 1 then
      verdict = 'ok'
      redis.call('RPUSH', 'batchkv:done:' .. batch, line)
      redis.call('HINCRBY', hash, outcome, 1)
      if is_cut then
        redis.call('HINCRBY', hash, 'cut', 1)
        -- Other steps may make the copies to its duplicates.
        if redis.call('EXISTS', duplicates_key(batch, line)) == 1 then
          redis.call('HSET', key, 'bkv_cut', '1')
        end
      end
      for offset, field in ipairs(
        {'prompt_tokens', 'completion_tokens', 'cached_tokens', 'busy_ms', 'saved_ms'}
      ) do
        local amount = ARGV[position + 3 + offset]
        if amount ~= '0' then redis.call('HINCRBY', hash, field, amount) end
      end
      local scope = batch_fields(batch)[6]
      if outcome == 'ok' and #digest == DIGEST_BYTES and scope then
        local answer = reuse_key(scope, queue, maker, digest)
        if answer and remember(answer, batch, result, is_cut, limits) then
          num_remembered = num_remembered + 1
        end
      end
      ended[batch] = ended[batch] or {}
      table.insert(ended[batch], {line, outcome})
    end
    if is_dropped then
      redis.call('DEL', key)
    elseif verdict == 'unfit' then
      redis.call('HSET', key, 'status', 'queued', 'worker_name', '')
      redis.call('LPUSH', list_of(KEYS[5], batch), id)
    elseif outcome == 'ok' then
      ok = ok + 1
      redis.call('ZREM', KEYS[3], id)
      redis.call('HSET', key, 'status', 'finished', 'ended_at', iso, 'data', '')
      redis.call('EXPIRE', key, result_ttl)
      redis.call('ZADD', KEYS[2], now + result_ttl, id)
    else
      failed = failed + 1
      redis.call('HSET', key, 'status', 'failed', 'ended_at', iso)
      redis.call('EXPIRE', key, failure_ttl)
      redis.call('ZADD', KEYS[3], now + failure_ttl, id)
    end
  end
  verdicts[#verdicts + 1] = verdict
end
for batch, rows in pairs(ended) do
  if batch_fields(batch)[5] then
    for _, row in ipairs(rows) do
      if redis.call('EXISTS', duplicates_key(batch, row[1])) == 1 then
        budget = copy_to_duplicates(queue, batch, row[1], row[2], iso, now, result_ttl, failure_ttl,
          budget)
      end
    end
  end
  keep_if_done(batch, now)
end
if num_remembered > 0 then forget_oldest(num_remembered, limits) end
-- RQ's list of finished jobs expires with its last record.
if ok > 0 then redis.call('EXPIRE', KEYS[2], result_ttl) end
if redis.call('EXISTS', KEYS[4]) == 1 then
  if ok > 0 then redis.call('HINCRBY', KEYS[4], 'successful_job_count', ok) end
  if failed > 0 then redis.call('HINCRBY', KEYS[4], 'failed_job_count', failed) end
end
return verdicts

-- queued -> started: take up to `count` jobs from the head of a queue and register each with RQ, all
-- in one step, so that no crash can leave a job between the queue and its holder. All are of one
-- priority, the highest that has any; of high ones no worker takes more than an equal share.
-- An id is dropped if its job is gone, has ended, or is held under a lease that still runs. (Stock tools
-- can queue an id twice, or restore a job that ended meanwhile.) An entry that is no id is dropped: RQ's
-- ids have only letters, digits, "_" and "-". A row is dropped if its batch is gone
-- or is being deleted.
-- Rows of a batch with another model, KV scheme or dtype than this worker's are skipped. So are rows that
-- need an ability that the worker lacks. They move to the end of the list if another row of it fits, and
-- stay in place otherwise. The rows after them, and rows of lower priority, can be taken. A batch without
-- a model, scheme or dtype gets the worker's with the first row that is taken.
-- Suspects (`suspects.lua`) stay in place, and the rows after them are taken. A worker that may take
-- suspects takes only the group of the first one: as many as begin at once. While suspects wait, no
-- lower priority is taken.
-- A row of a batch with `reuse` whose answer is remembered (`reuse.lua`) ends at once with that answer.
-- Then the batch is this worker's, as if it had taken the row.
-- From `fewest` on, fewer than `count` are taken if the last one's prefix is then not divided.
-- KEYS: lists of high, normal and low priority, wip zset.
-- ARGV: worker name, lease (s), count, time in ISO 8601, largest data accepted (bytes), prefix of the
--       new execution ids, bytes of data after which no further job is taken, number of workers,
--       how many of the jobs begin at once, 1 if suspects are skipped, 1 if they may be
--       taken, the model's fingerprint, KV scheme and dtype's class ('*' each: compare nothing), names
--       of the worker's abilities, between blanks, failure ttl (s), queue name, result ttl (s), fewest.
-- Returns {lengths of the lists afterwards, which of them the jobs are from (1 to 3), jobs, number of
-- suspects skipped, numbers of rows of each list that others must compute, 1 if more such rows, or
-- entries to drop, may come before rows that fit, 1 if the jobs are suspects, number of rows that ended
-- with remembered answers}. A job is {id, execution, data or '' when too large, deaths, timeout (s, 0:
-- none), seconds to the batch's deadline or '', shared bytes or '', 1 if its answer is to be remembered,
-- else 0}. There are no jobs while RQ's workers are suspended.
local worker, lease, count, iso, max_bytes, prefix, enough_bytes = ARGV[1], tonumber(ARGV[2]),
  tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local wip, num_workers = KEYS[4], math.max(1, tonumber(ARGV[8]))
local num_begin, knows_suspects, may_be_apart = tonumber(ARGV[9]), ARGV[10] == '1', ARGV[11] == '1'
local maker, abilities = {ARGV[12], ARGV[13], ARGV[14]}, ' ' .. ARGV[15] .. ' '
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local taken, passed, num_bytes, from, batches = {}, {}, 0, 2, {}
local unfit, lacking, num_lacking, has_more = {0, 0, 0}, {}, {0, 0, 0}, 0
local budget = {10000, 10000, 10000}  -- of each list: entries for other workers that one pull reads
local num_passed = 0
local apart = nil  -- the group of suspects that this pull takes
local MOST_LACKING = 1000  -- of each list
local STRAY = 200  -- other jobs that are read in search of its members
local MOST_REUSED = 500  -- rows that one pull ends
local queue, result_ttl, fewest = ARGV[17], tonumber(ARGV[18]), tonumber(ARGV[19])
local num_reused, reused_bytes, reusing = 0, 0, {}

local function lengths()
  return {redis.call('LLEN', KEYS[1]), redis.call('LLEN', KEYS[2]), redis.call('LLEN', KEYS[3])}
end

-- The fields of the batch: {fingerprint, scheme, dtype, mixed, deadline, model, forgotten,
-- digest, scope of reused answers, dedupe}; read once.
local function batch_fields(batch)
  local fields = batches[batch]
  if not fields then
    fields = redis.call('HMGET', 'batchkv:batch:' .. batch, 'fingerprint', 'scheme', 'dtype', 'mixed',
      'expires', 'model', 'forgotten', 'digest', 'reuse', 'dedupe')
    fields.fits = suits(maker, fields)
    fields.is_gone = fields[7] or (#batch == 16 and not fields[8])
    batches[batch] = fields
  end
  return fields
end

-- A row of this batch is taken: store the worker's model, scheme and dtype if the batch has none.
local function claim(batch)
  local fields = batch_fields(batch)
  if fields.is_claimed then return end
  fields.is_claimed = true
  for index, name in ipairs({'fingerprint', 'scheme', 'dtype'}) do
    local is_known = maker[index] ~= '' and maker[index] ~= '*'
    if fields[6] and not fields[index] and is_known and (index == 1 or not fields[4]) then
      redis.call('HSET', 'batchkv:batch:' .. batch, name, maker[index])
    end
  end
end

-- End a row with the answer that is remembered for its request. `own` is the digest of its request,
-- then its custom_id. `held` is a lapsed lease. Returns whether it did.
local function reuse(id, batch, line, own, held)
  local fields = batch_fields(batch)
  if not fields[9] or #(own or '') < DIGEST_BYTES then return false end
  local answer = reuse_key(fields[9], queue, maker, string.sub(own, 1, DIGEST_BYTES))
  local value = answer and remembered(answer)
  if not value then return false end
  local key, hash, name = 'rq:job:' .. id, 'batchkv:batch:' .. batch, string.sub(own, DIGEST_BYTES + 1)
  local is_cut = string.sub(value, 1, 1) == 'c'
  claim(batch)
  if held then
    redis.call('ZREM', wip, id .. ':' .. held)
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. held)
    redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
    release(batch, line)
  end
  redis.call('HSET', 'batchkv:res:' .. batch, line, '+' .. #name .. ':' .. name .. string.sub(value, 2))
  redis.call('RPUSH', 'batchkv:done:' .. batch, line)
  redis.call('HINCRBY', hash, 'ok', 1)
  redis.call('HINCRBY', hash, 'reused', 1)
  if is_cut then redis.call('HINCRBY', hash, 'cut', 1) end
  redis.call('HSET', key, 'status', 'finished', 'ended_at', iso, 'data', '')
  redis.call('EXPIRE', key, result_ttl)
  redis.call('ZADD', 'rq:finished:' .. queue, now + result_ttl, id)
  redis.call('EXPIRE', 'rq:finished:' .. queue, result_ttl)
  if fields[10] and redis.call('EXISTS', duplicates_key(batch, line)) == 1 then
    if is_cut then redis.call('HSET', key, 'bkv_cut', '1') end
    copy_to_duplicates(queue, batch, line, 'ok', iso, math.floor(now), result_ttl,
      tonumber(ARGV[16]), 1000)
  end
  num_reused, reused_bytes, reusing[batch] = num_reused + 1, reused_bytes + #value, true
  return true
end

local function seconds_left(batch)
  local at = tonumber(batch_fields(batch)[5] or '')
  return at and tostring(at - now) or ''
end

local function is_for_others(id)
  local batch = #id <= 200 and string.match(id, '^(%x+)%-%d+$')
  return batch and not batch_fields(batch).fits
end

local function lacks_ability(needs)
  for need in string.gmatch(needs or '', '%S+') do
    if not string.find(abilities, ' ' .. need .. ' ', 1, true) then return true end
  end
  return false
end

-- The head of the list is for other workers: move all such rows to the end. Returns whether the new
-- head may be taken. If all rows are for others, none moves.
local function pass_by()
  local key = KEYS[from]
  local length, count, found = redis.call('LLEN', key), 0, false
  while count < length and count < budget[from] and not found do
    for _, id in ipairs(redis.call('LRANGE', key, count, count + 999)) do
      found = not is_for_others(id)
      if found then break end
      count = count + 1
    end
  end
  budget[from] = budget[from] - count
  if count >= length then
    unfit[from] = length
    return false
  end
  unfit[from] = unfit[from] + count
  if not found and #taken + #passed > 0 then return false end  -- the next pull looks further
  for start = 1, count, 1000 do
    redis.call('RPUSH', key, unpack(redis.call('LPOP', key, math.min(1000, count - start + 1))))
  end
  if not found then has_more = 1 end
  return found
end

-- The next job of the first list that has one. Later calls read the same list.
local function next_id()
  while true do
    local is_enough = num_lacking[from] >= MOST_LACKING
    if is_enough and #taken + #passed == 0 then has_more = 1 end  -- the next pull looks further
    local id = not is_enough and redis.call('LPOP', KEYS[from])
    if id and is_for_others(id) then
      redis.call('LPUSH', KEYS[from], id)
      id = pass_by() and redis.call('LPOP', KEYS[from])
    end
    if id or #taken + #passed > 0 or from == 3 then return id end
    from = from + 1
  end
end

-- How many of the next jobs to take, `most` at most: the one after them then shares nothing with the
-- last, or is the first of its prefix. Its shared bytes begin with a 0 in both cases. Entries that are
-- not taken may move the place; then a prefix is divided.
local function before_a_prefix(least, most)
  if least >= most then return most end
  local ids = redis.call('LRANGE', KEYS[from], least, most)
  if #ids <= most - least then return most end
  for after = #ids, 1, -1 do
    local is_id = #ids[after] <= 200 and string.match(ids[after], '^[%w_%-]+$')
    local shared = is_id and redis.pcall('HGET', 'rq:job:' .. ids[after], 'bkv_shared')
    if type(shared) == 'string' and string.sub(shared, 1, 1) == '0' then return least + after - 1 end
  end
  return most
end

if redis.call('EXISTS', 'rq:suspended') == 1 then
  return {lengths(), from, taken, 0, unfit, has_more, 0, 0}
end
local num_high = redis.call('LLEN', KEYS[1])
local share = count
if num_high > 0 then
  from = 1
  share = math.min(count, math.ceil(num_high / num_workers))
end
local limit = nil  -- known with the first job, if that is no suspect
local is_cut_short = true  -- until the loop ends before its last turn
for attempt = 1, math.max(count, num_begin) + 1000 + 3 * MOST_LACKING do
  local most = limit or (from == 1 and share or count)
  if apart then most = math.max(1, is_of_one(apart) and 1 or num_begin) end
  if num_reused >= MOST_REUSED or reused_bytes >= enough_bytes then break end
  local is_enough = #taken >= most or num_bytes >= enough_bytes
  local id = not is_enough and not (apart and #passed >= STRAY) and next_id()
  if not id then
    is_cut_short = false
    break
  end
  local is_id = #id <= 200 and string.match(id, '^[%w_%-]+$')
  local key = 'rq:job:' .. id
  local job = {}
  if is_id then  -- pcall: the key may be of another type, and the other jobs must still be taken
    job = redis.pcall('HMGET', key, 'status', 'bkv_exec', 'bkv_deaths', 'timeout',
      'bkv_shared', 'bkv_needs', 'bkv_suspect', 'bkv_reuse')
  end
  local live = false
  if job[2] and job[2] ~= '' then
    local ends = redis.call('ZSCORE', wip, id .. ':' .. job[2])
    live = ends and tonumber(ends) > now
  end
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local ended = batch and redis.call('HEXISTS', 'batchkv:res:' .. batch, line) == 1
  local deaths = tonumber(string.match(job[3] or '', '^%d%d?%d?%d?$') or '0')
  local group = knows_suspects and suspect_group(id, job[7], job[3]) or nil
  local may_be_taken = group == apart or (not apart and may_be_apart and #taken == 0)
  if ended and job[1] == 'queued' then
    -- The row keeps its result. As a failed job, it can still be retried if its row had failed.
    redis.call('HSET', key, 'status', 'failed')
    redis.call('EXPIRE', key, ARGV[16])
  elseif job[1] == 'queued' and not live and batch and batch_fields(batch).is_gone then
    redis.call('DEL', key)  -- `forget` deletes its other keys
  elseif job[1] == 'queued' and not live and batch
      and reuse(id, batch, line, job[8], job[2] ~= '' and job[2]) then
    -- It has ended.
  elseif job[1] == 'queued' and not live and lacks_ability(job[6]) then
    lacking[#lacking + 1] = {from, id}
    num_lacking[from] = num_lacking[from] + 1
  elseif job[1] == 'queued' and not live and not may_be_taken then
    passed[#passed + 1] = id
    if group then num_passed = num_passed + 1 end
  elseif job[1] == 'queued' and not live then
    if batch then claim(batch) end
    local execution = prefix .. '-' .. attempt
    local held = job[2] and job[2] ~= ''
    -- Delete the lapsed lease only now that a new one replaces it: without a lease `reap` would
    -- never find a job that still counts as started.
    if held then
      redis.call('ZREM', wip, id .. ':' .. job[2])
      redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. job[2])
    end
    redis.call('HSET', key, 'status', 'started', 'started_at', iso, 'last_heartbeat', iso,
      'worker_name', worker, 'bkv_exec', execution)
    -- A stock tool that queued the job again did not clear this field.
    if #taken < num_begin then
      redis.call('HSET', key, 'bkv_begun', '1')
    else
      redis.call('HDEL', key, 'bkv_begun')
    end
    redis.call('PERSIST', key)
    redis.call('ZADD', wip, now + lease, id .. ':' .. execution)
    redis.call('ZADD', 'rq:executions:' .. id, now + lease + 60, execution)
    redis.call('EXPIRE', 'rq:executions:' .. id, lease + 60)
    local execution_key = 'rq:execution:' .. id .. ':' .. execution
    redis.call('HSET', execution_key, 'id', execution, 'created_at', now, 'last_heartbeat', now,
      'worker_name', worker)
    redis.call('EXPIRE', execution_key, lease)
    if batch and redis.call('HSET', 'batchkv:held:' .. batch, line, execution) == 1 then
      redis.call('HINCRBY', 'batchkv:batch:' .. batch, 'running', 1)
    end
    local data = ''
    if redis.call('HSTRLEN', key, 'data') <= max_bytes then
      data = redis.call('HGET', key, 'data') or ''
    end
    num_bytes = num_bytes + #data
    taken[#taken + 1] = {id, execution, data, deaths, tonumber(job[4] or '0') or 0,
      batch and seconds_left(batch) or '', job[5] or '', batch and batch_fields(batch)[9] and 1 or 0}
    apart = group
    if #taken == 1 and not apart then
      local all = from == 1 and share or count  -- the list may be another than this turn began with
      limit = 1 + before_a_prefix(fewest - 1, all - 1)
    end
  end
end
if is_cut_short and #taken + #passed == 0 then has_more = 1 end  -- many entries were dropped
for batch in pairs(reusing) do keep_if_done(batch, now) end
for index = #passed, 1, -1 do redis.call('LPUSH', KEYS[from], passed[index]) end
for _, row in ipairs(lacking) do
  redis.call('RPUSH', KEYS[row[1]], row[2])
  unfit[row[1]] = unfit[row[1]] + 1
end
return {lengths(), from, taken, num_passed, unfit, has_more, apart and 1 or 0, num_reused}

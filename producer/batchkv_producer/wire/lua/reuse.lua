-- Put before the scripts that need it (`scripts.py`). Remembered answers: `finish` stores those of
-- batches with `reuse`, and `pull` ends rows of later ones with them. Only workers may write them.
-- An answer is valid for rows of the same scope, queue (which names the model and its adapter), model
-- fingerprint, KV scheme, dtype's class and request digest. Its key depends on all of them, and on this
-- version. Raise the version when equal requests would get other answers.
local REUSE_VERSION = '1'
local DIGEST_BYTES = 16
local MOST_FORGOTTEN = 1000  -- answers that one step deletes, besides as many as it stores

-- The key of an answer; nil if a part of it is not known. '*' is a worker that says nothing.
local function reuse_key(scope, queue, maker, digest)
  local parts = {REUSE_VERSION, scope, queue, maker[1], maker[2], maker[3], digest}
  for index, part in ipairs(parts) do
    if part == '' or part == '*' then return nil end
    parts[index] = #part .. ':' .. part
  end
  return redis.sha1hex(table.concat(parts))
end

-- A server with rights of an older version refuses these keys: then nothing is remembered or found.
local function remembered(key)
  local value = redis.pcall('GET', 'batchkv:reuse:a:' .. key)
  return type(value) == 'string' and value or nil
end

-- Remember an answer of a batch. `limits`: {seconds, most answers, most bytes}. Returns whether it did.
-- The score of a key in the order is the place where its bytes end among all that were ever written.
local function remember(key, batch, result, is_cut, limits)
  local value = (is_cut and 'c' or '-') .. result
  if #value > limits[3] / 16 then return false end
  local done = redis.pcall('SET', 'batchkv:reuse:a:' .. key, value, 'EX', limits[1], 'NX')
  if not done or done.err then return false end
  local last = redis.call('ZRANGE', 'batchkv:reuse:order', -1, -1, 'WITHSCORES')
  local place = string.format('%.0f', (tonumber(last[2] or '0') or 0) + #value)
  local stored = 'batchkv:reuse:of:' .. batch
  redis.call('ZADD', 'batchkv:reuse:order', place, key)
  -- With its place, because another batch may store it again once it is gone.
  redis.call('RPUSH', stored, key .. ':' .. place)
  -- It lasts as long as its last answer. Workers may have different settings.
  if redis.call('TTL', stored) < limits[1] then redis.call('EXPIRE', stored, limits[1]) end
  return true
end

-- Delete the oldest answers while there are too many, or they have expired. One answer has at most a
-- sixteenth of the bytes, so the oldest one need not be measured.
local function forget_oldest(num_stored, limits)
  for _ = 1, num_stored + MOST_FORGOTTEN do
    local oldest = redis.call('ZRANGE', 'batchkv:reuse:order', 0, 0, 'WITHSCORES')
    if not oldest[1] then return end
    local last = redis.call('ZRANGE', 'batchkv:reuse:order', -1, -1, 'WITHSCORES')
    local key = 'batchkv:reuse:a:' .. oldest[1]
    local is_full = redis.call('ZCARD', 'batchkv:reuse:order') > limits[2]
      or tonumber(last[2]) - tonumber(oldest[2]) > limits[3] * 15 / 16
    if not is_full and redis.call('EXISTS', key) == 1 then return end
    redis.call('DEL', key)
    redis.call('ZREM', 'batchkv:reuse:order', oldest[1])
  end
end

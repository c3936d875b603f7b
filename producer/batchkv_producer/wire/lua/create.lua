-- Create a batch, or join the one that exists. It does not fit if its model, KV scheme, dtype or prompt
-- style differs from the caller's. A field that the batch lacks is stored now. Keys that are left of a
-- batch whose hash has expired, or has no digest, are deleted.
-- KEYS: batch hash, zset of batches.
-- ARGV: batch id, 1 if several schemes and dtypes may compute it, number of the next pairs, fields and
--       values of its model, scheme, dtype and style, then field, value, ... for a new batch.
-- Returns {1 if it fits, digest, chunks, num_chunks, order, priority, expires, keep, dedupe, forgotten,
-- style, reuse} as stored afterwards; the last eight may be nil.
local is_mixed, first = ARGV[2] == '1', 4 + 2 * tonumber(ARGV[3])
local fits = 1
if redis.call('HEXISTS', KEYS[1], 'digest') == 0 then
  -- Only keys that exist: a full server accepts writes in a script that has deleted something.
  for _, key in ipairs({KEYS[1], KEYS[1] .. ':rows', 'batchkv:res:' .. ARGV[1],
      'batchkv:done:' .. ARGV[1], 'batchkv:held:' .. ARGV[1]}) do
    if redis.call('EXISTS', key) == 1 then redis.call('DEL', key) end
  end
  local now = redis.call('TIME')[1]
  redis.call('HSET', KEYS[1], 'created', now, 'chunks', 0, 'ok', 0, 'failed', 0, 'canceled', 0,
    'running', 0, unpack(ARGV, first))
  redis.call('ZADD', KEYS[2], now, ARGV[1])
else
  local was_mixed = redis.call('HEXISTS', KEYS[1], 'mixed') == 1
  for position = 4, first - 1, 2 do
    local there = redis.call('HGET', KEYS[1], ARGV[position])
    local may_vary = ARGV[position] == 'scheme' or ARGV[position] == 'dtype'
    if may_vary and not is_mixed and was_mixed then fits = 0 end
    if there and there ~= ARGV[position + 1] and not (may_vary and is_mixed) then fits = 0 end
  end
end
if fits == 1 then
  for position = 4, first - 1, 2 do
    redis.call('HSETNX', KEYS[1], ARGV[position], ARGV[position + 1])
  end
  if is_mixed then redis.call('HSET', KEYS[1], 'mixed', 1) end
end
local stored = redis.call('HMGET', KEYS[1], 'digest', 'chunks', 'num_chunks', 'order', 'priority',
  'expires', 'keep', 'dedupe', 'forgotten', 'style', 'reuse')
return {fits, unpack(stored, 1, 11)}

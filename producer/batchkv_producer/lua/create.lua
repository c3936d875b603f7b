-- Create a batch, or join the one that exists.
-- KEYS: batch hash, zset of batches.  ARGV: batch id, then field, value, ...
-- Returns {digest, chunks, num_chunks, order, priority, expires, keep, dedupe} as they stand
-- afterwards; the last five may be nil.
if redis.call('EXISTS', KEYS[1]) == 0 then
  local now = redis.call('TIME')[1]
  redis.call('HSET', KEYS[1], 'created', now, 'chunks', 0, 'ok', 0, 'failed', 0, 'canceled', 0,
    'running', 0, unpack(ARGV, 2))
  redis.call('ZADD', KEYS[2], now, ARGV[1])
end
return redis.call('HMGET', KEYS[1], 'digest', 'chunks', 'num_chunks', 'order', 'priority',
  'expires', 'keep', 'dedupe')

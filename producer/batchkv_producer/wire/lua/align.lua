-- Let the jobs of a batch that has ended expire with its other keys, and lists of duplicates if any are
-- left. Jobs that RQ forgets earlier stay as they are.
-- KEYS: batch hash.  ARGV: id for each job; none when all were given.
-- Returns 1, or 0 when the batch has not ended (any more).
local at = redis.call('HGET', KEYS[1], 'kept_until')
if not at then return 0 end
local left = tonumber(at) - tonumber(redis.call('TIME')[1])
local has_duplicates = redis.call('HEXISTS', KEYS[1], 'dedupe') == 1
for _, id in ipairs(ARGV) do
  local ttl = redis.call('TTL', 'rq:job:' .. id)
  if ttl == -1 or ttl > left then redis.call('EXPIREAT', 'rq:job:' .. id, at) end
  if has_duplicates then
    redis.call('EXPIREAT', 'batchkv:twins:' .. string.gsub(id, '-', ':'), at)
  end
end
if #ARGV == 0 then redis.call('HSET', KEYS[1], 'kept_jobs', 1) end
return 1

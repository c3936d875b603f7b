-- deferred -> finished | failed: make copies that a step of `finish` left.
-- KEYS: hash of the queue's ended leaders that have open duplicates.
-- ARGV: queue name, time in ISO 8601, result ttl (s), failure ttl (s), most rows to look at.
-- Returns how many leaders still have duplicates to copy to.
local queue, iso, result_ttl, failure_ttl, budget =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = tonumber(redis.call('TIME')[1])
local due = redis.call('HGETALL', KEYS[1])
for position = 1, #due, 2 do
  local batch, line = string.match(due[position], '^(%x+)%-(%d+)$')
  if not batch or is_forgotten(batch) or redis.call('HEXISTS', 'batchkv:res:' .. batch, line) == 0 then
    redis.call('HDEL', KEYS[1], due[position])
  elseif budget > 0 then
    budget = copy_to_duplicates(queue, batch, line, due[position + 1], iso, now, result_ttl,
      failure_ttl, budget)
    keep_if_done(batch, now)
  end
end
return redis.call('HLEN', KEYS[1])

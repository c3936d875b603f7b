-- Drain a worker that lives, or resume it.
-- KEYS: worker hash.  ARGV: the field, and its value ('' resumes).  Returns 1, or 0 if nobody of
-- that name lives. A record that is gone is not made anew.
local its = redis.call('HMGET', KEYS[1], 'birth', 'death')
if not its[1] or its[2] then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
return 1

-- Remove the ids of one batch from a stretch of a queue, except those that still wait to be run. Each is
-- overwritten with a mark: nothing moves, so a long list costs no more than a short one. The caller
-- removes the marks at the end. A worker that reads a mark or an ended job before that drops it.
-- KEYS: queue list.  ARGV: batch id, first index, number of entries, mark.
-- Returns how many entries were read.
allow_when_full(ARGV[1])
local prefix = ARGV[1] .. '-'
local first = tonumber(ARGV[2])
local ids = redis.call('LRANGE', KEYS[1], first, first + tonumber(ARGV[3]) - 1)
for index, id in ipairs(ids) do
  if string.sub(id, 1, #prefix) == prefix
      and redis.call('HGET', 'rq:job:' .. id, 'status') ~= 'queued' then
    redis.call('LSET', KEYS[1], first + index - 1, ARGV[4])
  end
end
return #ids

-- The lines of a batch that have no result, and the states of their jobs, in one step.
-- KEYS: results hash.  ARGV: batch id, then lines.
-- Returns line and state (null: there is no job) for each.
local found = {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
    found[#found + 1] = ARGV[i]
    found[#found + 1] = redis.call('HGET', 'rq:job:' .. ARGV[1] .. '-' .. ARGV[i], 'status')
  end
end
return found

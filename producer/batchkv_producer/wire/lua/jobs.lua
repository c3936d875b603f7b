-- Read jobs in their order until there are enough bytes, but at least one job.
-- ARGV: bytes that are enough, most bytes of a job's data, states whose data is wanted (',a,b,'),
-- then ids.
-- Returns state and data for each of the first of them; data '' when it is larger than it may be,
-- null when it is not wanted.
local enough, most, states = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local found, num_bytes = {}, 0
for i = 4, #ARGV do
  local key = 'rq:job:' .. ARGV[i]
  local state, data = redis.call('HGET', key, 'status'), false
  if state and string.find(states, ',' .. state .. ',', 1, true) then
    local size = redis.call('HSTRLEN', key, 'data')
    if size > most then
      data = ''
    else
      num_bytes = num_bytes + size
      if num_bytes > enough and #found > 0 then break end
      data = redis.call('HGET', key, 'data') or ''
    end
  end
  found[#found + 1] = state
  found[#found + 1] = data
end
return found

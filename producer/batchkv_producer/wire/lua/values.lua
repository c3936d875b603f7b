-- Read a hash's fields in their order until there are enough bytes, but at least one field.
-- KEYS: hash.  ARGV: bytes that are enough, most bytes of a value, then names of fields.
-- Returns a value for each of the first of them, '' for one that is larger than it may be.
local enough, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local found, num_bytes = {}, 0
for i = 3, #ARGV do
  local size = redis.call('HSTRLEN', KEYS[1], ARGV[i])
  if size > most then
    found[#found + 1] = ''
  else
    num_bytes = num_bytes + size
    if num_bytes > enough and #found > 0 then break end
    found[#found + 1] = redis.call('HGET', KEYS[1], ARGV[i])
  end
end
return found

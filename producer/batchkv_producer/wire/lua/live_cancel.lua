-- queued, started -> : the asker wants no answer any more. Its worker frees the slot at once.
-- ARGV: row for each.  Returns the number of rows that were there.
local num_found = 0
for _, id in ipairs(ARGV) do
  local key = 'batchkv:live:row:' .. id
  local row = redis.call('HMGET', key, 'queue', 'worker')
  if row[1] then
    num_found = num_found + 1
    redis.call('DEL', key)
    redis.call('LREM', 'batchkv:live:' .. row[1], 1, id)
    if row[2] then wake({row[2]}) end
  end
end
return num_found

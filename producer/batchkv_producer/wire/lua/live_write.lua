-- started -> : what a worker has for the askers: pieces of answers, ends, and rows that it gives back.
-- KEYS: list of waiting rows.  ARGV: for each: row, execution, kind, number, payload. Kinds: d is
-- a piece of the text, t a piece of the thought; e the end, with the result; b gives the row back, or ends it with the result
-- if a piece was sent. The numbers of a row count from 1. A number that was written is skipped, so
-- that a call may be repeated.
-- Returns the rows that the worker does not hold.
local lost, is_piece = {}, {d = true, t = true}
for index = 1, #ARGV, 5 do
  local id, execution, kind, number, payload = unpack(ARGV, index, index + 4)
  local key = 'batchkv:live:row:' .. id
  local row = redis.call('HMGET', key, 'exec', 'sent', 'to')
  if row[1] ~= execution then
    lost[#lost + 1] = id
  elseif tonumber(number) > tonumber(row[2]) then
    if kind == 'b' and row[2] == '0' then
      redis.call('HDEL', key, 'exec', 'until', 'worker')
      redis.call('LPUSH', KEYS[1], id)
    else
      local stream = 'batchkv:live:to:' .. row[3]
      redis.call('XADD', stream, '*', 'r', id, 'k', is_piece[kind] and kind or 'e', 'p', payload)
      redis.call('EXPIRE', stream, 120)
      if is_piece[kind] then
        redis.call('HSET', key, 'sent', number)
      else
        redis.call('DEL', key)
      end
    end
  end
end
return lost

-- The asker is alive: its rows stay. A row whose worker is gone is queued again if nothing of its
-- answer was sent, once; else it has ended.
-- KEYS: stream of the asker.  ARGV: asker's lease (s), row for each.
-- Returns for each row: 'kept', 'gone' (it has ended, or its lease was over), 'lost' (its worker is
-- gone) or 'nobody' (it waits, and no worker is left).
local now, answers = tonumber(redis.call('TIME')[1]), {}
redis.call('EXPIRE', KEYS[1], 4 * tonumber(ARGV[1]))
for index = 2, #ARGV do
  local id, key = ARGV[index], 'batchkv:live:row:' .. ARGV[index]
  local row = redis.call('HMGET', key, 'queue', 'exec', 'until', 'sent', 'again', 'needs')
  local answer = 'kept'
  if not row[1] then
    answer = 'gone'
  else
    local list = 'batchkv:live:' .. row[1]
    if row[2] and tonumber(row[3]) < now then
      if row[4] == '0' and row[5] == '0' then
        redis.call('HDEL', key, 'exec', 'until', 'worker')
        redis.call('HSET', key, 'again', 1)
        redis.call('LPUSH', list, id)
        row[2] = false
      else
        redis.call('DEL', key)
        answer = 'lost'
      end
    end
    if answer == 'kept' and not row[2] then
      local found, names = live_workers(row[1], row[6])
      if found == 'nobody' then
        redis.call('DEL', key)
        redis.call('LREM', list, 1, id)
        answer = 'nobody'
      else
        wake(names)  -- again: a subscription may have been lost
      end
    end
    redis.call('EXPIRE', key, ARGV[1])
  end
  answers[#answers + 1] = answer
end
return answers

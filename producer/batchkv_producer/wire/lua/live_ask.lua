-- -> queued: live rows, each unless nobody can answer it now or too many wait.
-- KEYS: for each row: list of waiting rows, row hash.  ARGV: asker, asker's lease (s), most that may
-- wait, then for each row: row, queue, data, needs, fingerprint of the model ('' for any), timeout
-- (s), which pieces of the answer are wanted.
-- Returns for each row 'ok', 'loading', 'away', 'nobody' or 'full'. Only with 'ok' it was written.
local answers, known, woken = {}, {}, {}
for index = 1, #KEYS / 2 do
  local list, key, at = KEYS[2 * index - 1], KEYS[2 * index], 7 * index - 3
  local id, queue, data, needs, fingerprint, timeout, pieces = unpack(ARGV, at, at + 6)
  local able = queue .. ' ' .. needs
  known[able] = known[able] or {live_workers(queue, needs)}
  local found = known[able][1]
  if found == 'ok' and redis.call('LLEN', list) >= tonumber(ARGV[3]) then found = 'full' end
  if found == 'ok' then
    redis.call('HSET', key, 'queue', queue, 'data', data, 'to', ARGV[1], 'needs', needs,
      'fingerprint', fingerprint, 'timeout', timeout, 'pieces', pieces, 'sent', 0, 'again', 0)
    redis.call('EXPIRE', key, ARGV[2])
    redis.call('RPUSH', list, id)
    redis.call('EXPIRE', list, 86400)  -- rows whose asker is gone need a worker to drop them
    for _, name in ipairs(known[able][2]) do woken[name] = true end
  end
  answers[index] = found
end
local names = {}
for name in pairs(woken) do names[#names + 1] = name end
wake(names)
return answers

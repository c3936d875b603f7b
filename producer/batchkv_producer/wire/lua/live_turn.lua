-- queued -> started: one exchange of a worker. Its leases of live rows are renewed, those that it has
-- lost are reported, and rows that wait are taken, the oldest first.
-- A row is dropped if its asker is gone. A row stays in place if it is for other weights, or needs an
-- ability that the worker lacks.
-- KEYS: list of waiting rows, worker hash, key of the queue's last worker.
-- ARGV: worker, worker's lease (s), most to take, prefix of the new executions, the model's
-- fingerprint, names of the worker's abilities, between blanks, number of rows held, then row,
-- execution of each.
-- Returns {rows that were lost, rows taken}. A row taken is {row, execution, data, timeout (s),
-- which pieces its asker wants}.
local MOST_READ = 200
local worker, lease, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local abilities = ' ' .. ARGV[6] .. ' '
local now, lost, taken, left = tonumber(redis.call('TIME')[1]), {}, {}, {}
for index = 8, 7 + 2 * tonumber(ARGV[7]), 2 do
  local key = 'batchkv:live:row:' .. ARGV[index]
  if redis.call('HGET', key, 'exec') == ARGV[index + 1] then
    redis.call('HSET', key, 'until', now + lease)
  else
    lost[#lost + 1] = ARGV[index]
  end
end
if redis.call('HEXISTS', KEYS[2], 'birth') == 1 then
  redis.call('HSET', KEYS[2], 'bkv_live', '1')
  redis.call('SET', KEYS[3], worker, 'EX', 60)
end

local function fits(row)
  if row[4] ~= '' and ARGV[5] ~= '' and row[4] ~= ARGV[5] then return false end
  for need in string.gmatch(row[3], '%S+') do
    if not string.find(abilities, ' ' .. need .. ' ', 1, true) then return false end
  end
  return true
end

for attempt = 1, MOST_READ do
  local id = #taken < most and redis.call('LPOP', KEYS[1])
  if not id then break end
  local key = 'batchkv:live:row:' .. id
  local row = redis.call('HMGET', key, 'data', 'exec', 'needs', 'fingerprint', 'timeout',
    'pieces')
  if row[1] and not row[2] then
    if fits(row) then
      local execution = ARGV[4] .. '-' .. attempt
      redis.call('HSET', key, 'exec', execution, 'worker', worker, 'until', now + lease)
      taken[#taken + 1] = {id, execution, row[1], row[5], row[6] or 'text'}
    else
      left[#left + 1] = id
    end
  end
end
for index = #left, 1, -1 do redis.call('LPUSH', KEYS[1], left[index]) end
if #taken > 0 or tonumber(ARGV[7]) > 0 then redis.call('SET', KEYS[3] .. ':used', '1', 'EX', 60) end
return {lost, taken}

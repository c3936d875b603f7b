-- Add a worker's work to the totals of its queue, and store one sample a minute of each queue.
-- The first call of any worker in a new minute stores the sample of the last one. A call may be
-- repeated: the worker's record has the counts that were added already.
-- KEYS: worker hash, then for each queue: list of samples, hash of totals, its three lists of waiting
-- jobs, wip zset, set of workers. The work is that of the first queue.
-- ARGV: samples to keep, seconds until unused keys expire, name of the worker's process, then its
-- counts since it began, in the order of NAMES.
-- Returns the number of samples stored.
local NAMES = {'prompt_tokens', 'cached_tokens', 'completion_tokens', 'rows_done', 'rows_failed'}
local KEYS_EACH = 7
local most, expiry, since = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local minute = math.floor(tonumber(redis.call('TIME')[1]) / 60) * 60

-- The work since the last call. None if the record was lost: how much was added is not known.
local function new_work()
  local before, work = redis.call('HGET', KEYS[1], 'bkv_counted'), {}
  if redis.call('EXISTS', KEYS[1]) == 0 then return work end
  local counts = {unpack(ARGV, 4, 3 + #NAMES)}
  redis.call('HSET', KEYS[1], 'bkv_counted', since .. ' ' .. table.concat(counts, ' '))
  if not before then return work end
  local words = {}
  for word in string.gmatch(before, '%S+') do words[#words + 1] = word end
  for index = 1, #NAMES do
    local was = words[1] == since and tonumber(words[index + 1]) or 0
    work[index] = math.max(0, tonumber(counts[index]) - was)
  end
  return work
end

-- Store the sample of the minute that the hash describes, if that one is over.
local function store(list, hash)
  local facts = redis.call('HMGET', hash, 'minute', 'waiting', 'running', 'workers')
  if facts[1] == tostring(minute) then return 0 end
  local totals = redis.call('HMGET', hash, unpack(NAMES))
  local before = {}
  for index, name in ipairs(NAMES) do before[index] = name .. '_before' end
  before = redis.call('HMGET', hash, unpack(before))
  if facts[1] then
    local sample = {
      at = tonumber(facts[1]), waiting = tonumber(facts[2]), running = tonumber(facts[3]),
      workers = tonumber(facts[4]),
    }
    for index, name in ipairs(NAMES) do
      sample[name] = tonumber(totals[index] or 0) - tonumber(before[index] or 0)
    end
    local num = redis.call('RPUSH', list, cjson.encode(sample))
    if num > most then redis.call('LPOP', list, num - most) end
    redis.call('EXPIRE', list, expiry)
  end
  for index, name in ipairs(NAMES) do
    redis.call('HSET', hash, name .. '_before', totals[index] or 0)
  end
  redis.call('HSET', hash, 'minute', tostring(minute))
  return facts[1] and 1 or 0
end

-- RQ's set keeps the keys of killed workers, but their hashes expire.
local function num_workers(set)
  local num = 0
  for _, key in ipairs(redis.call('SMEMBERS', set)) do
    local record = redis.call('HMGET', key, 'birth', 'death')
    if record[1] and not record[2] then num = num + 1 end
  end
  return num
end

local work, num_stored = new_work(), 0
for first = 2, #KEYS, KEYS_EACH do
  local list, hash = KEYS[first], KEYS[first + 1]
  num_stored = num_stored + store(list, hash)
  if first == 2 then
    for index, name in ipairs(NAMES) do
      if (work[index] or 0) > 0 then redis.call('HINCRBY', hash, name, work[index]) end
    end
  end
  local waiting = 0
  for place = 2, 4 do waiting = waiting + redis.call('LLEN', KEYS[first + place]) end
  redis.call('HSET', hash, 'waiting', waiting, 'running', redis.call('ZCARD', KEYS[first + 5]),
    'workers', num_workers(KEYS[first + 6]))
  redis.call('EXPIRE', hash, expiry)
end
return num_stored

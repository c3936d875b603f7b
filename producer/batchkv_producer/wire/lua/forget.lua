-- Delete a batch from the server: first mark it, then delete a page of its rows in each step, then its
-- hash. The mark stays until then, so that another process can complete the work.
-- KEYS: batch hash, wip, finished, failed, canceled zsets, hash of due leaders. The zset of batches
-- is not in KEYS: workers may only remove entries from it.
-- ARGV: 'mark' | 'reuse', number of answers | 'page', number of lines | 'end'.
-- Returns for a page the number of lines that are gone by now, for 'reuse' the number of answers that
-- this step deleted, else 1; -1 when the batch is not there (any more), or not marked.
local batch = string.match(KEYS[1], '%x+$')
allow_when_full(batch)
if ARGV[1] == 'mark' then
  if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
  redis.call('HSET', KEYS[1], 'forgotten', 1)
  return 1
end
if ARGV[1] == 'reuse' then
  -- The rights of an older hub do not name these keys. Then there are none.
  local keys = redis.pcall('LPOP', 'batchkv:reuse:of:' .. batch, ARGV[2])
  if not keys or keys.err then return 0 end
  for _, entry in ipairs(keys) do
    local key, place = string.match(entry, '^(%x+):?(%d*)$')
    local at = key and tonumber(redis.call('ZSCORE', 'batchkv:reuse:order', key) or '')
    if at and (place == '' or at == tonumber(place)) then
      redis.call('DEL', 'batchkv:reuse:a:' .. key)
      redis.call('ZREM', 'batchkv:reuse:order', key)
    end
  end
  return #keys
end
local is_there = redis.call('EXISTS', KEYS[1]) == 1
if is_there and not is_forgotten(batch) then return -1 end
local held = 'batchkv:held:' .. batch
if ARGV[1] == 'end' then
  redis.call('ZREM', 'batchkv:batches', batch)
  redis.call('DEL', 'batchkv:res:' .. batch, 'batchkv:done:' .. batch, held,
    KEYS[1] .. ':rows', KEYS[1])
  return 1
end
if not is_there then return -1 end

local at = redis.call('HMGET', KEYS[1], 'forgotten_lines', 'last_line', 'total')
local first = tonumber(at[1] or '0') + 1
local last = math.min(first + tonumber(ARGV[2]) - 1, tonumber(at[2] or at[3]))
local lines, ids, keys = {}, {}, {}
for line = first, last do
  lines[#lines + 1] = line
  ids[#ids + 1] = batch .. '-' .. string.format('%.0f', line)
end
if #lines == 0 then return last end
local holders = redis.call('HMGET', held, unpack(lines))
for index, id in ipairs(ids) do
  local key = 'rq:job:' .. id
  for _, execution in ipairs({redis.call('HGET', key, 'bkv_exec') or '', holders[index] or ''}) do
    if execution ~= '' then
      redis.call('ZREM', KEYS[2], id .. ':' .. execution)
      redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    end
  end
  keys[#keys + 1] = key
  keys[#keys + 1] = 'batchkv:twins:' .. batch .. ':' .. string.format('%.0f', lines[index])
end
redis.call('DEL', unpack(keys))
for position = 3, 5 do redis.call('ZREM', KEYS[position], unpack(ids)) end
redis.call('HDEL', KEYS[6], unpack(ids))
redis.call('HDEL', held, unpack(lines))
redis.call('HDEL', 'batchkv:res:' .. batch, unpack(lines))
redis.call('HSET', KEYS[1], 'forgotten_lines', string.format('%.0f', last))
return last

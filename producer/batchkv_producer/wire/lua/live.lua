-- Put before the scripts that need it (`scripts.py`). Which workers answer live rows of a queue.
-- The record of a worker that does has `bkv_live`. Older workers have no such field.

-- Returns 'ok', or why no worker can answer now: 'loading', 'away' or 'nobody'; and the names of the
-- workers that can, or soon can.
local function live_workers(queue, needs)
  local names, found = {}, 'nobody'
  local rank = {nobody = 0, away = 1, loading = 2, ok = 3}
  local now = tonumber(redis.call('TIME')[1])
  for _, key in ipairs(redis.call('SMEMBERS', 'rq:workers:' .. queue)) do
    local its = redis.call('HMGET', key, 'birth', 'death', 'bkv_live', 'bkv_seen', 'bkv_beat_ms',
      'bkv_state', 'bkv_abilities')
    local is_able = its[1] and not its[2] and its[3]
    for need in string.gmatch(needs, '%S+') do
      is_able = is_able and string.find(' ' .. (its[7] or '') .. ' ', ' ' .. need .. ' ', 1, true)
    end
    if is_able then
      local beat = (tonumber(its[5] or '') or 15000) / 1000
      local state, kind = its[6] or '', 'ok'
      if now - (tonumber(its[4] or '') or now) > 2 * beat + 1 or string.find(state, '^paused')
          or string.find(state, '^drain') then
        kind = 'away'
      elseif string.find(state, '^loading') or string.find(state, '^downloading')
          or string.find(state, '^measuring') then
        kind = 'loading'
      end
      if rank[kind] > rank[found] then found = kind end
      if kind ~= 'away' then names[#names + 1] = string.match(key, '^rq:worker:(.*)$') end
    end
  end
  if found == 'nobody' and redis.call('EXISTS', 'batchkv:live:seen:' .. queue) == 1 then
    found = 'away'
  end
  return found, names
end

-- Wake these workers. Their subscription is RQ's, so that they need no other channel.
local function wake(names)
  for _, name in ipairs(names) do
    redis.call('PUBLISH', 'rq:pubsub:' .. name, '{"command": "live"}')
  end
end

-- started -> queued at the head of its priority's list, or failed: take back the jobs whose leases have
-- lapsed, in the order in which they were pulled, since consecutive jobs share prefixes.
-- `suspects.lua` counts the holder's end: one death if it is proved, else half a death. A job that has
-- died alone `max_deaths` times is failed in RQ's terms, and `settle` stores its error. Nothing is
-- counted if the holder sent a heartbeat after its last one for the job. Then it is alive and does not
-- know the job, because the answer to a pull or a give-back was lost. A holder that started after that
-- heartbeat is another process with the same name. A job that had not begun gets no death either.
-- KEYS: queue list, wip, failed zsets.
-- ARGV: largest number of leases to look at, max_deaths, failure ttl (s), either '' or the name of a
--       dead worker, whose leases are taken back although they still run, and the half deaths that
--       its end counts, the time of the server by which leases must have lapsed ('': now), and the
--       longest lease (s).
-- If a lease was renewed later than now, the server's clock was set back. Such a lease gets its old
-- length, counted from now.
-- Returns {requeued, failed}.
local limit, max_deaths, failure_ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local dead, halves = ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local members
if dead == '' then
  local long = now + tonumber(ARGV[7]) + 1
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], long, '+inf', 'LIMIT', 0, limit)) do
    local renewed = redis.pcall('HGET', 'rq:execution:' .. member, 'last_heartbeat')
    renewed = type(renewed) == 'string' and tonumber(renewed)
    if renewed and renewed > now + 1 then
      local ends = tonumber(redis.call('ZSCORE', KEYS[2], member))
      redis.call('ZADD', KEYS[2], now + ends - renewed, member)
    end
  end
  if ARGV[6] ~= '' then now = math.min(now, tonumber(ARGV[6])) end
  members = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)
else
  members = redis.call('ZRANGE', KEYS[2], 0, limit - 1)
end
local found = {}
for index, member in ipairs(members) do
  local id, execution = string.match(member, '^([%w_%-]+):([^:]*)$')
  local job = id and redis.call('HMGET', 'rq:job:' .. id, 'bkv_exec', 'worker_name',
    'last_heartbeat', 'started_at', 'bkv_begun') or {}
  local place = tonumber(string.match(execution or '', '(%d+)$') or '0')  -- `pull` counts them
  found[index] = {member, id or false, execution or false, job, job[4] or '', place}
end
table.sort(found, function(a, b)
  if a[5] ~= b[5] then return a[5] < b[5] end
  return a[6] < b[6]
end)
-- Holder -> the jobs that it had begun, in their order.
local begun, doomed, holders = {}, {}, {}
for _, entry in ipairs(found) do
  local id, execution, job = entry[2], entry[3], entry[4]
  if id and job[1] == execution and job[5] == '1' and (dead == '' or job[2] == dead) then
    local last_beat, born = unpack(job[2] and redis.pcall('HMGET', 'rq:worker:' .. job[2],
      'last_heartbeat', 'birth') or {}, 1, 2)
    local is_alive = dead == '' and last_beat and job[3] and last_beat > job[3]
      and not (born and born > job[3])
    local holder = job[2] or ''
    if not is_alive and not begun[holder] then
      begun[holder] = {}
      holders[#holders + 1] = holder
    end
    redis.call('ZREM', KEYS[2], entry[1])  -- see `allow_when_full`
    if not is_alive then table.insert(begun[holder], id) end
  end
end
for _, holder in ipairs(halves > 0 and holders or {}) do
  for id, is_doomed in pairs(count_death(begun[holder], halves, max_deaths)) do
    doomed[id] = is_doomed
  end
end
local requeued, failed = 0, 0
for index = #found, 1, -1 do
  local member, id, execution, job = unpack(found[index], 1, 4)
  local key = 'rq:job:' .. (id or '')
  local gone = id and not job[1] and not job[2] and redis.call('EXISTS', key) == 0
  if not id then
    redis.call('ZREM', KEYS[2], member)  -- not a lease
  elseif dead == '' or job[2] == dead or gone then
    redis.call('ZREM', KEYS[2], member)
    redis.call('DEL', 'rq:executions:' .. id, 'rq:execution:' .. id .. ':' .. execution)
    if job[1] == execution then
      local batch, line = string.match(id, '^(%x+)%-(%d+)$')
      redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
      release(batch, line)
      if batch and is_forgotten(batch) then
        redis.call('DEL', key)
      elseif doomed[id] then
        redis.call('HSET', key, 'status', 'failed')
        redis.call('EXPIRE', key, failure_ttl)
        redis.call('ZADD', KEYS[3], tonumber(time[1]) + failure_ttl, id)
        failed = failed + 1
      else
        redis.call('HSET', key, 'status', 'queued', 'worker_name', '')
        redis.call('LPUSH', list_of(KEYS[1], batch), id)
        requeued = requeued + 1
      end
    end
  end
end
return {requeued, failed}

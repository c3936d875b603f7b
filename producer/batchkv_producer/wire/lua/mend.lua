-- queued | deferred | started -> queued: queue a row again that a stock tool removed from its list, or
-- whose lease it removed. Called for rows that are in no list. A row that is in a list is then there
-- twice, and `pull` drops the second entry. A duplicate no longer waits for its leader.
-- KEYS: queue list, wip zset.  ARGV: time in ISO 8601, then id for each row.
-- Returns how many were queued.
local iso = ARGV[1]
local queued = 0
for position = 2, #ARGV do
  local id = ARGV[position]
  local key = 'rq:job:' .. id
  local batch, line = string.match(id, '^(%x+)%-(%d+)$')
  local job = redis.call('HMGET', key, 'status', 'bkv_exec', 'bkv_first')
  local held = job[2] and job[2] ~= ''
  local leased = held and redis.call('ZSCORE', KEYS[2], id .. ':' .. job[2])
  if batch and job[1] and not leased and not is_forgotten(batch)
      and redis.call('HEXISTS', 'batchkv:res:' .. batch, line) == 0 then
    redis.call('HDEL', key, 'bkv_exec', 'bkv_begun')
    release(batch, line)
    if job[1] == 'deferred' and job[3] then
      local lead = redis.call('HGET', 'rq:job:' .. batch .. '-' .. job[3], 'bkv_lead') or job[3]
      redis.call('LREM', 'batchkv:twins:' .. batch .. ':' .. lead, 1, line)
    end
    redis.call('HSET', key, 'status', 'queued', 'enqueued_at', iso, 'worker_name', '')
    redis.call('PERSIST', key)
    redis.call('RPUSH', list_of(KEYS[1], batch), id)
    queued = queued + 1
  end
end
return queued

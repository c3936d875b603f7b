-- Repair a batch after a script that failed midway (the server refused it a command). The counts become
-- those of the stored results, each line with a result gets into the finish order, and its job ends in
-- RQ's records.
-- Nothing changes if rows have ended or were retried since the results were read.
-- KEYS: batch hash, results, finish order, finished, failed, canceled zsets.
-- ARGV: results and entries of the finish order when they were read, ok, failed, canceled and cut rows
--       ('' each: leave them), time in ISO 8601, result ttl (s), failure ttl (s), number of lines that
--       the finish order lacks, these lines, then line, outcome for each job that may still be open.
-- Returns 1, or 0 when nothing was done.
local batch = string.match(KEYS[1], '%x+$')
local iso, result_ttl, failure_ttl = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
if is_forgotten(batch) or redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[1])
    or redis.call('LLEN', KEYS[3]) ~= tonumber(ARGV[2]) then
  return 0
end
local now = tonumber(redis.call('TIME')[1])
local first = 11 + tonumber(ARGV[10])
for position = 11, first - 1 do redis.call('RPUSH', KEYS[3], ARGV[position]) end
local kinds = {ok = 'finished', failed = 'failed', canceled = 'canceled'}
local registries = {ok = KEYS[4], failed = KEYS[5], canceled = KEYS[6]}
for position = first, #ARGV, 2 do
  local id, outcome = batch .. '-' .. ARGV[position], ARGV[position + 1]
  local key = 'rq:job:' .. id
  local job = redis.call('HMGET', key, 'status', 'bkv_exec')
  local is_held = job[2] and job[2] ~= ''
  if (job[1] == 'started' or job[1] == 'deferred') and not is_held then
    local ttl = outcome == 'ok' and result_ttl or failure_ttl
    redis.call('HSET', key, 'status', kinds[outcome], 'ended_at', iso)
    if outcome == 'ok' then redis.call('HSET', key, 'data', '') end
    redis.call('EXPIRE', key, ttl)
    redis.call('ZADD', registries[outcome], now + ttl, id)
  end
end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'ok', ARGV[3], 'failed', ARGV[4], 'canceled', ARGV[5], 'cut', ARGV[6],
    'running', redis.call('HLEN', 'batchkv:held:' .. batch))
  keep_if_done(batch, now)
end
return 1

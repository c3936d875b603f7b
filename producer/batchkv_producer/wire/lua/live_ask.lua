-- -> queued: a live row, unless nobody can answer it now or too many wait.
-- KEYS: list of waiting rows, row hash.  ARGV: row, queue, data, asker, asker's lease (s), needs,
-- fingerprint of the model ('' for any), most that may wait, timeout (s).
-- Returns 'ok', 'loading', 'away', 'nobody' or 'full'. Only with 'ok' anything was written.
local found, names = live_workers(ARGV[2], ARGV[6])
if found ~= 'ok' then return found end
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[8]) then return 'full' end
redis.call('HSET', KEYS[2], 'queue', ARGV[2], 'data', ARGV[3], 'to', ARGV[4], 'needs', ARGV[6],
  'fingerprint', ARGV[7], 'timeout', ARGV[9], 'sent', 0, 'again', 0)
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)  -- rows whose asker is gone need a worker to drop them
wake(names)
return 'ok'

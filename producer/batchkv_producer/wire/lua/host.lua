-- Write the record of a host: a worker that may serve several models, one process for each that it
-- holds. A claim writes it only if no host has claimed anything since the caller read the version.
-- KEYS: worker hash, set of all workers, hash of the version.  ARGV: version that a claim expects
-- ('' for a mere heartbeat), ttl of the record (s), then fields and values.
-- Returns {1, or 0 if another claim came first; the version}.
local time = redis.call('TIME')
local version = redis.call('HGET', KEYS[3], 'version') or '0'
if ARGV[1] ~= '' and ARGV[1] ~= version then return {0, version} end
redis.call('HSET', KEYS[1], 'bkv_seen', time[1], unpack(ARGV, 3))
redis.call('HDEL', KEYS[1], 'death')
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], KEYS[1])
if ARGV[1] ~= '' then version = tostring(redis.call('HINCRBY', KEYS[3], 'version', 1)) end
return {1, version}

-- Put before the scripts that need it (`transitions.py`).
-- Rows that their holder had begun when it died are suspects. Those of one death are a group, which
-- is run together and beside nothing else. If that holder dies too, what is left of the group is
-- halved; a row that is left alone is failed when it has died alone often enough. A death of which
-- there is no proof (a lease that lapsed: a lid was closed, a network was away) counts half.
-- `bkv_suspect` is the group's name, which ends in ".1" if it is of one row; `bkv_halves` are the
-- half deaths counted since the row came into its group, or ever if it is in none; `bkv_died` are
-- the whole deaths, all of them. Older versions write `bkv_deaths` alone: such a row is in the group
-- "old" after one death, and a group of its own after more, for then it died alone. They fail a row
-- at the fourth, so they are told of one alone: a group may see more.

-- A count of deaths; what is none is 0.
local function num_deaths(count)
  return tonumber(string.match(count or '', '^%d%d?%d?%d?$') or '0')
end

-- The group that a row is in, or nil.
local function suspect_group(id, group, deaths)
  if group and #group <= 50 and string.match(group, '^[%w%-]+%.?1?$') then return group end
  if num_deaths(deaths) < 1 then return nil end
  return num_deaths(deaths) == 1 and 'old' or 'old-' .. string.sub(id, -36) .. '.1'
end

-- Whether a group is of one row.
local function is_of_one(group) return string.sub(group, -2) == '.1' end

-- Half deaths counted so far; of a row that died alone in an older version those that it stands for.
local function halves_of(group, halves)
  halves = tonumber(string.match(halves or '', '^%d$') or '0')
  if string.sub(group, 1, 4) == 'old-' and is_of_one(group) then return math.max(2, halves) end
  return halves
end

-- A new group's name, of one row or of several.
local num_groups = 0
local function new_group(is_one)
  local time = redis.call('TIME')
  num_groups = num_groups + 1
  return string.format('%x-%x-%d', time[1], time[2], num_groups) .. (is_one and '.1' or '')
end

-- One holder is no more, and had begun these rows; `ids` are in the order in which it took them,
-- `halves` is 2 where its death is known and 1 where it is not. Returns which of them are to be
-- failed, as a set: those that have died alone `max_deaths` times.
local function count_death(ids, halves, max_deaths)
  local dying, order, doomed = {}, {}, {}
  for _, id in ipairs(ids) do
    local key = 'rq:job:' .. id
    local job = redis.call('HMGET', key, 'bkv_suspect', 'bkv_halves', 'bkv_deaths')
    local group = suspect_group(id, job[1], job[3]) or ''
    local sum = halves_of(group, job[2]) + halves
    if is_of_one(group) then
      redis.call('HSET', key, 'bkv_suspect', group, 'bkv_halves', math.min(sum, 9))
      doomed[id] = sum >= 2 * max_deaths
    elseif sum < 2 then
      redis.call('HSET', key, 'bkv_halves', sum)
    else
      if not dying[group] then
        dying[group] = {}
        order[#order + 1] = group
      end
      table.insert(dying[group], id)
    end
    if sum >= 2 and (halves == 2 or sum % 2 == 0) then
      local before = num_deaths(job[3])
      local died = redis.call('HGET', key, 'bkv_died')
      died = tonumber(string.match(died or '', '^%d%d?%d?%d?$') or before) + 1
      redis.call('HSET', key, 'bkv_died', died, 'bkv_deaths', math.max(1, before))
    end
  end
  for _, group in ipairs(order) do
    local members = dying[group]
    -- Rows that were no suspects become one group; those of a group become two.
    local size = group == '' and #members or math.ceil(#members / 2)
    for first = 1, #members, size do
      local last = math.min(first + size - 1, #members)
      local group_name = new_group(first == last)
      for index = first, last do
        redis.call('HSET', 'rq:job:' .. members[index], 'bkv_suspect', group_name)
        redis.call('HDEL', 'rq:job:' .. members[index], 'bkv_halves')
      end
    end
    -- The others of its group had ended: it died alone.
    if group ~= '' and #members == 1 and halves == 2 then
      redis.call('HSET', 'rq:job:' .. members[1], 'bkv_halves', 2)
      doomed[members[1]] = max_deaths <= 1
    end
  end
  return doomed
end

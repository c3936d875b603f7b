-- Put before the scripts that need it (`scripts.py`).
-- Rows that had begun on a worker when it died are suspects. The rows of one death are a group. The
-- group runs together, and nothing runs with it. If the next holder dies too, the rest of the group
-- is halved. A row that has died alone often enough is failed. A death without proof counts half: a
-- lease may lapse because a lid was closed or a network was away.
-- `bkv_suspect` is the group's name. It ends in ".1" if the group has one row. `bkv_halves` counts the
-- half deaths since the row entered its group, or all of them if it is in none. `bkv_died` counts all
-- whole deaths. Older versions write `bkv_deaths` alone. Such a row is in the group "old" after one
-- death. After more deaths it is a group of its own, since it then died alone. Older versions fail a
-- row at the fourth death. A group may see more, so `bkv_deaths` never says more than one.

-- A count of deaths; 0 if the field is no number.
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

-- Half deaths counted so far; at least 2 if an older version saw the row die alone.
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

-- One holder has died and had begun these rows. `ids` are in the order of the pull; `halves` is 2 if its
-- death is proved, else 1. Returns the set of those that must fail: they have died alone `max_deaths`
-- times.
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
    -- Rows that were no suspects become one group. A group of suspects becomes two.
    local size = group == '' and #members or math.ceil(#members / 2)
    for first = 1, #members, size do
      local last = math.min(first + size - 1, #members)
      local group_name = new_group(first == last)
      for index = first, last do
        redis.call('HSET', 'rq:job:' .. members[index], 'bkv_suspect', group_name)
        redis.call('HDEL', 'rq:job:' .. members[index], 'bkv_halves')
      end
    end
    -- The other rows of its group had ended, so it died alone.
    if group ~= '' and #members == 1 and halves == 2 then
      redis.call('HSET', 'rq:job:' .. members[1], 'bkv_halves', 2)
      doomed[members[1]] = max_deaths <= 1
    end
  end
  return doomed
end

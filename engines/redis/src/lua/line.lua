-- line.lua: what all verbs share. A line is the user's key and, in the same hash slot:
--   STATE          a string: "v2 token left whole capacity parts taken waiting value\nrecord", where
--                  token is the last one, left until when tombstones matter, record that of the
--                  holder of the whole line; "v2 token" when the line is empty. Version 1 wrote the
--                  same without "v2 ". A later "v2.N " may add words before the line's end, which
--                  can be dropped; anything else is for a newer palisade
--   STATE:claims   a hash: the records of all others
--   STATE:shares   holders that are not alone, by the end of their lease
--   STATE:queue    waiters by place          STATE:leases   waiters by the end of their lease
--   STATE:left     claims that were left before they arrived, by how long that is remembered
-- A record is "weight capacity token ttl evicted channel owner[\nvalue]".
-- The user's key is the truth: absent, or with another value than ours, every recorded holder is
-- lost. Times are the server's, in microseconds. A script is not undone when a write fails (out of
-- memory), so the key is written first: whatever is cut off after it, the next settle puts right.
-- All but the user's key are forgotten when nobody has asked for the line for IDLE ms.

local granted = {}
local changed = false

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Large numbers as text: Lua would write 1.7e+15.
local function text(number)
  return string.format('%.0f', number)
end

-- The millisecond after a microsecond: the key never ends before the lease.
local function millis(micros)
  return text(math.ceil(micros / 1000) + 1)
end

local function open(key, state)
  local line = {
    key = key, state = state, token = 0, left = 0,
    whole = false, capacity = 0, parts = 0, taken = 0, waiting = 0, value = false, record = '',
  }
  local stored = redis.call('GET', state)
  if not stored then return line end
  local version, words = string.match(stored, '^v(%d+)[.%d]* (.*)$')
  if version and version ~= '2' then error('NEWER the record of this line') end
  words = words or stored
  line.token = string.match(words, '^%d+$')
  if not line.token then
    local token, left, whole, capacity, parts, taken, waiting, value, record =
      string.match(words, '^(%d+) (%d+) (%d) (%d+) (%d+) (%d+) (%d+) (%x*)[^\n]*\n(.*)$')
    if not token then error('CORRUPT the record of this line') end
    line.token, line.left, line.whole = token, tonumber(left), whole == '1'
    line.capacity, line.parts = tonumber(capacity), tonumber(parts)
    line.taken, line.waiting = tonumber(taken), tonumber(waiting)
    line.value, line.record = value ~= '' and value, record
  end
  line.token = tonumber(line.token)
  return line
end

-- Puts off the end of what is kept beside the key.
local function remember(line)
  redis.call('PEXPIRE', line.state, IDLE)
  if line.waiting > 0 or line.parts > 0 then
    for _, set in ipairs({ ':claims', ':shares', ':queue', ':leases' }) do
      redis.call('PEXPIRE', line.state .. set, IDLE)
    end
  end
end

local function save(line)
  if not changed then return end
  if line.value or line.waiting > 0 or line.left > 0 then
    redis.call('SET', line.state, VERSION .. string.format('%.0f %.0f %d %.0f %.0f %.0f %.0f %s\n%s',
      line.token, line.left, line.whole and 1 or 0, line.capacity, line.parts, line.taken,
      line.waiting, line.value or '', line.whole and line.record or ''))
    remember(line)
  elseif line.token > 0 then
    redis.call('SET', line.state, VERSION .. text(line.token), 'PX', IDLE)
  else
    redis.call('DEL', line.state)
  end
end

local function parse(id, stored)
  local weight, capacity, token, ttl, evicted, channel, rest =
    string.match(stored, '^(%d+) (%d+) (%d+) (%d+) (%d) (%S+) (.*)$')
  if not weight then error('CORRUPT the record of this claim') end
  return {
    id = id, weight = tonumber(weight), capacity = tonumber(capacity), token = tonumber(token),
    ttl = tonumber(ttl), evicted = evicted == '1', channel = channel, rest = rest,
  }
end

-- The record of a claim as it is kept.
local function stored(line, id)
  if line.whole and line.value == id then return line.record end
  return redis.call('HGET', line.state .. ':claims', id)
end

local function record(line, id)
  local found = stored(line, id)
  return found and parse(id, found)
end

local function store(line, claim)
  local new = string.format('%.0f %.0f %.0f %.0f %d %s %s', claim.weight, claim.capacity,
    claim.token, claim.ttl, claim.evicted and 1 or 0, claim.channel, claim.rest)
  changed = true
  if line.whole and line.value == claim.id then
    line.record = new
  else
    redis.call('HSET', line.state .. ':claims', claim.id, new)
  end
end

-- A part names the capacity of the line while any part is in it.
local function count_part(line, claim, step)
  if claim.weight > 0 then
    line.parts = line.parts + step
    if line.parts == 0 then line.capacity = 0 else line.capacity = claim.capacity end
  end
end

-- The key lasts as long as the longest lease of those who share it.
local function arm(line)
  local longest = redis.call('ZREVRANGE', line.state .. ':shares', 0, 0, 'WITHSCORES')
  redis.call('PEXPIREAT', line.key, millis(tonumber(longest[2])))
end

local function fits(line, claim)
  if line.foreign then return false end
  if not line.value then return claim.weight == 0 or claim.weight <= claim.capacity end
  return claim.weight > 0 and not line.whole and line.taken + claim.weight <= claim.capacity
end

-- Makes a claim a holder until `ends`; false when the server is out of memory.
local function hold(line, claim, ends, now)
  if not line.value then
    local set = redis.pcall('SET', line.key, claim.id, 'PXAT', millis(ends))
    if type(set) == 'table' and set.err then return false, set end
    line.value, line.whole, line.taken = claim.id, claim.weight == 0, 0
  end
  if claim.weight > 0 then
    redis.call('ZADD', line.state .. ':shares', text(ends), claim.id)
    line.taken = line.taken + claim.weight
    arm(line)
  end
  line.token = math.max(line.token + 1, now)
  claim.token = line.token
  store(line, claim)
  return true
end

local function release_key(line)
  redis.call('DEL', line.key)
  line.value, line.whole, line.taken = false, false, 0
end

-- Takes a claim out of the line, wherever it stands.
local function remove(line, claim)
  changed = true
  if line.value ~= claim.id or not line.whole then
    redis.call('HDEL', line.state .. ':claims', claim.id)
  end
  count_part(line, claim, -1)
  if claim.token == 0 then
    redis.call('ZREM', line.state .. ':queue', claim.id)
    redis.call('ZREM', line.state .. ':leases', claim.id)
    line.waiting = line.waiting - 1
  elseif line.whole then
    release_key(line)
  else
    redis.call('ZREM', line.state .. ':shares', claim.id)
    line.taken = line.taken - claim.weight
    if redis.call('ZCARD', line.state .. ':shares') == 0 then release_key(line) else arm(line) end
  end
end

-- Forgets every holder: the key is gone, or somebody else's.
local function forget_holders(line)
  changed = true
  if line.whole then
    -- There is none: but after one write that a full server takes, it takes the others too.
    redis.call('HDEL', line.state .. ':claims', line.value)
  else
    for _, id in ipairs(redis.call('ZRANGE', line.state .. ':shares', 0, -1)) do
      redis.call('HDEL', line.state .. ':claims', id)
      line.parts = line.parts - 1
    end
    redis.call('DEL', line.state .. ':shares')
    if line.parts <= 0 then line.parts, line.capacity = 0, 0 end
  end
  line.value, line.whole, line.taken = false, false, 0
end

-- Removes those whose lease is over. The list is whole before the first is removed.
local function expire(line, set, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', line.state .. set, '-inf', text(now))) do
    local claim = record(line, id)
    if claim then
      remove(line, claim)
    else
      redis.call('ZREM', line.state .. set, id)
    end
  end
end

-- Grants, in order, what has come to the front. Nobody overtakes.
local function advance(line, now)
  while line.waiting > 0 do
    local id = redis.call('ZRANGE', line.state .. ':queue', 0, 0)[1]
    local claim = id and record(line, id)
    if not id then
      line.waiting, changed = 0, true
    elseif not claim then
      redis.call('ZREM', line.state .. ':queue', id)
      redis.call('ZREM', line.state .. ':leases', id)
      line.waiting, changed = line.waiting - 1, true
    else
      local ends = redis.call('ZSCORE', line.state .. ':leases', id)
      if not ends or not fits(line, claim) or not hold(line, claim, tonumber(ends), now) then return end
      redis.call('ZREM', line.state .. ':queue', id)
      redis.call('ZREM', line.state .. ':leases', id)
      -- Its record is in the state now.
      if line.whole then redis.call('HDEL', line.state .. ':claims', id) end
      line.waiting = line.waiting - 1
      local before = granted[claim.channel]
      granted[claim.channel] = (before and before .. ',' or '') .. id .. ' ' .. text(claim.token)
    end
  end
end

-- Compares the line with the truth, removes what is over, grants what has come to the front.
-- A key of another type is an error here, before anything is written.
local function settle(line, now)
  local value = redis.call('GET', line.key)
  if line.value and value ~= line.value then forget_holders(line) end
  line.foreign = not line.value and value
  if line.value and not line.whole then expire(line, ':shares', now) end
  if line.waiting > 0 then
    expire(line, ':leases', now)
    advance(line, now)
  end
end

-- When a claim's lease ends, in microseconds of the server.
local function ends_at(line, claim, now)
  if claim.token == 0 then
    return tonumber(redis.call('ZSCORE', line.state .. ':leases', claim.id) or now)
  elseif line.whole then
    -- The key was given a little more than the lease.
    return now + math.min(redis.call('PTTL', line.key), claim.ttl) * 1000
  end
  return tonumber(redis.call('ZSCORE', line.state .. ':shares', claim.id) or now)
end

-- A push can be lost and is sent to nobody when another tool lets go: the first in line looks
-- again after this many microseconds at the latest. Only one claim per line is the first.
local LOST_PUSH, FOREIGN = 500000, 200000

-- In how many microseconds a waiting claim should look again by itself.
local function due(line, claim, now)
  local rank = redis.call('ZRANK', line.state .. ':queue', claim.id) or 0
  if rank > 0 then
    local ahead = redis.call('ZRANGE', line.state .. ':queue', rank - 1, rank - 1)[1]
    return math.max(tonumber(redis.call('ZSCORE', line.state .. ':leases', ahead) or now) - now, 0)
  end
  if line.value and not line.whole then
    local first = redis.call('ZRANGE', line.state .. ':shares', 0, 0, 'WITHSCORES')
    return math.max(math.min(tonumber(first[2] or now) - now, LOST_PUSH), 0)
  end
  local left = redis.call('PTTL', line.key)
  local most = line.foreign and FOREIGN or LOST_PUSH
  if left < 0 then return most end
  return math.min((left + 1) * 1000, most)
end

-- Where a claim stands: place, token, lease left, when to look again. While it waits, the token is
-- the line's last: that of its grant will be greater.
local function standing(line, claim, now)
  local left = math.max(ends_at(line, claim, now) - now, 0)
  if claim.token > 0 then return 'held ' .. text(claim.token) .. ' ' .. text(left) .. ' 0' end
  return 'waiting ' .. text(line.token) .. ' ' .. text(left) .. ' ' .. text(due(line, claim, now))
end

-- Saves, and tells exactly those who were granted, each client with one message: "ID TOKEN,...".
-- A user without the right to publish still locks; waiters then find out by looking.
local function finish(line, answer)
  save(line)
  for channel, grants in pairs(granted) do
    redis.pcall('PUBLISH', 'palisade:wake:' .. channel, grants)
  end
  return answer
end

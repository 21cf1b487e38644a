-- leave_alone.lua: leave, by the one holder of a whole line: with nobody behind it, or, if it comes
-- alone, with one next that wants the whole line too. Stands before everything else, as
-- enter_idle.lua does; what it leaves over goes on to leave.lua, which would do the same. While one
-- claim holds a whole line that it took whole, the last token is its own.

local KEYS, ARGV = KEYS, ARGV

-- Hands the line over: false, and nothing is changed, if the next is not there for the whole of it
-- with a lease that lasts, or the server is full.
local function hand_over(key, state, count, waiting)
  local call = redis.call
  local id = call('ZRANGE', state .. ':queue', 0, 0)[1]
  local record = id and call('HGET', state .. ':claims', id)
  if not record then return false end
  local rest, channel = string.match(record, '^0 0 0 (%d+ %d (%S+) .*)$')
  local ends = rest and tonumber(call('ZSCORE', state .. ':leases', id) or 0)
  local time = call('TIME')
  local now = time[1] * 1000000 + time[2]
  if not rest or ends <= now then return false end
  local held = redis.pcall('SET', key, id, 'PXAT', string.format('%.0f', math.ceil(ends / 1000) + 1))
  if not held.ok then return false end
  local token = string.format('%.0f', math.max(count + 1, now))
  call('SET', state, token .. ' 0 1 0 0 0 ' .. string.format('%d', waiting - 1) .. ' ' .. id
    .. '\n0 0 ' .. token .. ' ' .. rest)
  call('ZREM', state .. ':queue', id)
  call('ZREM', state .. ':leases', id)
  call('HDEL', state .. ':claims', id)
  redis.pcall('PUBLISH', 'palisade:wake:' .. channel, id .. ' ' .. token)
  return true
end

-- One that comes alone.
if #KEYS == 2 then
  local key, state, id, count = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
  local found, head = redis.pcall('GET', state), count .. ' 0 1 0 0 0 '
  if type(found) == 'string' and string.sub(found, 1, #head) == head
      and redis.pcall('GET', key) == id then
    local waiting, holder = string.match(found, '^(%d+) (%x+)\n', #head + 1)
    if holder == id and waiting == '0' then
      redis.call('DEL', key)
      redis.call('SET', state, count)
      return { id, 'left' }
    elseif holder == id and hand_over(key, state, count, waiting) then
      return { id, 'left' }
    end
  end
end

local answers, left_over = { ARGV[1] }, {}

if #KEYS == 2 then
  left_over[1] = 1
else
  local sub = string.sub
  local gone, writes = {}, {}
  local read = redis.call('MGET', unpack(KEYS))
  for at = 1, #KEYS / 2 do
    local id, count, state = ARGV[2 * at - 1], ARGV[2 * at], read[2 * at]
    if state and read[2 * at - 1] == id and sub(state, 1, 61) == count .. ' 0 1 0 0 0 0 ' .. id then
      local next = #gone
      gone[next + 1] = KEYS[2 * at - 1]
      writes[2 * next + 1] = KEYS[2 * at]
      writes[2 * next + 2] = count
      answers[at + 1] = 'left'
    else
      left_over[#left_over + 1] = at
    end
  end
  if #gone > 0 then
    redis.call('DEL', unpack(gone))
    redis.call('MSET', unpack(writes))
  end
end
if #left_over == 0 then return answers end


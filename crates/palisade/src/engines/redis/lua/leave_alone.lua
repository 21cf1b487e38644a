-- leave_alone.lua: leave, by the one holder of a whole line with nobody behind it. Stands before
-- everything else, as enter_idle.lua does; what it leaves over goes on to leave.lua. While one
-- claim holds a whole line that it took whole, the last token is its own.

local KEYS, ARGV = KEYS, ARGV

-- One that comes alone: the same as below, without the lists.
if #KEYS == 2 then
  local id, count, state = ARGV[1], ARGV[2], redis.pcall('GET', KEYS[2])
  if type(state) == 'string' and string.sub(state, 1, 61) == count .. ' 0 1 0 0 0 0 ' .. id
      and redis.pcall('GET', KEYS[1]) == id then
    redis.call('DEL', KEYS[1])
    redis.call('SET', KEYS[2], count)
    return { id, 'left' }
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


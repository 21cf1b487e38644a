-- enter_idle.lua: enter, for the whole of lines that nobody is in. Stands before everything else,
-- because even defining the functions of line.lua costs more than this does. What it leaves over
-- goes on to enter.lua, which also describes the arguments; the layout of the keys is in line.lua.

local KEYS, ARGV = KEYS, ARGV

-- One that comes alone: the same as below, without the lists.
if #KEYS == 2 then
  local last, lasts = redis.pcall('GET', KEYS[2]), string.match(ARGV[2], '^0 0 %d (%d+)$')
  if lasts and (not last or (#last == 16 and not string.find(last, '%D'))) then
    local held = redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', lasts)
    if held and held.ok then
      local time = redis.call('TIME')
      local token = time[1] .. string.sub('00000' .. time[2], -6)
      if last and last >= token then token = string.format('%.0f', last + 1) end
      redis.call('SET', KEYS[2],
        token .. ' 0 1 0 0 0 0 ' .. ARGV[1] .. '\n0 0 ' .. token .. ARGV[3])
      return { ARGV[1], 'held ' .. token }
    end
  end
end

local answers, left_over = { ARGV[1] }, {}

if #KEYS == 2 then
  left_over[1] = 1
else
  local call, find = redis.pcall, string.find
  local states, writes, clock, granted, passed = {}, {}, false, false, {}
  local how, whole, lasts
  for at = 1, #KEYS / 2 do states[at] = KEYS[2 * at] end
  local read = redis.call('MGET', unpack(states))
  for at = 1, #states do
    local state, last, id, held = states[at], read[at], ARGV[3 * at - 2], false
    -- Nearly always as it was for the one before.
    if how ~= ARGV[3 * at - 1] then
      how = ARGV[3 * at - 1]
      whole, lasts = string.match(how, '^(0 0) %d (%d+)$')
    end
    -- An idle line is its last token and nothing else. Another tool may have the key, or it may
    -- be no string: NX refuses both.
    if whole and not passed[state] and (not last or (#last == 16 and not find(last, '%D'))) then
      held = call('SET', KEYS[2 * at - 1], id, 'NX', 'PX', lasts)
    end
    if held and held.ok then
      if not clock then
        -- Microseconds as text of 16 digits, which sorts as the numbers do until the year 2286.
        local time = call('TIME')
        clock = time[1] .. string.sub('00000' .. time[2], -6)
        granted = 'held ' .. clock
      end
      local token, answer = clock, granted
      if last and last >= clock then
        token = string.format('%.0f', last + 1)
        answer = 'held ' .. token
      end
      local next = #writes
      writes[next + 1] = state
      writes[next + 2] = token .. ' 0 1 0 0 0 0 ' .. id .. '\n0 0 ' .. token .. ARGV[3 * at]
      answers[at + 1] = answer
    else
      left_over[#left_over + 1] = at
      -- Nobody overtakes, here either.
      passed[state] = true
    end
  end
  if clock then redis.call('MSET', unpack(writes)) end
end
if #left_over == 0 then return answers end


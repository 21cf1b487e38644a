-- enter_idle.lua: enter, for the whole of lines that nobody is in. Stands before everything else,
-- because even defining the functions of line.lua costs more than this does. What it leaves over
-- goes on to enter.lua, which also describes the arguments; the layout of the keys is in line.lua.

local answers, left_over = { ARGV[1] }, {}

do
  local states, writes, clock, passed = {}, {}, false, {}
  for at = 1, #KEYS / 2 do states[at] = KEYS[2 * at] end
  local read = redis.call('MGET', unpack(states))
  for at = 1, #states do
    local id, last, held = ARGV[5 * at - 4], read[at], false
    -- An idle line is its last token and nothing else. Another tool may have the key, or it may
    -- be no string: NX refuses both.
    if ARGV[5 * at - 3] == '0 0 ' and not passed[states[at]]
        and (not last or (#last == 16 and not string.find(last, '%D'))) then
      held = redis.pcall('SET', KEYS[2 * at - 1], id, 'NX', 'PX', ARGV[5 * at - 2])
    end
    if held and held.ok then
      if not clock then
        -- Microseconds as text of 16 digits, which sorts as the numbers do until the year 2286.
        local time = redis.call('TIME')
        clock = time[1] .. string.sub('00000' .. time[2], -6)
      end
      local token = clock
      if last and last >= token then token = string.format('%.0f', last + 1) end
      writes[#writes + 1] = states[at]
      writes[#writes + 1] = token .. ' 0 1 0 0 0 0 ' .. id .. '\n0 0 ' .. token .. ARGV[5 * at - 1]
      answers[at + 1] = 'held ' .. token
    else
      left_over[#left_over + 1] = at
      -- Nobody overtakes, here either.
      passed[states[at]] = true
    end
  end
  if clock then redis.call('MSET', unpack(writes)) end
end
if #left_over == 0 then return answers end


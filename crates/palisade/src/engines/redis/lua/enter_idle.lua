-- enter_idle.lua: enter, on a line that nobody is in. Stands before everything else, because
-- even defining the functions of line.lua costs more than this does. The layout of the keys is
-- described there, the arguments in enter.lua. Everything else goes on to those.

do
  local state = redis.call('HMGET', KEYS[2], 'token', 'line', 'left')
  -- With tombstones about, line.lua must look at them. Another tool may have the key, or it may
  -- be no string: NX refuses both.
  if not state[2] and not state[3] and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[3]) then
    local time = redis.call('TIME')
    -- Microseconds as text of 16 digits, which sorts as the numbers do until the year 2286.
    local token = time[1] .. string.sub('00000' .. time[2], -6)
    if state[1] and state[1] >= token then token = string.format('%.0f', state[1] + 1) end
    local line = '1 0 0 0 0 ' .. ARGV[1]
    if ARGV[2] ~= '0 0 ' then
      local weight, capacity = string.match(ARGV[2], '(%d+) (%d+)')
      line = '0 ' .. capacity .. ' 1 ' .. weight .. ' 0 ' .. ARGV[1]
      redis.call('ZADD', KEYS[2] .. ':shares', string.format('%.0f',
        time[1] * 1000000 + time[2] + (ARGV[3] - 2) * 1000), ARGV[1])
    end
    redis.call('HSET', KEYS[2], 'token', token, 'line', line, ARGV[1], ARGV[2] .. token .. ARGV[4])
    return ARGV[1] .. ' held ' .. token
  end
end


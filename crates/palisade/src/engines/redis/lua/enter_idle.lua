-- enter_idle.lua: enter, on a line that nobody is in. Stands before everything else, because
-- even defining the functions of line.lua costs more than this does. The layout of the keys is
-- described there, the arguments in enter.lua. Everything else goes on to those.

do
  local state = redis.call('HMGET', KEYS[2], 'token', 'line', 'left')
  if not state[2] then
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    if not state[3] or tonumber(state[3]) <= now then
      local ends = now + ARGV[5] * 1000
      -- Another tool may have it, or the key may be no string: NX refuses both.
      if redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PXAT',
          string.format('%.0f', math.ceil(ends / 1000) + 1)) then
        local token = now
        if state[1] and tonumber(state[1]) >= now then token = tonumber(state[1]) + 1 end
        token = string.format('%.0f', token)
        local line = '1 0 0 0 0 ' .. ARGV[2]
        if ARGV[3] ~= '0' then
          redis.call('ZADD', KEYS[2] .. ':shares', string.format('%.0f', ends), ARGV[2])
          line = '0 ' .. ARGV[4] .. ' 1 ' .. ARGV[3] .. ' 0 ' .. ARGV[2]
        end
        redis.call('HSET', KEYS[2], 'token', token, 'line', line, ARGV[2], ARGV[3] .. ' ' ..
          ARGV[4] .. ' ' .. token .. ' ' .. ARGV[5] .. ' 0 ' .. ARGV[7] .. ' ' .. ARGV[8])
        redis.pcall('PUBLISH', ARGV[1], KEYS[1])
        return { 'held', token, ARGV[5] .. '000', '0' }
      end
    end
  end
end


-- leave_free.lua: leave, by the one holder of a whole line with nobody behind it. Stands before
-- line.lua, as enter_free.lua does; everything else goes on to leave.lua.

local state, head = redis.pcall('GET', KEYS[2]), VERSION .. ARGV[2] .. ' 0 1 0 0 0 0 ' .. ARGV[1]
if type(state) == 'string' and string.sub(state, 1, #head + 1) == head .. '\n'
    and redis.pcall('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], VERSION .. ARGV[2], 'PX', IDLE)
  return ARGV[1] .. ' left'
end


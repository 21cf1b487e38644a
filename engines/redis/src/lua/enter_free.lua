-- enter_free.lua: enter, for the whole of a line that nobody is in. Stands before line.lua, because
-- even defining its functions costs more than this does. Whatever is not so simple goes on to
-- enter.lua, which also describes the arguments.

local lasts = string.match(ARGV[2], '^0 0 %d (%d+)$')
local idle = lasts and redis.pcall('GET', KEYS[2])
local last = type(idle) == 'string' and string.match(idle, '^v2 (%d+)$')
-- Another tool may have the key, or it may be no string: NX refuses both.
local free = lasts and (last or not idle)
  and redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', lasts)
if free and free.ok then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local token = string.format('%.0f', math.max(now, (last or 0) + 1))
  redis.call('SET', KEYS[2],
    VERSION .. token .. ' 0 1 0 0 0 0 ' .. ARGV[1] .. '\n0 0 ' .. token .. ARGV[3], 'PX', IDLE)
  return ARGV[1] .. ' held ' .. token
end


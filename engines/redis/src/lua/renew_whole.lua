-- renew_whole.lua: renew, for the holder of a whole line. Stands before line.lua, as enter_free.lua
-- does; everything else goes on to renew.lua.

local state = redis.pcall('GET', KEYS[2])
local ttl = type(state) == 'string' and string.match(state,
  '^v2 %d+ %d+ 1 %d+ %d+ %d+ %d+ ' .. ARGV[1] .. '\n0 0 ' .. ARGV[2] .. ' (%d+) 0 ')
-- 2: the server counts in whole ms, and the key must not end before the lease.
if ttl and redis.pcall('GET', KEYS[1]) == ARGV[1]
    and redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ttl + 2)) == 1 then
  redis.call('PEXPIRE', KEYS[2], IDLE)
  return ARGV[1] .. ' ' .. ttl
end


-- vote_free.lua: vote, for the whole of a line that nobody is in or that another has. As
-- enter_free.lua, but the token is floored by what the client proposes and not by the clock of this
-- server, so that independent servers answer alike. Stands before line.lua; whatever is not so
-- simple goes on to vote.lua, which also describes the arguments.

local lasts = string.match(ARGV[2], '^0 0 (%d+)$')
local idle = lasts and redis.pcall('GET', KEYS[2])
local last = type(idle) == 'string' and string.match(idle, '^v2 (%d+)$')
local free = lasts and (last or not idle)
  and redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', lasts)
if free and free.ok then
  local token = ARGV[4]
  if last and last + 1 > tonumber(token) then token = string.format('%.0f', last + 1) end
  redis.call('SET', KEYS[2],
    VERSION .. token .. ' 0 1 0 0 0 0 ' .. ARGV[1] .. '\n0 0 ' .. token .. ARGV[3], 'PX', IDLE)
  return ARGV[1] .. ' ' .. ARGV[4] .. ' held ' .. token
end
local holder = lasts and redis.pcall('GET', KEYS[1])
if type(holder) == 'string' and holder ~= ARGV[1] then
  local due = string.format('%.0f', (redis.call('PTTL', KEYS[1]) + 1) * 1000)
  return ARGV[1] .. ' ' .. ARGV[4] .. ' busy ' .. due
end


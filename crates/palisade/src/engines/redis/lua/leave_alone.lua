-- leave_alone.lua: leave, by the one holder of the whole line with nobody behind it. Stands
-- before everything else, as enter_idle.lua does. While one claim holds the whole line, the last
-- token is its own. Everything else goes on to leave.lua.

do
  local state = redis.call('HMGET', KEYS[2], 'line', 'token')
  if ARGV[3] == '0' and state[1] == '1 0 0 0 0 ' .. ARGV[1]
      and (ARGV[2] == '0' or ARGV[2] == state[2])
      and redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1])
    redis.call('HDEL', KEYS[2], 'line', ARGV[1])
    return ARGV[1] .. ' left'
  end
end


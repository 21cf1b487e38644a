-- leave_alone.lua: leave, by the one holder of the whole line with nobody behind it. Stands
-- before everything else, as enter_idle.lua does. Everything else goes on to leave.lua.

do
  local state = redis.call('HMGET', KEYS[2], 'line', ARGV[2])
  if ARGV[4] == '0' and state[2] and state[1] == '1 0 0 0 0 ' .. ARGV[2]
      and (ARGV[3] == '0' or ARGV[3] == string.match(state[2], '^%d+ %d+ (%d+)'))
      and redis.call('GET', KEYS[1]) == ARGV[2] then
    redis.call('DEL', KEYS[1])
    redis.call('HDEL', KEYS[2], 'line', ARGV[2])
    redis.pcall('PUBLISH', ARGV[1], KEYS[1])
    return 1
  end
end


-- leave_alone.lua: leave, by the one holder of a whole line with nobody behind it. Stands before
-- everything else, as enter_idle.lua does; what it leaves over goes on to leave.lua. While one
-- claim holds a whole line that it took whole, the last token is its own.

local answers, left_over = { ARGV[1] }, {}

do
  local read = redis.call('MGET', unpack(KEYS))
  local gone, writes = {}, {}
  for at = 1, #KEYS / 2 do
    local id, count, state = ARGV[3 * at - 2], ARGV[3 * at - 1], read[2 * at]
    local token = state and string.sub(state, 1, 16)
    if state and ARGV[3 * at] == '0' and read[2 * at - 1] == id
        and string.find(state, ' 0 1 0 0 0 0 ', 17, true) == 17
        and string.find(state, id, 30, true) == 30
        and (count == '0' or count == token) then
      gone[#gone + 1] = KEYS[2 * at - 1]
      writes[#writes + 1] = KEYS[2 * at]
      writes[#writes + 1] = token
      answers[at + 1] = 'left'
    else
      left_over[#left_over + 1] = at
    end
  end
  if #gone > 0 then
    redis.call('DEL', unpack(gone))
    redis.call('MSET', unpack(writes))
  end
end
if #left_over == 0 then return answers end


-- leave.lua: gives places up, where the incarnation matches, and grants and wakes the next.
-- KEYS: the key and the state of each.  ARGV: of each the id, and the count (0: unknown), with a
-- "?" behind it if a copy of its enter may still be under way.
-- Answers the first id, then for each, in order: "left" | "absent" when it was not in the line
-- | "error ...".

-- How long a claim that was left before it arrived is remembered, in microseconds: far longer
-- than a request can be under way, short enough that the memory stays small.
local REMEMBERED = 300 * 1000000

local now = clock()

local function leave(key, state, id, count, in_doubt)
  local line = open(key, state)
  settle(line, now)

  local claim = record(line, id)
  local found = claim and (count == 0 or claim.token == 0 or claim.token == count)
  if found then
    remove(line, claim)
    advance(line, now)
  end

  -- A copy of its enter may still be under way: it must find that it was left.
  if in_doubt or (not found and count == 0) then
    local ends = now + REMEMBERED
    local tombs = state .. ':left'
    redis.call('ZREMRANGEBYSCORE', tombs, '-inf', text(now))
    redis.call('ZADD', tombs, text(ends), id)
    redis.call('PEXPIREAT', tombs, millis(ends))
    line.left, changed = ends, true
  end
  return finish(line, found and 'left' or 'absent')
end

return each(left_over, answers, function(at)
  local count, in_doubt = string.match(ARGV[2 * at], '^(%d+)(%??)$')
  return leave(KEYS[2 * at - 1], KEYS[2 * at], ARGV[2 * at - 1], tonumber(count), in_doubt == '?')
end)
